"""A classifier from words: the vectors of prompts become the rows of a head.

    logit = scale cos(image, text) + bias

CLIP's scores are a softmax over the classes, SigLIP's a sigmoid of each class by itself. The result is an
ordinary bundle without a text tower, for everything that takes a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vitrail.base.errors import InputError
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.scores import Scores
from vitrail.weights.text.prompts import Prompts

if TYPE_CHECKING:
    from torch import Tensor


def bake_prompts(bundle: Bundle, prompts: Prompts) -> Bundle:
    """The image tower with a head for these classes."""
    import torch

    from vitrail.model import ViT
    from vitrail.model.init import EmptyParameters

    text, old = bundle.text, bundle.model
    projection = embedding_projection(bundle)
    biased = bool(text.bias) or "bias" in projection
    config = replace(
        old.config,
        head="cosine",
        classes=len(prompts.labels),
        head_bias=biased,
        head_hidden=text.width if projection else None,
    )
    rows = text.scale * prompt_vectors(bundle, prompts)
    state = {name: tensor for name, tensor in old.state_dict().items() if not name.startswith("head.")}
    state |= {f"head.fc1.{name}": tensor for name, tensor in projection.items()}
    state["head.fc2.weight"] = rows.to(next(old.parameters()))
    if biased:
        state["head.fc2.bias"] = torch.full_like(rows[:, 0], text.bias).to(next(old.parameters()))
        if projection:
            state.setdefault("head.fc1.bias", torch.zeros_like(projection["weight"][:, 0]))
    with EmptyParameters():
        model = ViT(config)
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
    return Bundle(
        model=model.to(next(old.parameters())).train(old.training),
        preprocess=bundle.preprocess,
        labels=prompts.labels,
        scores=Scores(activation=text.activation),
        card=bundle.card,
        native=bundle.native,
        notes=[*bundle.notes, describe_scores(bundle, prompts)],
    )


def prompt_vectors(bundle: Bundle, prompts: Prompts) -> Tensor:
    """One unit vector per class: the mean of its texts' unit vectors, normalized again: (K, E)."""
    import torch
    from torch.nn import functional as F

    vectors = bundle.text([text for texts in prompts.texts for text in texts])
    parts = vectors.split([len(texts) for texts in prompts.texts])
    return F.normalize(torch.stack([part.mean(dim=0) for part in parts]), dim=-1)


def embedding_projection(bundle: Bundle) -> dict[str, Tensor]:
    """The weight, and the bias if there is one, that project a pooled vector into the space of the texts.

    CLIP's projection is the head of the image tower; SigLIP's pooled vector is in that space already.
    """
    config, text = bundle.model.config, bundle.text
    if config.head == "linear" and config.classes == text.width and bundle.labels is None:
        return {name: parameter.detach() for name, parameter in bundle.model.head.named_parameters()}
    if config.classes == 0 and config.pooled_width == text.width:
        return {}
    raise InputError(
        f"The texts of this model are vectors of {text.width}, but its image tower gives "
        f"{config.classes or config.pooled_width}; load the file with both towers as it was published."
    )


def describe_scores(bundle: Bundle, prompts: Prompts) -> str:
    """A sentence on what the scores are."""
    count, classes = sum(map(len, prompts.texts)), len(prompts.labels)
    what = f"Zero-shot: {classes:,} classes from {count:,} prompts"
    if bundle.text.activation == "sigmoid":
        return f"{what}; each score is a sigmoid (SigLIP), and scores do not add up to 1."
    return f"{what}; scores are a softmax over these classes (CLIP)."
