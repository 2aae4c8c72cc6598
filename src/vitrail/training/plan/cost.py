"""What a training step costs on many GPUs: time, memory and traffic, by arithmetic on the model's config.

compute  the floating-point operations of a step, at the fraction of a plain matrix product that steps of
         B/16 and L/16 reached on one H200: as `vitrail train` takes them (bench/results/steps-*.json), and
         for shards, which have no fused kernels, compiled only (gpu-B16.json, gpu-L16.json)
traffic  the bytes that gradients and gathered weights take, over the slower of the links within a machine
         and between machines, and the latency of their messages. Weights are gathered during all of a step;
         gradients of copies are exchanged during its last backward pass. What is left over is waited for.
loading  reading JPEG files, and decoding them on the machine's cores, while the GPUs compute

Nothing about several GPUs is measured: bandwidths, latency and the overlap are assumptions, and small
batches, where GPUs wait for launches, are not modeled. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitrail.base.errors import ConfigError
from vitrail.base.machine import format_bytes
from vitrail.model.config import ViTConfig
from vitrail.model.model_memory import activation_bytes, state_bytes

Mode = Literal["one", "ddp", "fsdp", "hsdp"]

# The fraction of a plain product that is reached, in bf16 with 256 images: linear between measured widths,
# proportional to the width below them, and constant above.
_WIDTHS, _EFFICIENCY, _COMPILED_EFFICIENCY = (0, 768, 1024), (0.0, 0.562, 0.611), (0.0, 0.486, 0.565)
_DECODE_RATE = 490  # images/s of a core: 500 x 375 JPEG, training crop, bicubic (bench/results/decode.json)
_FILE_BYTES = 110_000  # of an image file; assumed: about the mean of ImageNet's
MARGIN = 0.85  # of a GPU's memory
_HALF, _FLOAT = 2, 4  # bytes


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs, and what connects them. The defaults are an H200 as measured, and assumed links."""

    gpus: int = 1
    nodes: int = 1
    tflops: float = 790.0
    """Of a bf16 product of 8192 x 8192 matrices; measured."""
    memory: float = 139 * 2**30
    link: float = 360e9
    """Bytes/s in each direction between the GPUs of a machine; assumed: NVLink at 80 % of 450 GB/s."""
    network: float = 40e9
    """Bytes/s in each direction between machines, for each GPU; assumed: 80 % of 400 Gbit/s."""
    latency: float = 10e-6
    """Seconds for a message to the next GPU of a ring; assumed."""
    cores: int = 14
    """That decode, for each GPU; assumed."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.gpus <= 1_000_000 or self.gpus % self.nodes:
            raise ConfigError(
                f"gpus must be a multiple of nodes, each with the same number; got {self.gpus} GPUs on "
                f"{self.nodes} nodes. Change one of them."
            )

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True)
class StepCost:
    """What a step takes on every GPU, in seconds and bytes."""

    mode: Mode
    compute: float
    traffic: float
    loading: float
    states: float
    activations: float
    all_gather: float
    """Bytes that a GPU sends: shards of weights; the next two: shards of gradients, gradients of copies."""
    reduce_scatter: float
    all_reduce: float
    read: float
    checkpoint: float
    window: float
    """Seconds of computing in which traffic is hidden."""
    fits: bool

    @property
    def sent(self) -> float:
        """Bytes that a GPU sends."""
        return self.all_gather + self.reduce_scatter + self.all_reduce

    @property
    def waiting(self) -> float:
        """Seconds of traffic that no computing hides."""
        return max(0.0, self.traffic - self.window)

    @property
    def seconds(self) -> float:
        return max(self.compute + self.waiting, self.loading)

    @property
    def bottleneck(self) -> str:
        if self.loading > self.compute + self.waiting:
            return "loading"
        return "traffic" if self.waiting > self.compute / 2 else "compute"

    @property
    def memory(self) -> float:
        return self.states + self.activations


def step_cost(
    config: ViTConfig,
    cluster: Cluster,
    batch: int,
    *,
    ema: bool = False,
    checkpointed: int = 0,
    accumulate: int = 1,
) -> StepCost:
    """The cost of a step that trains all parameters, in bf16 with AdamW.

    Args:
        batch: the images of a step, over all GPUs.
        checkpointed: the blocks that are computed again for the gradient.
    """
    if batch % (cluster.gpus * accumulate):
        raise ConfigError(
            f"the batch must be divisible by GPUs times accumulate; got batch={batch:,}, {cluster.gpus} GPUs "
            f"and accumulate={accumulate}. Change one of them."
        )
    images, count = batch // cluster.gpus, sum(config.parameter_counts.values())
    memory = StepMemory(
        config=config,
        parameters=count,
        trained=count,
        images=images // accumulate,
        processes=cluster.gpus,
        checkpointed=checkpointed,
        ema=ema,
    )

    def fits(size: float) -> bool:
        return size <= MARGIN * cluster.memory

    mode = fitting_mode(memory.total, cluster.gpus, cluster.per_node, fits)
    seconds, all_gather, reduce_scatter, all_reduce = _traffic(config, cluster, mode, accumulate)
    shards = {"fsdp": cluster.gpus, "hsdp": cluster.per_node}.get(mode, 1)
    passes = 3 + min(checkpointed, config.depth) / config.depth  # a backward pass takes two forward passes
    reached = np.interp(config.width, _WIDTHS, _COMPILED_EFFICIENCY if shards > 1 else _EFFICIENCY)
    compute = float(images * passes * forward_flops(config) / (cluster.tflops * 1e12 * reached))
    return StepCost(
        mode,
        compute,
        seconds,
        loading=images / (cluster.cores * _DECODE_RATE),
        states=memory.states(shards),
        activations=memory.activations(shards),
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        all_reduce=all_reduce,
        read=images * _FILE_BYTES,
        checkpoint=_FLOAT * count * (4 if ema else 3),
        window=compute if shards > 1 else compute * (passes - 1) / passes / accumulate,
        fits=fits(memory.total(shards)),
    )


# ---- memory ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What a training step takes on each GPU, for a model in so many shards; 1: each GPU has a copy."""

    config: ViTConfig
    parameters: int
    trained: int
    images: int
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
        if shards == 1:
            return states
        # Beside its shards, a model has two gathered blocks in memory, and the gradient of one.
        counts, depth = self.config.parameter_counts, self.config.depth
        block = (2 * self.itemsize + _FLOAT) * (counts["attention"] + counts["the MLPs"]) // depth
        return states // shards + block

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


