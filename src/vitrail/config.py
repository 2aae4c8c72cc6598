"""What a model is, as plain data: no torch, no files. Every field is checked as it is set.

The letters are the paper's: C channels, H x W pixels, P patch side, h x w patch grid, N patches,
T tokens, D width, k heads, d = D/k, F MLP width, L depth, K classes.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self, cast

from vitrail.errors import ConfigError, suggest

# The largest published ViT has 22 billion parameters. A config far above that is a slip of the
# hand, or a file that wants our memory: it is refused here, before anything is allocated.
MOST_PARAMETERS = 100_000_000_000
MOST_BLOCKS = 10_000
MOST = 10**12  # for any single field


class Config:
    """Base of all configs: an unknown field is an error that names the nearest known one."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__} takes only the fields it has.",
                    f"{name}={_show(given[name])}",
                    suggest(name, known),
                )
        return super().__new__(cls)

    def _set(self, name: str, value: Any) -> None:
        """The one way round `frozen`, for __post_init__ alone."""
        object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Config):
    """A Vision Transformer (Dosovitskiy et al. 2020), from pixels to logits."""

    width: int
    """D, the length of every token vector."""
    depth: int
    """L, how many blocks."""
    heads: int
    """k, how many attention heads in each block."""
    patch: int | tuple[int, int]
    """P, the side of a patch in pixels, or (height, width)."""
    size: int | tuple[int, int] = 224
    """The side of the picture in pixels, or (H, W)."""
    channels: int = 3
    """C, how many channels a picture has."""
    classes: int = 1000
    """K, how many logits; 0 for no head: the model then returns the pooled vector."""
    head_width: int | None = None
    """d, the width of one head; D/k when not given."""
    mlp_width: int | None = None
    """F, the hidden width of the MLP; 4D when not given."""
    dropout: float = 0.0
    """Rate after the embedding and after every dense layer but q, k, v (paper, B.1)."""
    attention_dropout: float = 0.0
    """Rate on the attention weights."""
    eps: float = 1e-6
    """Added to the variance in every LayerNorm."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "channels"):
            self._set(name, _whole(name, getattr(self, name), least=1))
        self._set("classes", _whole("classes", self.classes, least=0))
        self._set("patch", _pair("patch", self.patch))
        self._set("size", _pair("size", self.size))
        if self.head_width is None:
            self._check_heads()
            self._set("head_width", self.width // self.heads)
        if self.mlp_width is None:
            self._set("mlp_width", 4 * self.width)
        for name in ("head_width", "mlp_width"):
            self._set(name, _whole(name, getattr(self, name), least=1))
        for name in ("dropout", "attention_dropout"):
            rate = _number(name, getattr(self, name), "at least 0 and below 1", lambda p: 0 <= p < 1)
            self._set(name, rate)
        self._set("eps", _number("eps", self.eps, "above 0 and at most 1", lambda e: 0 < e <= 1))
        self._check_remainder()
        self._check_scale()

    # ---- what follows from the fields -------------------------------------------------------

    @property
    def pixels(self) -> tuple[int, int]:
        """(H, W)."""
        return cast(tuple[int, int], self.size)

    @property
    def patch_pixels(self) -> tuple[int, int]:
        """Height and width of one patch."""
        return cast(tuple[int, int], self.patch)

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w), how many patches fit down and across."""
        (H, W), (down, across) = self.pixels, self.patch_pixels
        return H // down, W // across

    @property
    def patches(self) -> int:
        """N = h w."""
        return math.prod(self.grid)

    @property
    def prefix(self) -> int:
        """How many tokens stand before the patches: the class token."""
        return 1

    @property
    def tokens(self) -> int:
        """T = prefix + N."""
        return self.prefix + self.patches

    @property
    def heads_width(self) -> int:
        """k d, the width of all heads side by side; D unless head_width is given."""
        return self.heads * cast(int, self.head_width)

    # ---- checks -----------------------------------------------------------------------------

    def _check_heads(self) -> None:
        if self.width % self.heads:
            small = [i for i in range(1, math.isqrt(self.width) + 1) if self.width % i == 0]
            fitting = sorted({*small, *(self.width // i for i in small)})  # all that divide the width
            near = [*[k for k in fitting if k < self.heads][-1:], *[k for k in fitting if k > self.heads][:1]]
            raise ConfigError(
                "width must be a multiple of heads, unless head_width is given.",
                f"width={self.width}, heads={self.heads}",
                f"Use {' or '.join(f'heads={k}' for k in near)}, or give head_width.",
            )

    def _check_remainder(self) -> None:
        (H, W), (down, across) = self.pixels, self.patch_pixels
        if H % down or W % across:
            smaller = H - H % down, W - W % across
            larger = H + -H % down, W + -W % across
            fitting = [f"{h}x{w}" for h, w in (smaller, larger) if h and w]
            raise ConfigError(
                "The picture must be a whole number of patches high and wide.",
                f"size {H}x{W} with patches of {down}x{across}",
                f"Use size {' or '.join(fitting)}, or another patch.",
            )

    def _check_scale(self) -> None:
        """Refuse absurd models by their matrices alone; the rest is small beside them."""
        if self.depth > MOST_BLOCKS:
            raise ConfigError(
                f"depth must be at most {MOST_BLOCKS:,}.", f"depth={self.depth:,}", "Use fewer blocks."
            )
        parts = {
            "the patch projection": self.width * self.channels * math.prod(self.patch_pixels),
            "the position table": self.tokens * self.width,
            "attention": 4 * self.depth * self.width * self.heads_width,
            "the MLPs": 2 * self.depth * self.width * cast(int, self.mlp_width),
            "the head": self.width * self.classes,
        }
        count = sum(parts.values())
        if count > MOST_PARAMETERS:
            raise ConfigError(
                f"A model may have at most {MOST_PARAMETERS:,} parameters.",
                f"a config that asks for {count:,}",
                f"Most of them are in {max(parts, key=parts.__getitem__)}: make that smaller.",
            )


def _show(value: object) -> str:
    """A repr that is short, and never fails (Python will not print an int of 5,000 digits)."""
    if isinstance(value, int) and abs(value) > MOST:
        return "a number beyond a million million"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _whole(name: str, value: object, least: int) -> int:
    """A whole number (numpy's too, but not True and not 3.0) from `least` up."""
    try:
        number = operator.index(cast(Any, value))
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= MOST:
        raise ConfigError(
            f"{name} must be a whole number from {least} to {MOST:,}.",
            f"{name}={_show(value)}",
            f"Set {name} to a whole number.",
        )
    return number


def _pair(name: str, value: object) -> tuple[int, int]:
    """A side, or (height, width), as a pair."""
    if not isinstance(value, (tuple, list)):
        value = (value, value)
    if len(value) != 2:
        raise ConfigError(
            f"{name} must be one side in pixels, or (height, width).",
            f"{name}={_show(value)}",
            "Give one number or two.",
        )
    return _whole(name, value[0], least=1), _whole(name, value[1], least=1)


def _number(name: str, value: object, must: str, holds: Callable[[float], bool]) -> float:
    """A real number for which `holds` is true (it is false for NaN)."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not holds(float(cast(float, value))):
        raise ConfigError(
            f"{name} must be {must}.", f"{name}={_show(value)}", f"Set {name} to such a number."
        )
    return float(cast(float, value))
