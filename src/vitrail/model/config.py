"""The configuration of a model, as plain data without torch. Every field is checked on construction.

The letters are the paper's: C channels, H x W pixels, P patch side, h x w patch grid, N patches,
T tokens, D width, k heads, d = D/k, F MLP width, L depth, K classes. The defaults are the paper's
model (Dosovitskiy et al. 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from vitrail.base.fields import (
    Config,
    boolean,
    choice,
    documented,
    integer,
    number,
    per_axis,
    probability,
    side_lengths,
)
from vitrail.model.config_checks import POSITIONS as POSITIONS
from vitrail.model.config_checks import STEM_STRIDES as STEM_STRIDES
from vitrail.model.config_checks import check_config
from vitrail.model.config_checks import format_sides as format_sides

AXES = {
    "image": ("height", "width"),
    "video": ("frames", "height", "width"),
    "audio": ("bins", "frames"),
    "text": ("length",),
}


@documented
@dataclass(frozen=True, kw_only=True)
class ViTConfig(Config):
    """A Vision Transformer, from pixels to logits (Dosovitskiy et al. 2020)."""

    # ---- size
    width: int = integer("D, the length of every token vector")
    depth: int = integer("L, the number of blocks")
    heads: int = integer("k, the number of attention heads in each block")
    head_width: int | None = integer("d, the width of one head; D/k by default", default=None)
    mlp_width: int | None = integer("F, the hidden width of the MLP; 4D by default", default=None)

    # ---- from pixels to tokens
    patch: int | tuple[int, ...] = side_lengths("P, the patch side in pixels, or (height, width)")
    size: int | tuple[int, ...] = side_lengths("The image side in pixels, or (H, W)", 224)
    channels: int = integer("C, the number of image channels", default=3)
    input: Literal["image", "video", "audio", "text"] = choice(
        "What is cut into tokens: an image; a video, with size and patch as (frames, height, width); the "
        "spectrogram of a waveform, with size as (bins, frames); or token ids, with size as their number",
        default="image",
        aliases={"picture": "image"},  # files written by version 0.1
    )
    vocabulary: int | None = integer("The number of different token ids of a text", default=None)
    remainder: Literal["refuse", "cut"] = choice(
        "What to do with pixels that fill no complete patch: refuse the image size, or cut them off",
        default="refuse",
    )
    embedding: Literal["linear", "mlp", "conv", "resnet", "mobile"] = choice(
        "How a patch becomes a token: the linear map x_p E; an MLP with one hidden layer; patches of a "
        "small convolutional stem of stride 4; patches of the paper's ResNet-50 stem of stride 16; patches "
        "of MobileCLIP-B's stem of stride 8",
        default="linear",
    )
    embedding_norm: Literal["none", "before", "after", "both"] = choice(
        "A norm on the flattened patch, on its token, or on both", default="none"
    )
    embedding_bias: bool = boolean("Whether the patch projection has a bias (CLIP's has none)", default=True)
    class_token: bool = boolean("Whether the class token x_class precedes the patches", default=True)
    distillation_token: bool = boolean(
        "Whether DeiT's distillation token follows the class token", default=False
    )
    registers: int = integer("The number of register tokens before the patches", least=0, default=0)

    # ---- positions
    position: Literal[
        "learned",
        "learned2d",
        "sincos1d",
        "sincos2d",
        "rotary",
        "rotary-dinov3",
        "rotary-eva02",
        "rotary-pe",
        "pairwise",
        "relative",
        "none",
    ] = choice(
        "The position scheme: a learned row for each token (the paper's E_pos), or learned rows and columns; "
        "fixed sines and cosines in 1-D or 2-D; rotary embedding of q and k (by index, or as in DINOv3; "
        "with learned rows as well, as in EVA-02 or the Perception Encoder); a learned attention bias for "
        "each pair of tokens, or for each relative offset; or none",
        default="learned",
    )
    rows: Literal["all", "class", "patches"] = choice(
        "Which tokens have a row in E_pos: all; the class token and the patches; only the patches",
        default="all",
    )
    position_at: Literal["start", "every"] = choice(
        "Whether E_pos is added once, or before every block (paper, Table 8)", default="start"
    )
    norm_pre: bool = boolean("A norm after the positions, before the first block (CLIP)", default=False)

    # ---- the block
    block: Literal["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"] = choice(
        "Where the norms are: before each branch (Eq. 2 and 3), after the sum (Vaswani et al. 2017), on the "
        "branch before the sum (Swin V2), both branches in parallel, or without residual connections",
        default="pre-norm",
        aliases={"post-layernorm": "res-post-norm", "pre-layernorm": "pre-norm"},
    )
    norm: Literal["layer", "rms", "none"] = choice("LayerNorm, RMSNorm or no norm", default="layer")
    eps: float = number(
        "Added to the variance in every norm", "above 0 and at most 1", lambda e: 0 < e <= 1, 1e-6
    )
    scale: Literal["head", "width", "none"] | float = choice(
        "The factor of the attention scores: 1/sqrt(d) (the paper), 1/sqrt(D), 1, or a number; with 0, "
        "attention depends on the position bias only",
        default="head",
        or_number=True,
    )
    qkv_bias: Literal["all", "none", "no-k"] = choice("Which of q, k and v have a bias", default="all")
    qk_norm: bool = boolean("A norm on q and k in each head", default=False)
    attention_norm: bool = boolean(
        "A norm on the concatenated heads, before their output projection (EVA-02 CLIP)", default=False
    )
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "silu"] = choice(
        "The activation of the MLP; gelu is the exact one", default="gelu"
    )
    mlp: Literal["plain", "gated"] = choice(
        "fc2(activation(fc1 z)), or with half of fc1 as a gate (SwiGLU with silu)", default="plain"
    )
    mlp_hidden: int = integer("The number of hidden layers of the MLP", default=1)
    mlp_norm: bool = boolean("A norm inside the MLP, before its last layer (EVA-02)", default=False)
    linear_bias: bool = boolean(
        "Whether the MLP and the output projection of attention have biases (AIMv2's have none)",
        default=True,
    )
    layer_scale: float | None = number(
        "The initial LayerScale factor of each branch; no LayerScale by default",
        "above 0 and at most 10",
        lambda value: 0 < value <= 10,
        None,
    )

    # ---- from tokens to logits
    pool: Literal["class", "mean", "mean-all", "class-mean", "attention", "flatten"] = choice(
        "How tokens become one vector: the class token, the mean of the patches or of all tokens, class "
        "token and mean concatenated, attention pooling with a learned query (MAP), or all patches "
        "concatenated",
        default="class",
    )
    pool_norm: Literal["before", "after", "none"] = choice(
        "Whether the final norm comes before pooling, after it, or nowhere", default="before"
    )
    pool_tokens: Literal["patches", "all"] = choice(
        "Which tokens attention pooling attends to: the patches, or all (Perception Encoder)",
        default="patches",
    )
    pool_heads: int | None = integer("The number of heads of attention pooling; k by default", default=None)
    pool_mlp_width: int | None = integer(
        "The hidden width of the MLP of attention pooling; F by default", default=None
    )
    head: Literal["linear", "mlp", "tanh", "distilled", "cosine"] = choice(
        "One layer; two with the activation between; two with tanh (the paper's pre-training head); one each "
        "for class and distillation token, averaged (DeiT); or the projected vector normalized to length 1 "
        "before the last layer (zero-shot heads of CLIP and SigLIP)",
        default="linear",
    )
    head_bias: bool = boolean("Whether a linear or cosine head has a bias (CLIP's has none)", default=True)
    head_hidden: int | None = integer(
        "Width between the head's two layers; D by default; a cosine head then has one layer", default=None
    )
    classes: int = integer("K, the number of logits; 0 for no head", least=0, default=1000)

    # ---- training only
    dropout: float = probability(
        "Dropout after the embedding and every dense layer except q, k, v (paper, B.1)"
    )
    attention_dropout: float = probability("Dropout of the attention weights")
    patch_dropout: float = probability("The fraction of patches dropped from each training image")
    drop_path: float = probability(
        "Stochastic depth: the probability of skipping a branch of the last block; it grows linearly with "
        "depth, from 0"
    )
    init: Literal["paper", "timm", "torchvision"] = choice(
        "Whose initialization the parameters get (model/init.py)", default="paper"
    )
    position_sigma: float | None = number(
        "Standard deviation of learned positions at initialization; 0.02 by default",
        *("above 0", lambda sigma: sigma > 0),
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size", "patch"):
            self._set(name, per_axis(name, getattr(self, name), AXES[self.input]))
        check_config(self)

    # ---- derived -------------------------------------------------------

    @property
    def pixels(self) -> tuple[int, ...]:
        """(H, W); for other inputs the sides along their own axes."""
        return cast(tuple[int, ...], self.size)

    @property
    def patch_pixels(self) -> tuple[int, ...]:
        """Height and width of one patch."""
        return cast(tuple[int, ...], self.patch)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: (C, H, W), (C, frames, H, W), (samples,) or (length,)."""
        match self.input:
            case "image" | "video":
                return self.channels, *self.pixels
            case "audio":  # windows of 2 bins samples that overlap by half
                bins, frames = self.pixels
                return (bins * (frames + 1),)
            case "text":
                return self.pixels

    @property
    def grid(self) -> tuple[int, ...]:
        """(h, w), the number of patches down and across."""
        return tuple(side // step for side, step in zip(self.pixels, self.patch_pixels, strict=True))

    @property
    def patches(self) -> int:
        """N = h w."""
        return math.prod(self.grid)

    @property
    def prefix(self) -> int:
        """n, the number of tokens before the patches: class, distillation, registers."""
        return self.class_token + self.distillation_token + self.registers

    @property
    def prefix_names(self) -> list[str]:
        """The prefix tokens by name, in their order: "class", "distillation", "register 0", ..."""
        names = ["class"] * self.class_token + ["distillation"] * self.distillation_token
        return names + [f"register {number}" for number in range(self.registers)]

    @property
    def tokens(self) -> int:
        """T = n + N."""
        return self.prefix + self.patches

    @property
    def d(self) -> int:
        """The width of one head."""
        return self.head_width or self.width // self.heads

    @property
    def heads_width(self) -> int:
        """k d, the width of all heads concatenated; D unless head_width is given."""
        return self.heads * self.d

    @property
    def F(self) -> int:
        """The hidden width of the MLP."""
        return self.mlp_width or 4 * self.width

    @property
    def pooled_width(self) -> int:
        """The length of the pooled vector: D; N D for flatten, 2 D if two vectors are concatenated."""
        if self.pool == "flatten":
            return self.patches * self.width
        return 2 * self.width if self.head == "distilled" or self.pool == "class-mean" else self.width

    @property
    def parameter_counts(self) -> dict[str, int]:
        """The approximate number of parameters in each large part of the model."""
        tables = {
            "tokens": self.tokens * self.width,
            "pairs": self.depth * self.heads * self.tokens**2,
            "small": 0,
        }
        two_layers = self.head in ("mlp", "tanh")
        before_logits = self.head_hidden or (self.width if two_layers else self.pooled_width)
        mlp = (3 if self.mlp == "gated" else 2) * self.width * self.F + (self.mlp_hidden - 1) * self.F**2
        return {
            "the patch projection": self.width * self.channels * math.prod(self.patch_pixels),
            "the position table": tables[POSITIONS[self.position].table],
            "attention": 4 * self.depth * self.width * self.heads_width,
            "the MLPs": self.depth * mlp,
            "the head": before_logits * self.classes,
            "the vocabulary": self.width * (self.vocabulary or 0),
        }
