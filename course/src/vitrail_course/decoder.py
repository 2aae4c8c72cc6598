"""A causal decoder (Vaswani et al. 2017): every token attends to itself and to the tokens before it.

    z_0  = E[t_1 ... t_T] + E_pos[1 ... T]                 Decoder.forward
    z'_l = MSA(LN(z_{l-1}), causal mask) + z_{l-1}         Block.forward, block.py (Eq. 2)
    z''_l = MCA(LN(z'_l), context) + z'_l                  CrossBlock.forward, with an encoder only
    z_l  = MLP(LN(z''_l)) + z''_l                          Block.forward, block.py (Eq. 3)
    logits = LN(z_L) W + b                                 Decoder.forward

Alone it is a GPT. With the tokens of a ViT as its context it is the decoder of an encoder-decoder:

    decoder = Decoder(DecoderConfig(..., context_width=vit.config.width))
    decoder(tokens, context=vit.encode(images).tokens)     # (B, T) -> (B, T, vocabulary)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, InputError
from vitrail.base.fields import Config, as_integer, boolean, choice, documented, integer, number, probability
from vitrail.model.attention import Attention
from vitrail.model.block import Block, build_block
from vitrail.model.check_input import check_dtype, check_token_ids
from vitrail.model.config import ViTConfig
from vitrail.model.device import eval_mode
from vitrail.model.layers import build_norm
from vitrail.model.position import Rotate, identity
from vitrail.model.tap import Tap, TappedModule
from vitrail.model.text_tower import SequencePosition, causal_mask

if TYPE_CHECKING:
    from vitrail.views.walk.stage import Stage


@documented
@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Config):
    """A causal decoder, from token ids to the logits of the next token."""

    vocabulary: int = integer("V, the number of different token ids")
    width: int = integer("D, the length of every token vector")
    depth: int = integer("L, the number of blocks")
    heads: int = integer("k, the number of attention heads in each block")
    length: int = integer("The context length: the largest number of tokens in a sequence")
    head_width: int | None = integer("d, the width of one head; D/k by default", default=None)
    mlp_width: int | None = integer("F, the hidden width of the MLP; 4D by default", default=None)
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "silu"] = choice(
        "The activation of the MLP; relu is that of Vaswani et al.", default="relu"
    )
    block: Literal["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"] = choice(
        "Where the norms are, as in ViTConfig; cross-attention needs pre-norm",
        default="pre-norm",
        aliases={"post-layernorm": "res-post-norm", "pre-layernorm": "pre-norm"},
    )
    norm: Literal["layer", "rms", "none"] = choice("LayerNorm, RMSNorm or no norm", default="layer")
    eps: float = number(
        "Added to the variance in every norm", "above 0 and at most 1", lambda e: 0 < e <= 1, 1e-6
    )
    tied: bool = boolean(
        "Whether the output layer shares the weights of the token embedding, without a bias", default=False
    )
    context_width: int | None = integer(
        "The width of the encoder tokens to attend to; no cross-attention by default", default=None
    )
    dropout: float = probability("Dropout after the embedding and every dense layer except q, k, v")
    attention_dropout: float = probability("Dropout of the attention weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.as_vit_config  # runs the checks of a ViT of this size
        if self.context_width is not None and self.block != "pre-norm":
            raise ConfigError(
                f'context_width={self.context_width} needs block="pre-norm", but block={self.block!r}.'
            )

    @property
    def as_vit_config(self) -> ViTConfig:
        """The config of a ViT for texts with the same blocks."""
        return ViTConfig(
            **{name: getattr(self, name) for name in _SHARED_FIELDS},
            input="text",
            vocabulary=self.vocabulary,
            patch=1,
            size=self.length,
            class_token=False,
            pool="mean",
            classes=self.vocabulary,
        )


_SHARED_FIELDS = (
    *("width", "depth", "heads", "head_width", "mlp_width", "activation"),
    *("block", "norm", "eps", "dropout", "attention_dropout"),
)


class CrossBlock(Block):
    """A pre-norm block with cross-attention to an encoder's tokens, between self-attention and MLP.

    The context is required: without one, `cross` would be self-attention without the causal mask.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.norm_cross = build_norm(config)
        self.cross = Attention(config)

    def forward(  # type: ignore[override]
        self, z: Tensor, mask: Tensor | None = None, rotate: Rotate = identity, *, context: Tensor
    ) -> Tensor:
        z = z + self.attention_branch(self.norm1(z), mask, rotate)
        z = z + self.drop(self.cross(self.norm_cross(z), context))
        return self.out(z + self.mlp_branch(self.norm2(z)))


