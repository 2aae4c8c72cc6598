"""The decoder (Vaswani et al. 2017; note 003): every token sees itself and what stands before it.

    z_0  = E[t_1 ... t_T] + E_pos[1 ... T]                 Decoder.forward
    z'_l = MSA(LN(z_{l-1}), causal mask) + z_{l-1}         Block.forward, block.py (Eq. 2)
    z''_l = MCA(LN(z'_l), context) + z'_l                  CrossBlock.forward, only with an encoder
    z_l  = MLP(LN(z''_l)) + z''_l                          Block.forward, block.py (Eq. 3)
    logits = LN(z_L) W + b                                 Decoder.forward

Alone it is a GPT. With a ViT before it, it is the right half of an encoder-decoder, which needs no
class of its own:

    decoder = Decoder(DecoderConfig(..., context_width=vit.config.width))
    decoder(tokens, context=vit.encode(images).tokens)     # (B, T) -> (B, T, vocabulary)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError, InputError
from vitrail.fields import Config, as_whole, choice, number, rate, switch, whole
from vitrail.model.attention import Attention, unchanged
from vitrail.model.block import Block, Turn, build_block
from vitrail.model.inputs import check_dtype, check_numbers
from vitrail.model.modes import evaluating
from vitrail.model.norm import build_norm
from vitrail.model.position import LearnedPosition
from vitrail.model.tap import Tap


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Config):
    """A decoder, from token numbers to a logit for each token that may come next."""

    vocabulary: int = whole("V, how many different tokens there are")
    width: int = whole("D, the length of every token vector")
    depth: int = whole("L, how many blocks")
    heads: int = whole("k, how many attention heads in each block")
    length: int = whole("The longest sequence: how far back a token can look")
    head_width: int | None = whole("d, the width of one head; D/k when not given", default=None)
    mlp_width: int | None = whole("F, the hidden width of the MLP; 4D when not given", default=None)
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "silu"] = choice(
        "The MLP's non-linearity; relu is note 003's", default="relu"
    )
    block: Literal["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"] = choice(
        "Where the norms stand, as in ViTConfig; cross-attention is there for pre-norm alone",
        default="pre-norm",
        aliases={"post-layernorm": "res-post-norm", "pre-layernorm": "pre-norm"},
    )
    norm: Literal["layer", "rms", "none"] = choice(
        "LayerNorm, RMSNorm or no norm, everywhere", default="layer"
    )
    eps: float = number(
        "Added to the variance in every norm", "above 0 and at most 1", lambda e: 0 < e <= 1, 1e-6
    )
    tied: bool = switch("Whether tokens are read out with their own embedding, without a bias", default=False)
    context_width: int | None = whole(
        "The width of an encoder's tokens to look at; no cross-attention when not given", default=None
    )
    dropout: float = rate("Rate after the embedding and after every dense layer but q, k, v")
    attention_dropout: float = rate("Rate on the attention weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.encoder_like  # refuses what a ViT of these sizes would
        if self.context_width is not None and self.block != "pre-norm":
            raise ConfigError(
                f"context_width={self.context_width} needs pre-norm blocks.",
                f"block={self.block!r}",
                "Change context_width or block.",
            )

    @property
    def encoder_like(self) -> ViTConfig:
        """The ViT that takes the same tokens and has the same blocks."""
        return ViTConfig(
            **{name: getattr(self, name) for name in SHARED},
            input="text",
            vocabulary=self.vocabulary,
            patch=1,
            size=self.length,
            class_token=False,
            pool="mean",
            classes=self.vocabulary,
        )


SHARED = (
    *("width", "depth", "heads", "head_width", "mlp_width", "activation"),
    *("block", "norm", "eps", "dropout", "attention_dropout"),
)


class CrossBlock(Block):
    """A block that also looks at an encoder's tokens, after its own and before the MLP.

    The context must be given: without one, `cross` would be attention that sees what is to come.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.norm_cross = build_norm(config)
        self.cross = Attention(config)

    def forward(  # type: ignore[override]
        self, z: Tensor, mask: Tensor | None = None, turn: Turn = unchanged, *, context: Tensor
    ) -> Tensor:
        z = z + self.attended(self.norm1(z), mask, turn)  # what stands before
        z = z + self.drop(self.cross(self.norm_cross(z), context))  # what the encoder saw
        return self.out(z + self.thought(self.norm2(z)))


