"""Changing the shape of a trained model: each function returns a new model and does not modify the old one.

model = surgery.resize(model, 384)               # more patches: positions are resampled
model = surgery.reclass(model, 10)               # a new linear head, initialized to zero
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import InputError, suggest
from vitrail.model.config import STEM_STRIDES, ViTConfig
from vitrail.model.model_memory import check_parameters
from vitrail.model.position import POSITIONS
from vitrail.model.resample import resize_kernel
from vitrail.model.vit import ViT

State = dict[str, Tensor]


def resize(model: ViT, size: int | tuple[int, int], **options: Any) -> ViT:
    """A model for images of another size; learned positions are resampled to the new grid.

    Args:
        size: the new image side, or (height, width).
        options: method, antialias, corners and offset of `resample.resize_grid`.
    """
    if model.config.input in ("video", "text"):
        raise InputError(
            "resize resamples positions along rows and columns, so it works for images and spectrograms, not "
            f"for input={model.config.input!r}; build a new model with this size."
        )
    new = replace(model.config, size=size)
    return _rebuild(model, new, lambda state: _resize_positions(state, model.config, new, options))


def repatch(model: ViT, patch: int | tuple[int, int], **options: Any) -> ViT:
    """A model with another patch size (FlexiViT, Beyer et al. 2022).

    The patch kernel is resized so that tokens change as little as possible, and learned positions are
    resampled to the new grid.

    Args:
        patch: the new patch side, or (height, width).
        options: `size`, to change the image size as well; and the options of `resize`.
    """
    size = options.pop("size", model.config.size)
    _check_patch_projection("repatch", model.config, ("video", "text"), "with this patch")
    new = replace(model.config, patch=patch, size=size)
    down, across = new.patch_pixels

    def update(state: State) -> None:
        state["tokens.proj.weight"] = resize_kernel(state["tokens.proj.weight"], (down, across))
        _resize_positions(state, model.config, new, options)

    return _rebuild(model, new, update)


def reclass(model: ViT, classes: int, *, keep_projection: bool = False) -> ViT:
    """A model for other classes: the old head, with any hidden layer, is replaced by a linear one
    initialized to zero (paper, Section 3.2).

    Args:
        keep_projection: of a cosine head, replace only the layer of the classes.
    """
    keep = keep_projection and model.config.head == "cosine"
    head: dict[str, Any] = {} if keep else {"head": "linear", "head_hidden": None}

    def is_replaced(name: str) -> bool:
        return name.startswith("head.") and not (keep and name.startswith("head.fc1."))

    def update(state: State) -> None:
        for name in [name for name in state if is_replaced(name)]:
            del state[name]

    new = _rebuild(model, replace(model.config, classes=classes, **head), update)
    for name, parameter in new.head.named_parameters(prefix="head"):
        if is_replaced(name):
            torch.nn.init.zeros_(parameter)
    return new


def rechannel(model: ViT, channels: int) -> ViT:
    """A model for images with another number of channels.

    For one channel the kernels are summed, so a gray image gives the same tokens as it did as three equal
    channels. For more channels they are repeated and scaled, so that equal channels give the same tokens.
    """
    name = "tokens.proj.weight"
    _check_patch_projection("rechannel", model.config, ("video", "audio", "text"), "with these channels")

    def update(state: State) -> None:
        old = state[name]  # (D, C, P, P)
        source = torch.arange(channels, device=old.device) % old.shape[1]  # the old channel of each new one
        counts = source.bincount(minlength=old.shape[1])[source]  # how often it is used
        unused = old[:, counts.numel() :].sum(dim=1, keepdim=True) if channels < old.shape[1] else 0
        new = old[:, source] / counts[None, :, None, None]
        state[name] = new + unused / channels

    return _rebuild(model, replace(model.config, channels=channels), update)


def add_registers(model: ViT, count: int) -> ViT:
    """A model with `count` more register tokens (Darcet et al. 2023), initialized with a normal of
    standard deviation 0.02; if they have position rows, those are zero."""
    old, new = model.config, replace(model.config, registers=model.config.registers + count)

    def update(state: State) -> None:
        registers = 0.02 * torch.randn(count, old.width, device=model.tokens.proj.weight.device)
        prefix = [state["prefix"]] if old.prefix else []
        state["prefix"] = torch.cat([*prefix, registers.to(model.tokens.proj.weight.dtype)])
        POSITIONS[old.position].add_prefix_tokens(state, old, new)

    return _rebuild(model, new, update)


def freeze(model: ViT, *patterns: str) -> ViT:
    """A copy in which the parameters whose names match, such as "blocks.*" or "tokens.*", are frozen."""
    new = copy.deepcopy(model)
    for pattern in patterns:
        matching = [p for name, p in new.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            names = [name for name, _ in new.named_parameters()]
            raise InputError(f"{pattern!r} matches no parameter. {suggest(pattern, names)}")
        for parameter in matching:
            parameter.requires_grad_(False)
    return new


def _check_patch_projection(operation: str, config: ViTConfig, refused: tuple[str, ...], do: str) -> None:
    if config.embedding in STEM_STRIDES or config.input in refused:
        raise InputError(
            f"{operation} needs patches that are cut from the input itself, but this model has "
            f"input={config.input!r} and embedding={config.embedding!r}; build a new model {do}."
        )


def _rebuild(model: ViT, config: ViTConfig, update: Callable[[State], None]) -> ViT:
    """A model of the new config with a copy of the old state dict, after `update` has modified it."""
    if config.pool == "flatten" and config.patches != model.config.patches:
        raise InputError(
            'With pool="flatten" the head has weights for each patch, so the number of patches cannot change '
            f'from {model.config.patches} to {config.patches}; use a model with another pool, such as "mean".'
        )
    weight = model.tokens.proj.weight
    if weight.device.type == "cpu":
        check_parameters(config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    update(state)
    with torch.device(weight.device):
        new = ViT(config).to(weight.dtype)
    missing, unexpected = new.load_state_dict(state, strict=False)
    wrong = [name for name in missing if not name.startswith("head.")] + unexpected
    assert not wrong, f"surgery missed {wrong}"
    return new.train(model.training)


def _resize_positions(state: State, old: ViTConfig, new: ViTConfig, options: dict[str, Any]) -> None:
    """Resample learned positions, if any, from the old grid to the new one, in place."""
    if old.grid != new.grid:
        POSITIONS[old.position].resize(state, old, new, **options)