class Decoder(TappedModule):
    """Token ids (B, T) to logits (B, T, V) of the next token at each position."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        like, context_width = config.as_vit_config, config.context_width
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.position = SequencePosition(like)
        self.drop = nn.Dropout(config.dropout)
        # Tokens of an encoder of another width are projected first: Attention has one matrix for q, k, v.
        other_width = context_width is not None and context_width != config.width
        self.bridge = nn.Linear(context_width or 0, config.width) if other_width else nn.Identity()
        self.blocks = nn.ModuleList(
            build_block(like, index) if context_width is None else CrossBlock(like)
            for index in range(config.depth)
        )
        self.norm = build_norm(like)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary)
        self.embed, self.encoded, self.logits = Tap(), Tap(), Tap()
        initialize_decoder(self)

    def forward(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """Logits (B, T, V).

        Args:
            tokens: (B, T) integers below V. Their range is checked on a CPU only.
            context: (B, S, context_width), the encoder's tokens; required if and only if the config has a
                context_width.
        """
        check_token_ids(tokens, self.config.vocabulary)
        self._check_length(tokens)
        self._check_context(tokens, context)
        z = self.embed(self.drop(self.position(self.tokens(tokens))))  # (B, T, D)
        mask = causal_mask(z.shape[1], z.device)
        cross: dict[str, Any] = {} if context is None else {"context": self.bridge(context)}  # (B, S, D)
        for block in self.blocks:
            z = block(z, mask, **cross)
        z = self.encoded(self.norm(z))
        return self.logits(F.linear(z, self.tokens.weight) if self.head is None else self.head(z))

    def walk(
        self, tokens: Tensor, context: Tensor | None, block: int, head: int, token: int | None
    ) -> list[Stage]:
        """The stages of `vt.walk`."""
        from vitrail_course.decoder_stages import walk_decoder

        return walk_decoder(self, tokens, context, block, head, token)

    def _check_length(self, tokens: Tensor) -> None:
        length, limit = tokens.shape[1], self.config.length
        if length > limit:
            raise InputError(
                f"A sequence of {length} tokens is longer than the model's length of {limit}; pass the last "
                f"ones, tokens[:, -{limit}:], or build the model with length={length}."
            )

    def _check_context(self, tokens: Tensor, context: Tensor | None) -> None:
        B, width = tokens.shape[0], self.config.context_width
        if context is None:
            if width is None:
                return
            raise InputError(
                f"A decoder with context_width={width} needs a context; call decoder(tokens, "
                "context=vit.encode(images).tokens)."
            )
        if width is None:
            raise InputError(
                "This decoder takes no context; omit it, or build the model with the context's width as "
                "context_width."
            )
        if not isinstance(context, Tensor) or context.ndim != 3 or context.shape[::2] != (B, width):
            actual = tuple(context.shape) if isinstance(context, Tensor) else type(context).__name__
            raise InputError(
                f"The context must be a tensor of shape ({B}, S, {width}), the tokens of an encoder for each "
                f"sequence, not {actual}; pass vit.encode(images).tokens."
            )
        check_dtype(context, self.tokens.weight.dtype, "The tokens of the context")


def initialize_decoder(model: Decoder) -> None:
    """Initialize all parameters as GPT-2 does, but without its smaller scale of the residual projections.

    | parameter        | initial value |
    |------------------|---------------|
    | tokens.weight    | normal-0.02   |
    | position.table   | normal-0.02   |
    | *norm*.weight    | 1             |
    | *.bias           | 0             |
    | *.weight         | normal-0.02   |

    The first row that matches applies.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:  # embeddings and matrices
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def generate(
    model: Decoder,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top: int | None = None,
    context: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample `count` more tokens for sequences (B, T): (B, T + count).

    Args:
        temperature: divides the logits; 0 always takes the most likely token.
        top: sample only from this many of the most likely tokens (top-k sampling).
        context: the encoder's tokens, for a decoder with cross-attention.
        generator: the random number generator, for reproducible samples.
    """
    count, top = as_integer("count", count, 0), None if top is None else as_integer("top", top, 1)
    real = isinstance(temperature, (int, float))
    if not real or not (temperature == 0 or 1e-3 <= temperature < math.inf):
        raise InputError(
            f"temperature must be 0, for the most likely token, or at least 0.001, not {temperature!r}."
        )
    check_token_ids(tokens, model.config.vocabulary)
    with eval_mode(model):
        for _ in range(count):
            logits = model(tokens[:, -model.config.length :], context)[:, -1]  # (B, V)
            sample = sample_token(logits, temperature, top, generator)
            tokens = torch.cat([tokens, sample.to(tokens.dtype)], dim=1)
    return tokens  # (B, T + count)


def sample_token(
    logits: Tensor, temperature: float, top: int | None, generator: torch.Generator | None = None
) -> Tensor:
    """Sample one token id for each row of logits: (B, V) -> (B, 1)."""
    V = logits.shape[-1]
    count = 1 if temperature == 0 else min(top or V, V)
    values, ids = logits.float().topk(count)  # most likely first
    if count == 1:
        return ids
    probabilities = (values / temperature).softmax(dim=-1)
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))
