"""How a step is computed: compiled or not, captured as a CUDA graph or not, and why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vitrail.training.trainer import Trainer

# Estimates for an H200 with 16 cores, from the steps in docs/benchmarks.md. A wrong one only costs time.
_COMPILE_SECONDS, _COMPILE_SECONDS_PER_BLOCK = 12.0, 1.5
_COMPILED = 0.8  # of the time of the same step without compiling
_LAUNCH_BOUND = 0.7  # of the time of a step passes until its last kernel is launched
_CAPTURED, _COMPILED_AND_CAPTURED = 0.2, 0.1  # of the time of a plain step that is launch-bound
_MEMORY = 0.45  # of the device's: more is not kept for a graph


@dataclass(frozen=True)
class StepMode:
    """How the steps of a run are computed."""

    compile: bool
    cuda_graph: bool
    reason: str
    """What was chosen and why, for the plan."""
    seconds: float | None = None
    """The estimated duration of a micro-batch; None if it was not measured."""


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
    cost = _measure_pass(trainer) if "auto" in (s.compile, s.cuda_graph) else _PassCost()
    obstacle = capture_obstacle(trainer)
    if not obstacle and s.cuda_graph == "auto" and cost.memory > _MEMORY:
        obstacle = f"a step needs {cost.memory:.0%} of the device's memory"
    graph = bool(s.cuda_graph) and not obstacle
    compiles, why = _choose_compile(trainer, cost, graph)
    if graph and cost.launch_bound:
        fraction = _COMPILED_AND_CAPTURED if compiles else _CAPTURED
    else:
        fraction = _COMPILED if compiles else 1.0
    if s.cuda_graph:
        why += f", not captured as a CUDA graph: {obstacle}" if obstacle else ", captured as one CUDA graph"
    return StepMode(compiles, graph, why, cost.seconds * fraction or None)


def _choose_compile(trainer: Trainer, cost: _PassCost, graph: bool) -> tuple[bool, str]:
    """Whether to compile, and why."""
    s = trainer.settings
    if s.compile != "auto":
        return s.compile, "compiled" if s.compile else "not compiled"
    if find_spec("triton") is None:
        return False, "not compiled (Triton is not installed)"
    takes = _COMPILE_SECONDS + _COMPILE_SECONDS_PER_BLOCK * trainer.model.config.depth
    gain = _CAPTURED - _COMPILED_AND_CAPTURED if graph and cost.launch_bound else 1 - _COMPILED
    saves = gain * cost.seconds * (trainer.steps - trainer.step) * s.accumulate
    if saves > takes:
        return True, f"compiled (takes about {takes:.0f} s, saves about {saves:,.0f} s)"
    return False, f"not compiled (would take about {takes:.0f} s and save about {saves:,.0f} s)"


def _measure_pass(trainer: Trainer) -> _PassCost:
    """Measure a forward and backward pass on random images, after three that warm up."""
    count = trainer.batch // trainer.ranks.count // trainer.settings.accumulate
    device = trainer.compute.device
    images = torch.rand(count, *trainer.model.config.input_shape, device=device)
    trainer.model.train()
    torch.cuda.reset_peak_memory_stats(device)
    start = launched = 0.0
    for _ in range(4):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        with trainer.compute.autocast():
            loss = trainer.model(images).float().square().mean()
        loss.backward()
        launched = time.perf_counter() - start
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    trainer.optimizer.zero_grad(set_to_none=True)
    memory = torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
    return _PassCost(seconds, launched > _LAUNCH_BOUND * seconds, memory)


def capture_obstacle(trainer: Trainer) -> str:
    """Why a step cannot be captured as a CUDA graph; empty if it can."""
    if trainer.ranks.count > 1:
        return "several processes exchange gradients"
    if trainer.compute.dtype == torch.float16:
        return "the scale of the loss changes"
    if trainer.settings.checkpoint_blocks:
        return "activation checkpointing restores the state of the random generator"
    return ""
