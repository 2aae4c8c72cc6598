"""Checks of a model's config: fields that contradict each other, impossible sizes, typing mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

from vitrail.base.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.model.config import ViTConfig

# The largest published ViT has 22 billion parameters. A config far above that is a typing mistake or a
# malicious file; it is refused before any memory is allocated.
MAX_PARAMETERS = 100_000_000_000
MAX_BLOCKS = 10_000

STEM_STRIDES = {"conv": 4, "resnet": 16, "mobile": 8}


class PositionScheme(NamedTuple):
    """The requirements of a position scheme; the scheme itself is in model/position.py."""

    kind: Literal["added", "rotary", "bias", "none"]
    learned: bool = False
    two_d: bool = False
    """Whether it needs rows and columns."""
    width_multiple: int = 1
    """The width must be a multiple of this; for rotary embeddings, the head width."""
    table: Literal["tokens", "pairs", "small"] = "small"
    """What the number of its parameters grows with, for the estimate of a model's size."""

    @property
    def has_table(self) -> bool:
        """Whether it has a learned row for each token, `position.table`."""
        return self.learned and self.table == "tokens"

    @property
    def adds_rows(self) -> bool:
        """Whether it adds a row to each token."""
        return self.kind == "added" or (self.kind == "rotary" and self.learned)


POSITIONS = {
    "learned": PositionScheme("added", learned=True, table="tokens"),
    "learned2d": PositionScheme("added", learned=True, two_d=True, width_multiple=2),
    "sincos1d": PositionScheme("added", table="tokens"),
    "sincos2d": PositionScheme("added", two_d=True, width_multiple=4, table="tokens"),
    "rotary": PositionScheme("rotary", two_d=True, width_multiple=4),
    "rotary-dinov3": PositionScheme("rotary", two_d=True, width_multiple=4),
    "rotary-eva02": PositionScheme("rotary", learned=True, two_d=True, width_multiple=4, table="tokens"),
    "rotary-pe": PositionScheme("rotary", learned=True, two_d=True, width_multiple=4, table="tokens"),
    "pairwise": PositionScheme("bias", learned=True, table="pairs"),
    "relative": PositionScheme("bias", learned=True, two_d=True),
    "none": PositionScheme("none"),
}


def check_config(c: ViTConfig) -> None:
    """Raise a ConfigError if the fields of a config do not fit each other."""
    _check_heads(c)
    _check_remainder(c)
    _check_combinations(c)
    _check_parameter_count(c)