# ---- time -----------------------------------------------------------------------------------


def forward_flops(config: ViTConfig) -> float:
    """Of the matrix products of a forward pass on one image; a multiplication and an addition are two."""
    T, D, counts = config.tokens, config.width, config.parameter_counts
    blocks = T * (counts["attention"] + counts["the MLPs"]) + config.depth * 2 * T * T * config.heads_width
    embedding = math.prod(config.grid) * D * config.channels * math.prod(config.patch_pixels)
    return 2.0 * (blocks + embedding + config.pooled_width * config.classes)


def _traffic(
    config: ViTConfig, cluster: Cluster, mode: Mode, accumulate: int
) -> tuple[float, float, float, float]:
    """The time of a step's messages; and the bytes that a GPU sends to gather weights, to reduce gradients
    of shards, and to average those of copies. In rings, each GPU passes on what it gets."""
    count = sum(config.parameter_counts.values())
    n, g, m = cluster.gpus, cluster.per_node, cluster.nodes
    gathered, reduced = 2 * _HALF * count * accumulate, _FLOAT * count * accumulate  # in both passes
    averaged = 2 * _FLOAT * count
    # Within a machine a GPU sends nearly everything; between machines, the GPUs share what a machine sends.
    within, between = (g - 1) / g, (m - 1) / m
    hops, collectives = cluster.latency, config.depth + 1

    def seconds(bytes_within: float, bytes_between: float) -> float:
        return max(bytes_within / cluster.link, bytes_between / cluster.network) + hops

    match mode:
        case "one":
            return 0.0, 0.0, 0.0, 0.0
        case "ddp":
            hops *= 2 * math.log2(n) * collectives / 4  # trees, and buckets of several blocks
            time = seconds(averaged * within, averaged * between / g)
            return time, 0.0, 0.0, averaged * (n - 1) / n
        case "fsdp":
            hops *= 3 * (n - 1) * collectives * accumulate
            each, sent = gathered + reduced, (n - 1) / n
            return seconds(each * within, each * between / g), gathered * sent, reduced * sent, 0.0
        case "hsdp":
            hops *= (3 * (g - 1) * accumulate + 2 * math.log2(max(2, m))) * collectives
            copies = averaged / g * between
            time = seconds((gathered + reduced) * within, copies)
            return time, gathered * within, reduced * within, copies


def describe_cost(
    name: str, config: ViTConfig, cluster: Cluster, batch: int, cost: StepCost
) -> dict[str, str]:
    """The cost by name, for people to read."""
    millions = sum(config.parameter_counts.values()) / 1e6
    per_gpu = batch // cluster.gpus
    reasons = {
        "one": "one GPU",
        "ddp": "ddp: a copy of the model fits on each GPU",
        "hsdp": "hsdp: the model fits in shards on the GPUs of a node",
        "fsdp": "fsdp: the model needs shards over all GPUs",
    }
    advice = "" if cost.fits else "; it does not fit: checkpoint its blocks, accumulate, or use more GPUs"
    rate = batch / cost.seconds
    kinds = {
        "weights (all-gather)": cost.all_gather,
        "gradients (reduce-scatter)": cost.reduce_scatter,
        "gradients between copies (all-reduce)": cost.all_reduce,
    }
    sent = ", ".join(f"{format_bytes(size)} of {kind}" for kind, size in kinds.items() if size)
    plan = {
        "model": f"{name}: {millions:,.0f} million parameters, {config.tokens} tokens",
        "GPUs": f"{cluster.gpus:,} on {cluster.nodes:,} node{'s' * (cluster.nodes > 1)}",
        "mode": f"{reasons[cost.mode]} (parallel={'auto' if cost.mode == 'one' else cost.mode})",
        "batch": f"{batch:,}, {per_gpu:,} for each GPU",
        "memory": f"{format_bytes(cost.memory)} of {format_bytes(cluster.memory)} on each GPU: states "
        f"{format_bytes(cost.states)}, activations {format_bytes(cost.activations)}{advice}",
        "step": f"{cost.seconds * 1000:,.0f} ms: compute {cost.compute * 1000:,.0f}, and at the same "
        f"time traffic {cost.traffic * 1000:,.0f} and loading {cost.loading * 1000:,.0f}",
        "bottleneck": cost.bottleneck,
        "speed": f"{rate:,.0f} images/s, {rate / cluster.gpus:,.0f} for each GPU",
        "traffic": f"{format_bytes(cost.sent)} sent by each GPU in a step: {sent}",
        "loading": f"{format_bytes(cost.read)} of image files for each GPU in a step, "
        f"{format_bytes(cost.read * cluster.gpus / cost.seconds)}/s for all",
        "checkpoint": format_bytes(cost.checkpoint),
    }
    return plan if cost.sent else {row: text for row, text in plan.items() if row != "traffic"}
