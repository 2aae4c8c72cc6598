"""The forward pass of one input, stage by stage, with the paper's equations.

    for stage in walk(model, image):
        print(stage.name, stage.equation, stage.shape, stage.meaning)

The equations are those of the paper, adapted to the model's config, in plain text. Adjacent letters are
multiplied (matrices by a matrix product, vectors element by element). `z^t` is token t of z, `A^T` the
transpose of A, `[a; b]` a concatenation, and `E[x]` the rows of E with the indices x. A letter stands for the
left side of the latest equation that has it, or for a parameter of the module that the stage is named after.
In a norm, mu, var and ms (mean square) are each token's own. R rotates by the position of a patch; mask sets
the scores of later tokens to -inf.
tests/course/test_walk.py evaluates every equation and compares the result with the stage's tensor.

stage.py defines a stage, block_stages.py has the blocks that all models share, encoder_stages.py what comes
before and after them; a decoder has its own `walk`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model import ViT
from vitrail.views.walk.encoder_stages import Recording
from vitrail.views.walk.stage import Stage, check_index, token_name
from vitrail.weights.bundle.scores import Activation

__all__ = ["Stage", "token_name", "walk"]


def walk(
    model: Any,
    x: Tensor,
    *,
    block: int = 0,
    head: int = 0,
    token: int | None = None,
    context: Tensor | None = None,
    activation: Activation = "softmax",
) -> list[Stage]:
    """The forward pass of one input as a list of stages.

    Args:
        model: a ViT for images, or a `vitrail.Decoder`.
        x: an image (C, H, W); for a decoder, token indices (T,). A batch of one is accepted.
        block: the block to show in detail, from 0; the other blocks are one stage each.
        head: the attention head to show.
        token: the token whose norm and attention weights are shown. By default 0, the first prefix token;
            for a decoder the last token, whose output predicts the next one.
        context: (S, context_width), the tokens of an encoder, for a decoder with cross-attention.
        activation: how the logits of a ViT become probabilities: softmax, or sigmoid for multi-label models
            (`bundle.scores.activation`).
    """
    if hasattr(model, "walk"):
        stages: list[Stage] = model.walk(x, context, block, head, token)
        return stages
    if not isinstance(model, ViT):
        raise InputError(f"walk takes a ViT or a Decoder, not a {type(model).__name__}.")
    if context is not None:
        raise InputError("Only a decoder takes a context, and this model is a ViT; omit the context.")
    if model.config.input != "image":
        raise InputError(
            f"walk follows an image through a model, and this one takes {model.config.input}; use "
            "vitrail.record to look inside it."
        )
    check_index("block", block, model.config.depth)
    return Recording(model, x, [block], activation).stages(block, head, token or 0)
