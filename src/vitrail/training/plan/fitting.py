"""The memory of a training step by the number of shards, and the mode that fits. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vitrail.model.config import ViTConfig
from vitrail.model.model_memory import activation_bytes, state_bytes

Mode = Literal["one", "ddp", "fsdp", "hsdp"]

MARGIN = 0.85  # of a GPU's memory
_HALF, _FLOAT = 2, 4  # bytes


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What a training step takes on each GPU, for a model in so many shards; 1: each GPU has a copy."""

    config: ViTConfig
    parameters: int
    trained: int
    """Parameters that are not frozen."""
    images: int
    """Of a micro-batch, on each GPU."""
    processes: int = 1
    itemsize: int = _HALF
    """Bytes of a number in products; the next one: in the residual stream."""
    residual: int = _HALF
    checkpointed: int = 0
    """Blocks that are computed again for the gradient."""
    ema: bool = False

    def states(self, shards: int) -> int:
        """Bytes of weights, gradients, optimizer and EMA, and of what is gathered."""
        copies = self.processes > 1 and shards == 1
        states = state_bytes(self.parameters, self.trained, ema=self.ema, copies=copies)
        return states // shards + (gathered_bytes(self.config, self.itemsize) if shards > 1 else 0)

    def activations(self, shards: int) -> int:
        """Bytes that the blocks keep for the backward pass; the gradients' shards matter, too."""
        return activation_bytes(
            self.config,
            self.images,
            self.itemsize,
            residual=self.residual,
            checkpointed=self.checkpointed,
            shards=shards,
        )

    def total(self, shards: int) -> int:
        return self.states(shards) + self.activations(shards)


def fitting_mode(
    memory: Callable[[int], float], count: int, per_node: int, fits: Callable[[float], bool]
) -> Mode:
    """ddp while everything fits; then shards within a machine, if that suffices; else shards over all.

    Args:
        memory: the bytes of a step on each GPU, by the number of shards (`StepMemory.total`).
        count, per_node: all processes, and those of a machine.
        fits: whether so many bytes fit, on every GPU.
    """
    if count == 1:
        return "one"
    if fits(memory(1)):
        return "ddp"
    uniform = 1 < per_node < count and count % per_node == 0
    return "hsdp" if uniform and fits(memory(per_node)) else "fsdp"


def gathered_bytes(config: ViTConfig, itemsize: int = _HALF) -> int:
    """What a sharded model has in memory beside its shards: two gathered blocks, and the gradient of one."""
    counts = config.parameter_counts
    return (2 * itemsize + _FLOAT) * (counts["attention"] + counts["the MLPs"]) // config.depth
