"""The largest batch that fits into memory: tried on a GPU, estimated on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from vitrail.base.machine import is_out_of_memory
from vitrail.images.loader import Batch
from vitrail.model.config import ViTConfig
from vitrail.model.device import ComputeDevice
from vitrail.model.model_memory import step_bytes
from vitrail.training.parallel import ProcessGroup, usable_memory
from vitrail.training.plan.step_mode import StepMode
from vitrail.training.trainer import Trainer

if TYPE_CHECKING:
    from vitrail.training.run_plan import RunPlan

MIN_STEPS = 10
"""Steps that an epoch keeps, however large a batch could be."""

Measure = Callable[[Callable[[], None]], int]
"""Calls a function and returns the bytes that were in use at most."""


def choose_batch(plan: RunPlan, measure: Measure | None = None) -> tuple[int, str]:
    """The largest batch that fits, as a power of two per process and micro-batch; and a sentence about it.

    Args:
        measure: measures the steps that are tried; by default a GPU's memory. On a CPU none are tried.
    """
    compute, ranks = plan.compute, plan.ranks
    parts = ranks.count * plan.recipe.train.accumulate
    most = len(plan.data.train) // MIN_STEPS // parts
    if measure is None and compute.device.type == "cuda":
        measure = partial(_gpu_peak, compute.device)
    trial = cache(lambda: build_trial(plan))

    def fits(images: int) -> bool:
        if measure is None:
            fitting = estimated_to_fit(plan.recipe.model, compute, images)
        else:
            fitting = _step_fits(trial, images, measure, shared=ranks.count > 1)
        return not ranks.any(not fitting)

    images = largest_power(fits, most)
    trial.cache_clear()
    _free_memory()
    how = "the largest that fits in memory"
    if 2 * images > most:
        steps = len(plan.data.train) // (images * parts)
        how = f"an epoch then has {steps} steps, and fewer than {MIN_STEPS} with more"
    return images * parts, f"Batch {images * parts}: {how}."


def largest_power(fits: Callable[[int], bool], most: int) -> int:
    """The largest power of two up to `most` for which all smaller ones fit as well; at least 2."""
    images = 2
    while 2 * images <= most and fits(2 * images):
        images *= 2
    return images


def fitting_batch(config: ViTConfig, compute: ComputeDevice, too_many: int) -> int:
    """Half of the images that did not fit, or fewer: the largest power of two that is estimated to fit."""
    return largest_power(lambda images: estimated_to_fit(config, compute, images), too_many // 2)


def estimated_to_fit(config: ViTConfig, compute: ComputeDevice, images: int) -> bool:
    """Whether a step of so many images should fit."""
    return step_bytes(config, images, compute.dtype.itemsize) <= usable_memory(compute, ProcessGroup())


# ---- steps that are tried -------------------------------------------------------------------


def build_trial(plan: RunPlan) -> Trainer:
    """The trainer of a run with these settings, of one process and with new weights; it reads no images.

    Its steps are neither compiled nor captured, which would take minutes and save memory rather than need it.
    """
    alone = replace(plan, ranks=ProcessGroup(), start=None)
    trainer = Trainer(alone.with_settings(batch=2 * plan.recipe.train.accumulate, workers=0))
    trainer.use_mode(StepMode(compile=False, cuda_graph=False))
    return trainer


def step_peak(trainer: Trainer, images: int, measure: Measure) -> int:
    """The bytes that a step of the trainer takes at most, with so many random images in a micro-batch."""
    arrays, channels = trainer.data.train.images, trainer.preprocess.channels
    height, width = trainer.preprocess.target if arrays is None else arrays.shape[1:3]
    pixels = torch.randint(0, 256, (images, channels, height, width), dtype=torch.uint8)
    batch = Batch(torch.arange(images) % len(trainer.data.train), pixels, torch.ones(images))
    if trainer.settings.native:
        shapes = [(height, width, channels)] * images
        batch = Batch(batch.indices, pixels.flatten(), batch.valid, shapes)
    return measure(lambda: trainer.take_step(repeat(batch)))


def _step_fits(trial: Callable[[], Trainer], images: int, measure: Measure, *, shared: bool) -> bool:
    """Whether a step leaves a margin of the memory free.

    Args:
        shared: whether several processes average their gradients, in a buffer of the size of these.
    """
    try:
        trainer = trial()
        peak = step_peak(trainer, images, measure)
        arrays = trainer.data.train.images
        stored = 0 if arrays is None else arrays.nbytes  # on the device, during a run
        trained = sum(p.nbytes for p in trainer.trained.parameters() if p.requires_grad)
        return peak + stored + shared * trained <= usable_memory(trainer.compute, trainer.ranks)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        _free_memory()


def _gpu_peak(device: torch.device, step: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
