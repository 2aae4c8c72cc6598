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
_FEW, _SLOW = 8, 0.2  # where so many images take so many seconds, larger batches are not timed


@dataclass(frozen=True)
class _Variant:
    """A way to compute a step's kernels, with its cost and gain.

    It takes a fraction of the time of a plain step; the other one where launching is slow and captured.
    """

    compile: bool = False
    kernels: bool = False
    seconds: float = 0.0
    """Until the first step; and as many for each block."""
    seconds_per_block: float = 0.0
    fraction: float = 1.0
    captured_fraction: float = 0.23

    def ready(self, trainer: Trainer) -> float:
        return self.seconds + self.seconds_per_block * trainer.model.config.depth


_PLAIN = _Variant()
_KERNELS = _Variant(kernels=True, seconds=6.0, fraction=0.85, captured_fraction=0.14)
_COMPILED = _Variant(compile=True, seconds=12.0, seconds_per_block=1.5, fraction=0.8, captured_fraction=0.1)
_BOTH = replace(_COMPILED, kernels=True, fraction=0.7, captured_fraction=0.08)


@dataclass(frozen=True)
class StepMode:
    """How the steps of a run are computed."""

    compile: bool
    cuda_graph: bool
    reason: str = ""
    kernels: bool = False
    seconds: float | None = None
    """Estimated time of a micro-batch; None if it was not measured."""
    ready: float = 0.0
    """Estimated time before the first step."""


@dataclass(frozen=True)
class _PassCost:
    """What one forward and backward pass costs; `memory` is a fraction of the device's."""

    seconds: float = 0.0
    launch_bound: bool = False
    memory: float = 0.0


def choose_step_mode(trainer: Trainer) -> StepMode:
    """Follow the settings; where they say "auto", time a forward and backward pass and choose."""
    s, device = trainer.settings, trainer.compute.device.type
    compiles = trainer.plan.resolved.get("compile", s.compile)  # a resumed run does what it did before
    if device != "cuda":
        why = {"cpu": "not compiled, on a CPU", "mps": "not compiled, on MPS"}[device]
        return StepMode(compiles is True, False, "compiled" if compiles is True else why)
    if s.native:
        return StepMode(False, False, "not compiled, because the images of a step differ in shape")
    cost = _measure_pass(trainer)
    obstacle = capture_obstacle(trainer)
    if not obstacle and s.cuda_graph == "auto" and cost.memory > _MEMORY:
        obstacle = f"a step needs {cost.memory:.0%} of the device's memory"
    graph = bool(s.cuda_graph) and not obstacle
    chosen, seconds, why = _choose_variant(trainer, cost, graph, compiles)
    if s.cuda_graph:
        why += f", not captured as a CUDA graph: {obstacle}" if obstacle else ", captured as one CUDA graph"
    return StepMode(chosen.compile, graph, why, chosen.kernels, seconds, chosen.ready(trainer))


def _choose_variant(
    trainer: Trainer, cost: _PassCost, graph: bool, compiles: bool | str
) -> tuple[_Variant, float, str]:
    """The variant that takes the least time for the remaining steps, the seconds of a pass, and a reason."""
    passes = (trainer.steps - trainer.step) * trainer.settings.accumulate
    triton = find_spec("triton") is not None
    # The kernels read fp32 weights, and those of shards are gathered in bf16.
    half = triton and trainer.compute.dtype == torch.bfloat16 and not trainer.parallel.sharded

    def seconds(one: _Variant) -> float:
        return cost.seconds * (one.captured_fraction if graph and cost.launch_bound else one.fraction)

    def total(one: _Variant) -> float:
        return one.ready(trainer) + seconds(one) * passes

    plain = min([_PLAIN, _KERNELS] if half else [_PLAIN], key=total)
    compiled = _BOTH if half else _COMPILED
    fused = " with fused kernels" if plain.kernels else ""
    takes = compiled.ready(trainer)
    saves = total(plain) - seconds(compiled) * passes
    if compiles is False:
        chosen, why = plain, f"not compiled{fused}"
    elif compiles is True:
        chosen, why = compiled, "compiled"
    elif not triton:
        chosen, why = plain, "not compiled (Triton is not installed)"
    elif saves > takes:
        chosen, why = compiled, f"compiled (takes about {takes:.0f} s, saves about {saves:,.0f} s)"
    else:
        saving = f"would take about {takes:.0f} s and save about {max(0.0, saves):,.0f} s"
        chosen, why = plain, f"not compiled{fused} ({saving})"
    return chosen, seconds(chosen), why


def capture_obstacle(trainer: Trainer) -> str:
    """Why a step cannot be captured as a CUDA graph; empty if it can."""
    if trainer.ranks.count > 1:
        return "several processes exchange gradients"
    if trainer.compute.dtype == torch.float16:
        return "the scale of the loss changes"
    if trainer.settings.checkpoint_blocks:
        return "activation checkpointing restores the state of the random generator"
    return ""


# ---- passes that are timed ------------------------------------------------------------------


def _measure_pass(trainer: Trainer) -> _PassCost:
    """Measure a forward and backward pass on random images, after three that warm up."""
    device, images = trainer.compute.device, _random_images(trainer)
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


def estimate_seconds(trainer: Trainer) -> float:
    """The time of the remaining steps, from one forward and backward pass on random images."""
    t, passes = trainer, trainer.settings.accumulate * (trainer.steps - trainer.step)
    if t.mode is not None and t.mode.seconds is not None and t.teacher is None:
        return t.mode.seconds * passes  # on a GPU: the model itself would run neither compiled nor captured
    images = _random_images(t)
    few = images[:_FEW]
    if _time_pass(t, few) > _SLOW:  # with what happens once, such as allocating memory
        seconds = _time_pass(t, few) * len(images) / len(few)
    else:
        _time_pass(t, images)
        seconds = _time_pass(t, images)
    t.optimizer.zero_grad(set_to_none=True)
    return seconds * passes


def _time_pass(trainer: Trainer, images: Tensor) -> float:
    """The seconds of a forward and backward pass, the teacher's forward pass included."""
    start = time.perf_counter()
    rehearse_pass(trainer, images)
    if trainer.teacher is not None:
        trainer.teacher(images)
    if trainer.compute.device.type != "cpu":
        torch.accelerator.synchronize(trainer.compute.device)
    return time.perf_counter() - start


def _random_images(trainer: Trainer) -> Tensor:
    """Random images, as many as in a micro-batch."""
    count = trainer.batch // trainer.ranks.count // trainer.settings.accumulate
    return torch.rand(count, *trainer.model.config.input_shape, device=trainer.compute.device)


def rehearse_pass(trainer: Trainer, images: Tensor) -> None:
    """A forward and backward pass that is only to be timed: its gradients are of no use."""
    forward = trainer.executable.wrapped if trainer.parallel.sharded else trainer.executable.twin
    with trainer.compute.attention():
        with trainer.compute.autocast():
            output = forward(images)
        output = output[0] if isinstance(output, tuple) else output
        output.float().square().mean().backward()
