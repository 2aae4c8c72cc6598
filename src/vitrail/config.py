"""What a model is, as plain data: no torch, no files. Every field is checked as it is set.

The letters are the paper's: C channels, H x W pixels, P patch side, h x w patch grid, N patches,
T tokens, D width, k heads, d = D/k, F MLP width, L depth, K classes. The defaults are the paper's
model; every other choice is a word that its field lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from vitrail.errors import ConfigError
from vitrail.fields import Config, choice, number, per_axis, rate, sides, switch, whole

# The largest published ViT has 22 billion parameters. A config far above that is a slip of the
# hand, or a file that wants our memory: it is refused here, before anything is allocated.
MOST_PARAMETERS = 100_000_000_000
MOST_BLOCKS = 10_000

STEM_STRIDES = {"conv": 4, "resnet": 16}

AXES = {
    "picture": ("height", "width"),
    "video": ("frames", "height", "width"),
    "audio": ("bins", "frames"),
    "text": ("length",),
}


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Config):
    """A Vision Transformer (Dosovitskiy et al. 2020), from pixels to logits."""

    # ---- the shape of the model
    width: int = whole("D, the length of every token vector")
    depth: int = whole("L, how many blocks")
    heads: int = whole("k, how many attention heads in each block")
    head_width: int | None = whole("d, the width of one head; D/k when not given", default=None)
    mlp_width: int | None = whole("F, the hidden width of the MLP; 4D when not given", default=None)

    # ---- from pixels to tokens
    patch: int | tuple[int, ...] = sides("P, the side of a patch in pixels, or (height, width)")
    size: int | tuple[int, ...] = sides("The side of the picture in pixels, or (H, W)", 224)
    channels: int = whole("C, how many channels a picture has", default=3)
    input: Literal["picture", "video", "audio", "text"] = choice(
        "What is cut into tokens: a picture; a video, with size and patch as (frames, height, width); "
        "a sound's spectrogram, with size as (bins, frames); or token numbers, with size as their count",
        default="picture",
    )
    vocabulary: int | None = whole("How many different token numbers a text has", default=None)
    remainder: Literal["refuse", "cut"] = choice(
        "What to do with pixels that fill no whole patch: refuse the size, or cut them off",
        default="refuse",
    )
    embedding: Literal["linear", "mlp", "conv", "resnet"] = choice(
        "How a patch becomes a token: x_p E; two layers with a GELU (note 004, step 2.1); after a "
        "small stack of convolutions of stride 4; after the paper's R50 stem of stride 16",
        default="linear",
    )
    embedding_norm: Literal["none", "before", "after", "both"] = choice(
        "A norm on the flat patch, on its token (note 004: linear + layer-normalization), or on both",
        default="none",
    )
    embedding_bias: bool = switch("Whether the patch projection has a bias (CLIP's has none)", default=True)
    class_token: bool = switch("Whether x_class stands before the patches", default=True)
    distillation_token: bool = switch("Whether DeiT's second token follows it", default=False)
    registers: int = whole("How many register tokens follow those", least=0, default=0)

    # ---- where tokens stand
    position: Literal[
        "learned",
        "learned2d",
        "sincos1d",
        "sincos2d",
        "rotary",
        "rotary-dinov3",
        "pairwise",
        "relative",
        "none",
    ] = choice(
        "E_pos learned, as rows and columns apart, or fixed sines; q and k turned by their place; or "
        "a learned number for each head added to the scores of a pair, or of a distance",
        default="learned",
    )
    rows: Literal["all", "class", "patches"] = choice(
        "Which tokens have a row in E_pos: all; class token and patches; patches alone", default="all"
    )
    position_at: Literal["start", "every"] = choice(
        "Whether E_pos is added once or before every block (paper, Table 8)", default="start"
    )
    norm_pre: bool = switch("A norm after the positions, before the first block (CLIP)", default=False)

    # ---- the block
    block: Literal["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"] = choice(
        "Where the norms stand: before each branch (Eq. 2, 3), after the sum (Vaswani et al.), on the "
        "branch before the sum (note 004's post-layernorm), both branches side by side, or no sum",
        default="pre-norm",
        aliases={"post-layernorm": "res-post-norm", "pre-layernorm": "pre-norm"},
    )
    norm: Literal["layer", "rms", "none"] = choice(
        "LayerNorm, RMSNorm or no norm, everywhere", default="layer"
    )
    eps: float = number(
        "Added to the variance in every norm", "above 0 and at most 1", lambda e: 0 < e <= 1, 1e-6
    )
    scale: Literal["head", "width", "none"] | float = choice(
        "What scores are multiplied with: 1/sqrt(d) (the paper), 1/sqrt(D) (note 000), 1 (note 004), "
        "or a number; 0 leaves only the position bias to decide who looks where",
        default="head",
        or_number=True,
    )
    qkv_bias: Literal["all", "none", "no-k"] = choice("Which of q, k, v have a bias", default="all")
    qk_norm: bool = switch("A norm on q and k in each head", default=False)
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "relu", "silu"] = choice(
        "The MLP's non-linearity; gelu is the exact one", default="gelu"
    )
    mlp: Literal["plain", "gated"] = choice(
        "fc2(activation(fc1 z)), or with half of fc1 as a gate (SwiGLU with silu)", default="plain"
    )
    mlp_hidden: int = whole("How many hidden layers the MLP has", default=1)
    layer_scale: float | None = number(
        "First value of a learned factor for each channel of a branch; none when not given",
        "above 0 and at most 10",
        lambda value: 0 < value <= 10,
        None,
    )

    # ---- from tokens to logits
    pool: Literal["class", "mean", "mean-all", "class-mean", "attention", "flatten"] = choice(
        "How tokens become one vector: the class token, the mean of the patches or of all tokens, class "
        "token and mean side by side, attention to the patches by a learned query (MAP), or all patches "
        "in a row (note 004)",
        default="class",
    )
    pool_norm: Literal["before", "after", "none"] = choice(
        "Whether the last norm stands before pooling, after it, or nowhere", default="before"
    )
    head: Literal["linear", "mlp", "tanh", "distilled"] = choice(
        "One layer; two with the activation between; two with tanh (the paper's pre-training head); or "
        "one each for class and distillation token, averaged (DeiT)",
        default="linear",
    )
    head_bias: bool = switch("Whether a linear head has a bias (CLIP's projection has none)", default=True)
    head_hidden: int | None = whole("Width between the head's two layers; D when not given", default=None)
    classes: int = whole("K, how many logits; 0 for no head", least=0, default=1000)

    # ---- only in training
    dropout: float = rate("Rate after the embedding and after every dense layer but q, k, v (paper, B.1)")
    attention_dropout: float = rate("Rate on the attention weights")
    patch_dropout: float = rate("Share of the patches that each training picture goes without")
    drop_path: float = rate("Rate at which the last block leaves out a branch; the first has 0")
    init: Literal["paper", "timm", "torchvision"] = choice(
        "Whose first values the parameters get (model/init.py)", default="paper"
    )
    position_sigma: float | None = number(
        "Deviation of learned positions at first; 0.02 when not given, which few pictures hardly move",
        *("above 0", lambda sigma: sigma > 0),
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size", "patch"):
            self.set(name, per_axis(name, getattr(self, name), AXES[self.input]))
        self._check_heads()
        self._check_remainder()
        self._check_choices()
        self._check_scale()

    # ---- what follows from the fields -------------------------------------------------------

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
        """The shape of one input: (C, H, W); (C, frames, H, W), (samples,) or (length,)."""
        match self.input:
            case "picture" | "video":
                return self.channels, *self.pixels
            case "audio":  # windows of 2 bins samples, each half over the one before
                bins, frames = self.pixels
                return (bins * (frames + 1),)
            case "text":
                return self.pixels

    @property
    def grid(self) -> tuple[int, ...]:
        """(h, w), how many patches fit down and across."""
        return tuple(side // step for side, step in zip(self.pixels, self.patch_pixels, strict=True))

    @property
    def patches(self) -> int:
        """N = h w."""
        return math.prod(self.grid)

    @property
    def prefix(self) -> int:
        """n, how many tokens stand before the patches: class, distillation, registers."""
        return self.class_token + self.distillation_token + self.registers

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
        """k d, the width of all heads side by side; D unless head_width is given."""
        return self.heads * self.d

    @property
    def F(self) -> int:
        """The hidden width of the MLP."""
        return self.mlp_width or 4 * self.width

    @property
    def pooled_width(self) -> int:
        """The length of the pooled vector: D, but N D for flatten and 2 D where two tokens are pooled."""
        if self.pool == "flatten":
            return self.patches * self.width
        return 2 * self.width if self.head == "distilled" or self.pool == "class-mean" else self.width

    @property
    def matrices(self) -> dict[str, int]:
        """How many numbers the large parts of a model hold; the rest is small beside them."""
        one_row = self.position in ("learned", "sincos1d", "sincos2d")  # for each token; others have less
        pairs = self.depth * self.heads * self.tokens**2 if self.position == "pairwise" else 0
        two_layers = self.head in ("mlp", "tanh")
        before_logits = self.head_hidden or self.width if two_layers else self.pooled_width
        return {
            "the patch projection": self.width * self.channels * math.prod(self.patch_pixels),
            "the position table": self.tokens * self.width * one_row + pairs,
            "attention": 4 * self.depth * self.width * self.heads_width,
            "the MLPs": 2 * self.depth * self.width * self.F,
            "the head": before_logits * self.classes,
            "the vocabulary": self.width * (self.vocabulary or 0),
        }

    # ---- checks -----------------------------------------------------------------------------

    def _check_heads(self) -> None:
        if self.head_width is None and self.width % self.heads:
            small = [i for i in range(1, math.isqrt(self.width) + 1) if self.width % i == 0]
            fitting = sorted({*small, *(self.width // i for i in small)})  # all that divide the width
            near = [*[k for k in fitting if k < self.heads][-1:], *[k for k in fitting if k > self.heads][:1]]
            raise ConfigError(
                "width must be a multiple of heads, unless head_width is given.",
                f"width={self.width}, heads={self.heads}",
                f"Use {' or '.join(f'heads={k}' for k in near)}, or give head_width.",
            )

    def _check_remainder(self) -> None:
        both = list(zip(self.pixels, self.patch_pixels, strict=True))
        if self.remainder == "cut" and all(step <= side for side, step in both):
            return
        if any(side % step for side, step in both):
            smaller = [side - side % step for side, step in both]
            larger = [side + -side % step for side, step in both]
            fitting = [by(sides) for sides in (smaller, larger) if all(sides)]
            raise ConfigError(
                f"The {self.input} must be a whole number of patches along every side.",
                f"size {by(self.pixels)} with patches of {by(self.patch_pixels)}",
                f'Use size {" or ".join(fitting)}, another patch, or remainder="cut".',
            )

    def _check_scale(self) -> None:
        """Refuse absurd models by their matrices alone."""
        if self.depth > MOST_BLOCKS:
            raise ConfigError(
                f"depth must be at most {MOST_BLOCKS:,}.", f"depth={self.depth:,}", "Use fewer blocks."
            )
        count = sum(self.matrices.values())
        if count > MOST_PARAMETERS:
            largest = max(self.matrices, key=self.matrices.__getitem__)
            raise ConfigError(
                f"A model may have at most {MOST_PARAMETERS:,} parameters, and this config asks for "
                f"{count:,}; most of them are in {largest}: make that smaller."
            )

    def _check_choices(self) -> None:
        """Fields that do not go together: (it is so, the field, the other field, what it needs)."""
        stride = STEM_STRIDES.get(self.embedding, 1)
        added = self.position in ("learned", "learned2d", "sincos1d", "sincos2d")
        biased = self.position in ("pairwise", "relative")
        learned = self.position in ("learned", "learned2d")
        drops = self.patch_dropout > 0
        distilled = self.head == "distilled"
        flat = self.position in ("learned2d", "sincos2d", "rotary", "rotary-dinov3", "relative")
        text, audio, video = (self.input == word for word in ("text", "audio", "video"))
        rules = [
            (text and self.vocabulary is None, "input", "vocabulary", "a vocabulary"),
            (self.vocabulary is not None and not text, "vocabulary", "input", 'the input "text"'),
            (text and self.patch != (1,), "input", "patch", "a patch of 1"),
            (text and self.embedding_norm in ("before", "both"), "input", "embedding_norm", "a norm after"),
            (audio and self.channels != 1, "input", "channels", "one channel"),
            ((text or audio) and self.embedding != "linear", "input", "embedding", "a linear embedding"),
            (video and self.embedding in STEM_STRIDES, "input", "embedding", "a linear or mlp embedding"),
            (flat and len(self.grid) != 2, "position", "input", "rows and columns"),
            (
                self.pool in ("class", "class-mean") and not self.class_token,
                *("pool", "class_token", "a class token"),
            ),
            (self.rows == "class" and not self.class_token, "rows", "class_token", "a class token"),
            (self.distillation_token and not self.class_token, "distillation_token", "class_token", "it too"),
            (distilled and not self.distillation_token, "head", "distillation_token", "a distillation token"),
            (distilled and self.pool != "class", "head", "pool", "the class token as pool"),
            (not self.head_bias and self.head != "linear", "head_bias", "head", "a linear head"),
            (self.mlp == "gated" and self.mlp_hidden != 1, "mlp", "mlp_hidden", "one hidden layer"),
            ("sincos" in self.position and self.width % 4, "position", "width", "a width that 4 divides"),
            (self.position == "learned2d" and self.width % 2, "position", "width", "an even width"),
            ("rotary" in self.position and self.d % 4, "position", "d", "a head width that 4 divides"),
            (self.position_at == "every" and not added, "position_at", "position", "added positions"),
            (self.position_sigma and not learned, "position_sigma", "position", "learned positions"),
            (self.scale == 0 and not biased, "scale", "position", "pairwise or relative positions"),
            (
                drops and not (added or self.position == "none"),
                "patch_dropout",
                "position",
                "added positions",
            ),
            (drops and self.position_at == "every", "patch_dropout", "position_at", "positions at the start"),
            (drops and self.pool == "flatten", "patch_dropout", "pool", "a pool for any count of patches"),
            (
                any(side % stride for side in self.patch_pixels),
                "embedding",
                "patch",
                f"multiples of {stride}",
            ),
        ]
        for wrong, name, other, needs in rules:
            if wrong:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} needs {needs}.",
                    f"{other}={getattr(self, other)!r}",
                    f"Change {name} or {other}.",
                )


def by(sides: Iterable[int]) -> str:
    """Sides as people write them: 224x224."""
    return "x".join(map(str, sides))
