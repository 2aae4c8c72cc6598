"""One input through a model, stage by stage: what a reader would work out by hand (article 001).

    for stage in walk(model, image):
        print(stage.name, stage.equation, stage.shape, stage.meaning)

The equations are the paper's, as this model's config has them, in plain text: letters side by side
are multiplied (a matrix as a matrix product, a vector entry by entry), `^t` picks a token, `^T` turns
a matrix, `[a; b]` puts one after the other, `E[x]` takes the rows of E with the numbers x. A letter
means what the latest equation says it is, or a parameter of the part that the stage is named after; in
a norm, mu, var and ms (mean square) are each token's own. R turns by the place of a patch; mask puts
-inf wherever a token would look ahead.
tests/test_walkthrough.py reads every equation and compares what comes out with the tensor beside it.

stage.py is what a stage is, block.py the blocks that all models share, encoder.py and decoder.py what
comes before and after them.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.model import Decoder, DecoderConfig, ViT
from vitrail.walkthrough.decoder import walk_decoder
from vitrail.walkthrough.encoder import walk_encoder
from vitrail.walkthrough.stage import Stage, token_name

__all__ = ["Stage", "token_name", "walk"]


def walk(
    model: ViT | Decoder,
    x: Tensor,
    *,
    block: int = 0,
    head: int = 0,
    token: int | None = None,
    context: Tensor | None = None,
) -> list[Stage]:
    """The forward pass of one input as a list of stages.

    Args:
        x: a picture (C, H, W), or whatever else the model's config has as `input`; for a decoder
            token numbers (T,). A batch of one is taken as well.
        block: which block to show in detail, from 0; the others are one stage each.
        head: which of its heads.
        token: whose norm and whose row of attention weights. Left out it is 0, the first of the
            prefix; in a decoder the last, as it sees all the others and says what comes next.
        context: (S, context_width), an encoder's tokens, where a decoder looks at one.
    """
    match getattr(model, "config", None):
        case DecoderConfig():
            return walk_decoder(cast(Decoder, model), x, context, block, head, token)
        case ViTConfig() if context is None:
            return walk_encoder(cast(ViT, model), x, block, head, 0 if token is None else token)
        case ViTConfig():
            raise InputError("Only a decoder looks at a context.", "a ViT with one", "Leave the context out.")
    raise InputError("A walk is through a ViT or a Decoder.", type(model).__name__, "Build one of these.")