def _check_heads(c: ViTConfig) -> None:
    if c.head_width is None and c.width % c.heads:
        small = [i for i in range(1, math.isqrt(c.width) + 1) if c.width % i == 0]
        divisors = sorted({*small, *(c.width // i for i in small)})
        near = [
            *[k for k in divisors if k < c.heads][-1:],
            *[k for k in divisors if k > c.heads][:1],
        ]
        raise ConfigError(
            f"width={c.width} is not a multiple of heads={c.heads}; use "
            f"{' or '.join(f'heads={k}' for k in near)}, or set head_width."
        )


def _check_remainder(c: ViTConfig) -> None:
    axes = list(zip(c.pixels, c.patch_pixels, strict=True))
    if c.remainder == "cut" and all(step <= side for side, step in axes):
        return
    if any(side % step for side, step in axes):
        smaller = [side - side % step for side, step in axes]
        larger = [side + -side % step for side, step in axes]
        multiples = [format_sides(sides) for sides in (smaller, larger) if all(sides)]
        patch = format_sides(c.patch_pixels)
        raise ConfigError(
            f"{c.input} size {format_sides(c.pixels)} is not a multiple of the patch size {patch}; "
            f'use {" or ".join(multiples)}, another patch, or remainder="cut".'
        )


def _check_parameter_count(c: ViTConfig) -> None:
    if c.depth > MAX_BLOCKS:
        raise ConfigError(f"depth must be at most {MAX_BLOCKS:,}, not {c.depth:,}.")
    counts = c.parameter_counts
    if (total := sum(counts.values())) > MAX_PARAMETERS:
        raise ConfigError(
            f"This config has {total:,} parameters, more than the limit of {MAX_PARAMETERS:,}; most of "
            f"them are in {max(counts, key=counts.__getitem__)}."
        )


def _check_combinations(c: ViTConfig) -> None:
    """Check fields against each other: (whether they conflict, field, other field, requirement)."""
    stride, position = STEM_STRIDES.get(c.embedding, 1), POSITIONS[c.position]
    added, rotary, biased = (position.kind == kind for kind in ("added", "rotary", "bias"))
    learned, classless = position.learned and not biased, not c.class_token
    pools = c.pool == "attention"
    pool_heads = c.pool_heads or c.heads
    multiple, drops, distilled = position.width_multiple, c.patch_dropout > 0, c.head == "distilled"
    text, audio, video = (c.input == kind for kind in ("text", "audio", "video"))
    rules = [
        (text and c.vocabulary is None, "input", "vocabulary", "a vocabulary"),
        (c.vocabulary is not None and not text, "vocabulary", "input", 'input="text"'),
        (text and c.patch != (1,), "input", "patch", "patch=1"),
        (text and c.embedding_norm in ("before", "both"), "input", "embedding_norm", "after or none"),
        (audio and c.channels != 1, "input", "channels", "channels=1"),
        ((text or audio) and c.embedding != "linear", "input", "embedding", "a linear embedding"),
        (video and c.embedding in STEM_STRIDES, "input", "embedding", "a linear or mlp embedding"),
        (position.two_d and len(c.grid) != 2, "position", "input", "rows and columns"),
        (classless and c.pool in ("class", "class-mean"), "pool", "class_token", "a class token"),
        (classless and c.rows == "class", "rows", "class_token", "a class token"),
        (classless and c.distillation_token, "distillation_token", "class_token", "a class token"),
        (distilled and not c.distillation_token, "head", "distillation_token", "a distillation token"),
        (distilled and c.pool != "class", "head", "pool", 'pool="class"'),
        (
            not c.head_bias and c.head not in ("linear", "cosine"),
            *("head_bias", "head", "a linear or cosine head"),
        ),
        (c.pool_tokens == "all" and not pools, "pool_tokens", "pool", 'pool="attention"'),
        (c.pool_heads is not None and not pools, "pool_heads", "pool", 'pool="attention"'),
        (c.pool_mlp_width is not None and not pools, "pool_mlp_width", "pool", 'pool="attention"'),
        (
            c.pool_heads is not None and c.heads_width % pool_heads,
            *("pool_heads", "heads_width", "a width of all heads divisible by it"),
        ),
        (c.mlp == "gated" and c.mlp_hidden != 1, "mlp", "mlp_hidden", "one hidden layer"),
        (not rotary and c.width % multiple, "position", "width", f"a width divisible by {multiple}"),
        (rotary and c.d % multiple, "position", "d", f"a head width divisible by {multiple}"),
        (c.position_at == "every" and not added, "position_at", "position", "added positions"),
        (c.position_sigma and not learned, "position_sigma", "position", "learned positions"),
        (c.scale == 0 and not biased, "scale", "position", "a position bias"),
        (drops and (rotary or biased), "patch_dropout", "position", "added positions"),
        (drops and c.position_at == "every", "patch_dropout", "position_at", 'position_at="start"'),
        (
            drops and c.pool == "flatten",
            *("patch_dropout", "pool", "a pool that takes any number of patches"),
        ),
        (
            any(side % stride for side in c.patch_pixels),
            *("embedding", "patch", f"a patch size divisible by {stride}"),
        ),
    ]
    for conflict, name, other, needs in rules:
        if conflict:
            value, other_value = getattr(c, name), getattr(c, other)
            raise ConfigError(f"{name}={value!r} needs {needs}, but {other}={other_value!r}.")


def format_sides(sides: Iterable[int]) -> str:
    """Format (224, 224) as "224x224"."""
    return "x".join(map(str, sides))
