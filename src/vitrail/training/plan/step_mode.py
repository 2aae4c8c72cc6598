"""How a step is computed: compiled or not, captured as a CUDA graph or not, and why."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vitrail.training.trainer import Trainer

# Estimates for an H200 with 16 cores, from the steps in docs/benchmarks.md. A wrong one only costs time.
_LAUNCH_BOUND = 0.7  # of the time of a step passes until its last kernel is launched
_MEMORY = 0.45  # of the device's: more is not kept for a graph


@dataclass(frozen=True)
class _Way:
    """What is done to a step's kernels, and what that takes and gains."""

    compile: bool = False
    kernels: bool = False
    seconds: float = 0.0
    """Until the first step."""
    seconds_per_block: float = 0.0
    fraction: float = 1.0
    """Of the time of a plain step."""
    captured_fraction: float = 0.23
    """The same for a step that is launch-bound, captured as a CUDA graph."""

    def ready(self, trainer: Trainer) -> float:
        return self.seconds + self.seconds_per_block * trainer.model.config.depth


_PLAIN = _Way()
_KERNELS = _Way(kernels=True, seconds=6.0, fraction=0.85, captured_fraction=0.14)
_COMPILED = _Way(compile=True, seconds=12.0, seconds_per_block=1.5, fraction=0.8, captured_fraction=0.1)
_BOTH = replace(_COMPILED, kernels=True, fraction=0.7, captured_fraction=0.08)


@dataclass(frozen=True)
class StepMode:
    """How the steps of a run are computed."""

    compile: bool
    cuda_graph: bool
    reason: str = ""
    """What was chosen and why, for the plan."""
    kernels: bool = False
    """Whether fused kernels are used (`vitrail.fast.variants`)."""
    seconds: float | None = None
    """The estimated duration of a micro-batch; None if it was not measured."""
    ready: float = 0.0
    """The estimated time until the first step, for compiling."""


@dataclass(frozen=True)
class _PassCost:
    """What one forward and backward pass costs."""

    seconds: float = 0.0
    launch_bound: bool = False
    """Whether launching its kernels takes most of the time."""
    memory: float = 0.0
    """The fraction of the device's memory that is in use."""


def choose_step_mode(trainer: Trainer) -> StepMode:
    """Follow the settings; where they say "auto", time a forward and backward pass and choose."""
    s = trainer.settings
    if trainer.compute.device.type != "cuda":
        where = {"cpu": "a CPU", "mps": "MPS"}[trainer.compute.device.type]
        return StepMode(
            s.compile is True, False, "compiled" if s.compile is True else f"not compiled, on {where}"
        )
    if s.native:
        return StepMode(False, False, "not compiled, because the images of a step differ in shape")
    cost = _measure_pass(trainer)
    obstacle = capture_obstacle(trainer)
    if not obstacle and s.cuda_graph == "auto" and cost.memory > _MEMORY:
        obstacle = f"a step needs {cost.memory:.0%} of the device's memory"
    graph = bool(s.cuda_graph) and not obstacle
    way, seconds, why = _choose_way(trainer, cost, graph)
    if s.cuda_graph:
        why += f", not captured as a CUDA graph: {obstacle}" if obstacle else ", captured as one CUDA graph"
    return StepMode(way.compile, graph, why, way.kernels, seconds, way.ready(trainer))


def _choose_way(trainer: Trainer, cost: _PassCost, graph: bool) -> tuple[_Way, float, str]:
    """The way that takes the least time for the remaining steps, the seconds of a pass, and a reason."""
    s, passes = trainer.settings, (trainer.steps - trainer.step) * trainer.settings.accumulate
    triton = find_spec("triton") is not None
    # The kernels read fp32 weights, and those of shards are gathered in bf16.
    half = triton and trainer.compute.dtype == torch.bfloat16 and not trainer.parallel.sharded
    plain = [_PLAIN, _KERNELS] if half else [_PLAIN]
    compiled = _BOTH if half else _COMPILED

    def seconds(way: _Way) -> float:
        return cost.seconds * (way.captured_fraction if graph and cost.launch_bound else way.fraction)

    def total(way: _Way) -> float:
        return way.ready(trainer) + seconds(way) * passes

    best = min(plain, key=total)
    fused = " with fused kernels" if best.kernels else ""
    if s.compile is False:
        return best, seconds(best), f"not compiled{fused}"
    if s.compile is True:
        return compiled, seconds(compiled), "compiled"
    if not triton:
        return best, seconds(best), "not compiled (Triton is not installed)"
    saves, takes = (
        seconds(best) * passes + best.ready(trainer) - seconds(compiled) * passes,
        compiled.ready(trainer),
    )
    if saves > takes:
        return (
            compiled,
            seconds(compiled),
            f"compiled (takes about {takes:.0f} s, saves about {saves:,.0f} s)",
        )
    why = f"not compiled{fused} (would take about {takes:.0f} s and save about {max(0.0, saves):,.0f} s)"
    return best, seconds(best), why


def _measure_pass(trainer: Trainer) -> _PassCost:
    """Measure a forward and backward pass on random images, after three that warm up."""
    count = trainer.batch // trainer.ranks.count // trainer.settings.accumulate
    device = trainer.compute.device
    images = torch.rand(count, *trainer.model.config.input_shape, device=device)
    trainer.executable.set_mode()
    torch.cuda.reset_peak_memory_stats(device)
    start = launched = 0.0
    for _ in range(4):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        rehearse_pass(trainer, images)
        launched = time.perf_counter() - start
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    trainer.optimizer.zero_grad(set_to_none=True)
    memory = torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
    return _PassCost(seconds, launched > _LAUNCH_BOUND * seconds, memory)


def rehearse_pass(trainer: Trainer, images: Tensor) -> None:
    """A forward and backward pass that is only to be timed: its gradients are of no use."""
    forward = trainer.executable.wrapped if trainer.parallel.sharded else trainer.executable.twin
    with trainer.compute.attention():
        with trainer.compute.autocast():
            output = forward(images)
        output = output[0] if isinstance(output, tuple) else output
        output.float().square().mean().backward()


def capture_obstacle(trainer: Trainer) -> str:
    """Why a step cannot be captured as a CUDA graph; empty if it can."""
    if trainer.ranks.count > 1:
        return "several processes exchange gradients"
    if trainer.compute.dtype == torch.float16:
        return "the scale of the loss changes"
    if trainer.settings.checkpoint_blocks:
        return "activation checkpointing restores the state of the random generator"
    return ""
