"""The largest batch that fits into memory: tried on a GPU, estimated on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from vitrail.config import ViTConfig
from vitrail.data.sources import Dataset
from vitrail.fast.device import ComputeDevice
from vitrail.memory import is_out_of_memory, memory_limit, step_bytes
from vitrail.model import ViT
from vitrail.recipes.settings import Recipe, TrainConfig
from vitrail.training.optim import build_optimizer
from vitrail.training.parallel import ProcessGroup

MIN_STEPS = 10
"""Steps that an epoch keeps, however large a batch could be."""
_GPU_MARGIN, _CPU_MARGIN = 0.85, 0.5  # of the memory; on a CPU, the data and other programs need some too


def choose_batch(
    recipe: Recipe, data: Dataset, compute: ComputeDevice, ranks: ProcessGroup
) -> tuple[int, str]:
    """The largest batch that fits, as a power of two per process and micro-batch; and a sentence about it."""
    parts = ranks.count * recipe.train.accumulate
    most = len(data.train) // MIN_STEPS // parts

    def fits(images: int) -> bool:
        if compute.device.type == "cuda":
            fitting = _step_fits(recipe.model, recipe.train, compute, images)
        else:
            fitting = estimated_to_fit(recipe.model, compute, images)
        return not ranks.any(not fitting, compute.device)

    images = largest_power(fits, most)
    how = "the largest that fits in memory"
    if 2 * images > most:
        steps = len(data.train) // (images * parts)
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
    """Whether a step of so many images should fit; True if the memory of the machine is unknown."""
    if compute.device.type == "cuda":
        limit: float | None = _GPU_MARGIN * torch.cuda.get_device_properties(compute.device).total_memory
    else:
        installed = memory_limit()
        limit = None if installed is None else _CPU_MARGIN * installed
    return limit is None or step_bytes(config, images, compute.dtype.itemsize) <= limit


def _step_fits(config: ViTConfig, settings: TrainConfig, compute: ComputeDevice, images: int) -> bool:
    """Whether a step of a new model leaves a margin of the GPU's memory free, found by taking one."""
    device = compute.device
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _take_step(config, settings, compute, images)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    copies = 4 * sum(config.parameter_counts.values()) if settings.ema else 0
    return torch.cuda.max_memory_allocated(device) + copies <= _GPU_MARGIN * total


def _take_step(config: ViTConfig, settings: TrainConfig, compute: ComputeDevice, images: int) -> None:
    model = ViT(config).to(compute.device)
    model.checkpointed_blocks = settings.checkpoint_blocks
    optimizer = build_optimizer(model, settings)
    inputs = torch.rand(images, *config.input_shape, device=compute.device)
    with compute.attention():
        with compute.autocast():
            loss = model(inputs).float().square().mean()
        loss.backward()
    optimizer.step()