class SequencePosition(LearnedPosition):
    """E_pos for a sequence that may be shorter than the longest one: its first T rows."""

    def forward(self, z: Tensor) -> Tensor:
        return z + self.table[: z.shape[1]]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """Note 003's `tril`, (T, T): True where the token of a row may look, at itself and back."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class Decoder(nn.Module):
    """Token numbers (B, T) to logits (B, T, V): at each place, what comes next."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        like, looks = config.encoder_like, config.context_width
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.position = SequencePosition(like)
        self.drop = nn.Dropout(config.dropout)
        # An encoder of another width comes over a bridge, as Attention has one matrix for q, k and v.
        self.bridge = nn.Identity() if looks in (None, config.width) else nn.Linear(looks, config.width)
        self.blocks = nn.ModuleList(
            build_block(like, index) if looks is None else CrossBlock(like) for index in range(config.depth)
        )
        self.norm = build_norm(like)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary)
        self.embed, self.encoded, self.logits = Tap(), Tap(), Tap()
        initialise_decoder(self)

    def forward(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """Logits (B, T, V).

        Args:
            tokens: (B, T) whole numbers below V. On a GPU their range is not checked here: that
                would make every step wait for the device.
            context: (B, S, context_width), an encoder's tokens, where the decoder looks at one.
        """
        check_numbers(tokens, self.config.vocabulary)
        self._check_length(tokens)
        self._check_context(tokens, context)
        z = self.embed(self.drop(self.position(self.tokens(tokens))))  # (B, T, D)
        mask = causal_mask(z.shape[1], z.device)
        seen: dict[str, Any] = {} if context is None else {"context": self.bridge(context)}  # (B, S, D)
        for block in self.blocks:
            z = block(z, mask, **seen)
        z = self.encoded(self.norm(z))
        return self.logits(F.linear(z, self.tokens.weight) if self.head is None else self.head(z))

    def _check_length(self, tokens: Tensor) -> None:
        given, longest = tokens.shape[1], self.config.length
        if given > longest:
            raise InputError(
                f"A sequence must be at most {longest} tokens long, the length the model was built for.",
                f"{given} tokens",
                f"Keep the last: tokens[:, -{longest}:], or build the model with length={given}.",
            )

    def _check_context(self, tokens: Tensor, context: Tensor | None) -> None:
        B, looks = tokens.shape[0], self.config.context_width
        if (context is None) != (looks is None):
            raise InputError(
                "A context must be given to a decoder with a context_width, and to no other.",
                f"{'no' if context is None else 'a'} context, and context_width={looks}",
                "Call decoder(tokens, context=vit.encode(images).tokens)."
                if context is None
                else "Leave the context out, or build the model with its width as context_width.",
            )
        if context is None:
            return
        if not isinstance(context, Tensor) or context.ndim != 3 or context.shape[::2] != (B, looks):
            raise InputError(
                f"The context must be a tensor of the shape ({B}, S, {looks}): a row of tokens for each "
                "sequence, as wide as context_width.",
                str(tuple(context.shape)) if isinstance(context, Tensor) else type(context).__name__,
                "Give the encoder's tokens as they are: vit.encode(images).tokens.",
            )
        check_dtype(context, self.tokens.weight.dtype, "The context's tokens")


def initialise_decoder(model: Decoder) -> None:
    """Give every parameter its first value, as GPT-2 does but for its smaller residual matrices.

    | parameter        | first value  |
    |------------------|--------------|
    | tokens.weight    | normal-0.02  |
    | position.table   | normal-0.02  |
    | *norm*.weight    | 1            |
    | *.bias           | 0            |
    | *.weight         | normal-0.02  |

    The first row that matches counts.
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
    """Continue sequences (B, T) by `count` tokens, each drawn from what the model expects next.

    Args:
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top: draw among so many of the likeliest only.
        generator: where the draws come from, for a result that can be repeated.
    """
    count, top = as_whole("count", count, 0), None if top is None else as_whole("top", top, 1)
    real = isinstance(temperature, (int, float))
    if not real or not (temperature == 0 or 1e-3 <= temperature < math.inf):
        raise InputError(
            "temperature must be 0, for the likeliest token, or from 0.001 up.",
            f"temperature={temperature!r}",
            "Set temperature to such a number.",
        )
    check_numbers(tokens, model.config.vocabulary)
    with evaluating(model):
        for _ in range(count):
            logits = model(tokens[:, -model.config.length :], context)[:, -1]  # (B, V)
            drawn = draw(logits, temperature, top, generator)
            tokens = torch.cat([tokens, drawn.to(tokens.dtype)], dim=1)
    return tokens  # (B, T + count)


def draw(
    logits: Tensor, temperature: float, top: int | None, generator: torch.Generator | None = None
) -> Tensor:
    """One token for each row of logits: (B, V) -> (B, 1)."""
    V = logits.shape[-1]
    kept = 1 if temperature == 0 else min(top or V, V)
    values, ids = logits.float().topk(kept)  # likeliest first
    if kept == 1:
        return ids
    chances = (values / temperature).softmax(dim=-1)
    return ids.gather(1, torch.multinomial(chances, 1, generator=generator))
