"""Lower bounds of the memory a model needs, checked against what the machine has.

Linux grants memory that it does not have and later kills the process that uses it, without a message. So
sizes are added up before anything is allocated. They are lower bounds: a model that is refused here could
not have run, and one that passes may still be too large.
"""

from __future__ import annotations

import math

from vitrail.base.errors import InputError
from vitrail.base.machine import format_bytes, memory_limit
from vitrail.model.config import ViTConfig, format_sides

_FLOAT_BYTES = 4  # models compute in float32 on a CPU


def check_parameters(config: ViTConfig) -> None:
    """Refuse to build a model on the CPU whose parameters do not fit into memory."""
    counts, limit = config.parameter_counts, memory_limit()
    needed = _FLOAT_BYTES * sum(counts.values())
    if limit is not None and needed > limit:
        raise InputError(
            f"The parameters of this model need {format_bytes(needed)} of memory, and {format_bytes(limit)} "
            f"are available; most of them are in {max(counts, key=counts.__getitem__)}, so reduce that."
        )


def forward_bytes(config: ViTConfig, images: int = 1) -> int:
    """The least memory of a forward pass: the images, and the tokens at the widest point of a block; with a
    position bias, also a number for each head and pair of tokens."""
    T, D, inner = config.tokens, config.width, 3 * config.heads_width
    pairs = config.heads * T * T if config.position in ("pairwise", "relative") else 0
    pixels = config.channels * math.prod(config.pixels) if config.input in ("image", "video") else 0
    return _FLOAT_BYTES * (images * (pixels + T * (2 * D + max(inner, config.F))) + pairs)


def attention_bytes(config: ViTConfig, images: int) -> int:
    """The memory of the attention scores and weights of one block, computed explicitly."""
    return 2 * _FLOAT_BYTES * images * config.heads * config.tokens**2


def training_bytes(config: ViTConfig, images: int) -> int:
    """The least memory of a training step: parameters, and the activations of every block."""
    parameters = _FLOAT_BYTES * sum(config.parameter_counts.values())
    return parameters + config.depth * forward_bytes(config, images)


def activation_bytes(
    config: ViTConfig,
    images: int,
    itemsize: int = _FLOAT_BYTES,
    *,
    residual: int = _FLOAT_BYTES,
    checkpointed: int = 0,
    shards: int = 1,
) -> int:
    """About what the blocks keep for the backward pass of a training step; no lower bound.

    Args:
        itemsize, residual: bytes of a number in products, and in the residual stream.
        checkpointed: the blocks that keep only their input; one of them at a time is computed again. Their
            inputs are released while gradients come into being, so that about half of these is never there
            at the same time.
        shards: in how many parts the gradients are cut.
    """
    # The residual stream before both norms; the inputs of the four products, q, k and v, and what the
    # activation function takes: of a gated MLP two parts, one of them activated, and their product.
    hidden = config.F * (4 if config.mlp == "gated" else 2 * config.mlp_hidden)
    block = 2 * residual * config.width + itemsize * (2 * config.width + 4 * config.heads_width + hidden)
    few = min(checkpointed, config.depth)
    whole = config.depth - few + (few > 0)
    rows, counts = images * config.tokens, config.parameter_counts
    gradients = _FLOAT_BYTES * (counts["attention"] + counts["the MLPs"]) * few // config.depth // shards
    inputs = rows * few * residual * config.width - gradients // 2
    return rows * whole * block + max(0, inputs)


def state_bytes(parameters: int, trained: int, *, ema: bool, copies: bool = False) -> int:
    """Memory of a model between two steps: weights, gradients, two moments of AdamW, and the EMA.

    Args:
        copies: whether every process has a copy, whose gradients are averaged in a buffer of their size.
    """
    return _FLOAT_BYTES * (parameters * (2 if ema else 1) + trained * (4 if copies else 3))


def step_bytes(config: ViTConfig, images: int, itemsize: int = _FLOAT_BYTES) -> int:
    """About what a training step takes: weights, gradients, two moments, EMA and activations."""
    parameters = sum(config.parameter_counts.values())
    return state_bytes(parameters, parameters, ema=True) + activation_bytes(config, images, itemsize)


def check_fits(needed: int, config: ViTConfig, images: int, what: str, advice: str) -> None:
    """Refuse an operation on a batch of images that needs more than the available memory.

    Args:
        what, advice: for the message: "A training step", "use a smaller batch".
    """
    limit = memory_limit()
    if limit is not None and needed > limit:
        batch = f"{images:,} images" if images > 1 else "one image"
        raise InputError(
            f"{what} on {batch} of {format_sides(config.pixels)} ({config.tokens:,} tokens) needs at least "
            f"{format_bytes(needed)} of memory, and {format_bytes(limit)} are available; {advice}."
        )
