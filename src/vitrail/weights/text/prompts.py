"""Zero-shot classification: classes, the texts that describe them, and a head made of their vectors.

A class is described by templates that its name is put into ("a photo of a {}"), or by texts of its own. The
vectors of all its texts are averaged, which is better than a single one (Radford et al. 2021, Section 3.1.4),
and become a row of the head:

    logit = scale cos(image, text) + bias

CLIP's scores are a softmax over the classes, SigLIP's a sigmoid of each class by itself. The result is an
ordinary bundle without a text tower, for everything that takes a model.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import InputError, option, printable
from vitrail.base.fields import short_repr
from vitrail.base.safe_files import parse_json, read_limited
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.scores import Scores

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATES = (
    "a photo of a {}",
    "a photo of the {}",
    "a close-up photo of a {}",
    "a photo of several {}",
    "a photo of a {} in its surroundings",
    "a picture of a {}, taken indoors",
    "a picture of a {}, taken outdoors",
)
"""The default ensemble."""

_MAX_BYTES = 10_000_000
_MAX_TEXTS = 1_000_000
_MAX_LABELS = 25_000  # ImageNet-22k has 21,843
_MAX_LABEL = 500  # characters
_FILES = (".txt", ".csv", ".tsv", ".json", ".jsonl")
_BAD = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffd]"
)  # control, broken or replaced characters


@dataclass(frozen=True)
class Prompts:
    """Classes, each with the texts that describe it."""

    labels: list[str]
    texts: list[list[str]]

    def __post_init__(self) -> None:
        _check_names(self.labels)
        repeated = next((label for label, count in Counter(self.labels).items() if count > 1), None)
        empty = next((one for one, texts in zip(self.labels, self.texts, strict=True) if not texts), None)
        if len(self.labels) < 2 or repeated is not None or "" in self.labels or empty is not None:
            what = f"{len(self.labels)}"
            what = f"{printable(repeated)!r} twice" if repeated is not None else what
            what = f"no text for {printable(empty)!r}" if empty is not None else what
            raise InputError(
                f"Prompts need at least two different classes, each with a text, but got {what}; give labels "
                "such as cat,dog."
            )
        if sum(map(len, self.texts)) > _MAX_TEXTS:
            raise InputError(f"There are more than {_MAX_TEXTS:,} prompts; use fewer templates.")


def _check_names(labels: Sequence[str]) -> None:
    """Refuse too many names, and names that are no text."""
    if len(labels) > _MAX_LABELS:
        raise InputError(
            f"There are {len(labels):,} classes, and the limit is {_MAX_LABELS:,}; use fewer labels."
        )
    for label in labels:
        if _BAD.search(label):
            raise InputError(
                f"The name of a class must be text without control characters or \ufffd (the mark of a wrong "
                f"encoding), not {printable(ascii(label), 60)}; correct it, or save the file as UTF-8."
            )
        if len(label) > _MAX_LABEL:
            raise InputError(
                f"The name of a class may have {_MAX_LABEL} characters, and {printable(label, 40)!r} has "
                f"{len(label):,}; shorten it."
            )


def fill_templates(labels: Sequence[str], templates: Sequence[str] | None = None) -> Prompts:
    """Every label in every template; in a prompt, the underscores of a name are spaces."""
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise InputError(f"labels must be a list of names, not {short_repr(labels)}.")
    templates = TEMPLATES if templates is None else tuple(templates)
    for template in templates:
        if not isinstance(template, str) or "{}" not in template:
            raise InputError(
                f"A template must contain {{}} in place of the class, such as 'a photo of a {{}}', not "
                f"{short_repr(template)}."
            )
    names = [label.strip() for label in labels]
    words = [name.replace("_", " ") for name in names]
    return Prompts(names, [[template.replace("{}", word) for template in templates] for word in words])


def read_prompts(labels: str | None, prompts: Sequence[str] | None, templates: Path | None) -> Prompts:
    """The prompts of a command's options.

    Args:
        labels: "cat,dog", or a file with a name on each line.
        prompts: templates with {}; or one file: names, one on each line, or a JSON object of names with their
            texts.
        templates: a file with a template on each line.
    """
    given = list(prompts or ())
    files = [text for text in given if "{}" not in text]
    own = [text for text in given if "{}" in text]
    if templates is not None:
        lines = _read_lines(templates, "templates")
        if not lines:
            raise InputError(
                f"{option('templates')}: {printable(templates)} is empty; write a template on each line, "
                "such as 'a photo of a {}', or leave it out for the default ones."
            )
        own += lines
    if not files:
        if labels is None:
            raise InputError(
                f"Zero-shot needs the names of the classes; give {option('labels', 'cat,dog')} or a file."
            )
        return fill_templates(_read_labels(labels), own or None)
    if labels is not None and not os.path.isfile(files[0]):
        raise InputError(
            f"A prompt needs {{}} in place of the class, such as 'a photo of a {{}}', and "
            f"{printable(files[0])!r} has none; add it."
        )
    if len(files) > 1 or labels is not None:
        raise InputError(
            f"{option('prompts')} takes templates with {{}} or one file with the classes, not "
            f"{printable(files[0])!r} as well; leave out one of them."
        )
    path = Path(files[0])
    if path.suffix.lower() != ".json":
        return fill_templates(_read_lines(path, "prompts"), own or None)
    if own:
        raise InputError(
            f"{printable(path)} has the texts of every class, so templates have no use; omit them."
        )
    return _parse_texts(parse_json(_read(path, "prompts"), str(path)), path)


def _parse_texts(value: Any, path: Path) -> Prompts:
    """Prompts from {"cat": ["a photo of a cat", ...], ...}."""
    rows = value.items() if isinstance(value, dict) else []
    texts = {name: [text] if isinstance(text, str) else text for name, text in rows}
    valid = all(
        isinstance(one, list) and all(isinstance(text, str) for text in one) for one in texts.values()
    )
    if not texts or not valid:
        raise InputError(
            f'{printable(path)} must be a JSON object of classes with their texts: {{"cat": ["a photo of a '
            'cat"], ...}; correct it.'
        )
    return Prompts(list(texts), list(texts.values()))


def _read_labels(text: str) -> list[str]:
    """Names between commas; or a file with a name on each line."""
    if os.path.isfile(text):
        return _read_lines(Path(text), "labels")
    if "," not in text or text.lower().endswith(_FILES):
        raise InputError(
            f"{option('labels')} takes at least two different classes between commas, such as cat,dog, or a "
            f"file with a name on each line, and there is no file {printable(text)!r}; check its path."
        )
    return [name.strip() for name in text.split(",")]


def _read_lines(path: Path, name: str) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        text = _read(path, name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{option(name)}: {printable(path)} is not a text file in UTF-8; save it as one."
        ) from error
    lines = (
        text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    )  # splitlines would split at other characters
    return [line.strip() for line in lines if line.strip()]


def _read(path: Path, name: str) -> bytes:
    try:
        return read_limited(path, _MAX_BYTES, "a list of prompts")
    except OSError as error:
        hint = " A template needs {} in place of the class." if name == "prompts" else ""
        raise InputError(
            f"{option(name)}: {printable(path)} cannot be read: {error.strerror or error}.{hint}"
        ) from error


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
