"""Changing a trained model's shape: each function returns a new model and leaves the old one alone.

model = surgery.resize(model, 384)               # more patches: positions are resized
model = surgery.reclass(model, 10)               # the whole old head goes, a zero head comes
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import InputError, suggest
from vitrail.memory import check_parameters
from vitrail.model.resample import resize_grid, resize_kernel
from vitrail.model.vit import ViT

State = dict[str, Tensor]


def resize(model: ViT, size: int | tuple[int, int], **how: Any) -> ViT:
    """The model for pictures of another size; learned positions are resized to the new grid.

    Args:
        how: method, antialias, corners, offset, as `resample.resize_grid` takes them.
    """
    if model.config.input in ("video", "text"):
        raise InputError(
            "resize needs a picture or a spectrogram: positions are resized along rows and columns.",
            f"input={model.config.input!r}",
            "Build a new model with this size.",
        )
    new = replace(model.config, size=size)
    return rebuild(model, new, lambda state: move_positions(state, model.config, new, how))


def repatch(model: ViT, patch: int | tuple[int, int], **how: Any) -> ViT:
    """The model with patches of another size in the same picture (FlexiViT, Beyer et al. 2022).

    The kernel is resized so that tokens change least; positions follow the new grid. A `size` among
    the keywords changes the picture too.
    """
    size = how.pop("size", model.config.size)
    if model.config.embedding in ("conv", "resnet") or model.config.input in ("video", "text"):
        raise InputError(
            "repatch needs patches that are cut from the picture.",
            f"embedding={model.config.embedding!r} of a {model.config.input}",
            "Build a new model with another patch.",
        )
    new = replace(model.config, patch=patch, size=size)
    down, across = new.patch_pixels

    def change(state: State) -> None:
        state["tokens.proj.weight"] = resize_kernel(state["tokens.proj.weight"], (down, across))
        move_positions(state, model.config, new, how)

    return rebuild(model, new, change)


def reclass(model: ViT, classes: int) -> ViT:
    """The model for other classes: the whole old head is dropped, hidden layer too; the new one is
    linear and zero (paper, 3.2)."""

    def change(state: State) -> None:
        for name in [name for name in state if name.startswith("head.")]:
            del state[name]

    new = rebuild(model, replace(model.config, classes=classes, head="linear", head_hidden=None), change)
    for parameter in new.head.parameters():
        torch.nn.init.zeros_(parameter)
    return new


def rechannel(model: ViT, channels: int) -> ViT:
    """The model for pictures with another number of channels.

    For one channel the kernels are summed: a grey picture gives what it gave as three equal
    channels. For others they are repeated in turn, and scaled so that equal channels give the same.
    """
    name = "tokens.proj.weight"
    if model.config.embedding in ("conv", "resnet") or model.config.input != "picture":
        raise InputError(
            "rechannel needs patches that are cut from the picture.",
            f"embedding={model.config.embedding!r} of a {model.config.input}",
            "Build a new model with these channels.",
        )

    def change(state: State) -> None:
        old = state[name]  # (D, C, P, P)
        turns = torch.arange(channels, device=old.device) % old.shape[1]
        counts = turns.bincount(minlength=old.shape[1])[turns]  # how often each old channel comes
        spare = old[:, counts.numel() :].sum(dim=1, keepdim=True) if channels < old.shape[1] else 0
        new = old[:, turns] / counts[None, :, None, None]
        state[name] = new + spare / channels

    return rebuild(model, replace(model.config, channels=channels), change)


def add_registers(model: ViT, count: int) -> ViT:
    """The model with `count` more register tokens (Darcet et al. 2023), small and random; where
    every prefix token has a position row, theirs is zero."""
    old, new = model.config, replace(model.config, registers=model.config.registers + count)
    if old.position in ("pairwise", "relative"):
        raise InputError(
            "add_registers needs positions that do not count pairs of tokens.",
            f"position={old.position!r}",
            "Train with registers from the start.",
        )

    def change(state: State) -> None:
        fresh = 0.02 * torch.randn(count, old.width, device=model.tokens.proj.weight.device)
        before = [state["prefix"]] if old.prefix else []
        state["prefix"] = torch.cat([*before, fresh.to(model.tokens.proj.weight.dtype)])
        for name in ("position.table", "position.front"):
            if name in state and new.rows == "all":
                rows = state[name]
                zeros = rows.new_zeros(count, old.width)
                state[name] = torch.cat([rows[: old.prefix], zeros, rows[old.prefix :]])

    return rebuild(model, new, change)


def freeze(model: ViT, *patterns: str) -> ViT:
    """A copy in which the parameters that match, such as "blocks.*" or "tokens.*", do not learn."""
    new = copy.deepcopy(model)
    for pattern in patterns:
        matching = [p for name, p in new.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            names = [name for name, _ in new.named_parameters()]
            raise InputError("A pattern must match a parameter.", repr(pattern), suggest(pattern, names))
        for parameter in matching:
            parameter.requires_grad_(False)
    return new


def rebuild(model: ViT, config: ViTConfig, change: Callable[[State], None]) -> ViT:
    """A model of the new config with the old tensors, after `change` has been at a copy of them."""
    if config.pool == "flatten" and config.patches != model.config.patches:
        raise InputError(
            "A flattened pool reads each patch by its place, so their number must stay.",
            f"{model.config.patches} patches that become {config.patches}",
            'Use a model with another pool, such as "mean".',
        )
    weight = model.tokens.proj.weight
    if weight.device.type == "cpu":
        check_parameters(config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(state)
    with torch.device(weight.device):
        new = ViT(config).to(weight.dtype)
    missing, unexpected = new.load_state_dict(state, strict=False)
    wrong = [name for name in missing if not name.startswith("head.")] + unexpected
    assert not wrong, f"surgery left {wrong}"
    return new.train(model.training)


def move_positions(state: State, old: ViTConfig, new: ViTConfig, how: dict[str, Any]) -> None:
    """Resize whatever learned positions there are, in place, from the old grid to the new."""
    if old.grid == new.grid:
        return
    (h, w), (h2, w2) = old.grid, new.grid
    match old.position:
        case "learned":
            rows = state["position.table"]
            first = rows.shape[0] - old.patches  # rows of the prefix stay as they are
            patches = resize_grid(rows[first:], (h, w), (h2, w2), **how)
            state["position.table"] = torch.cat([rows[:first], patches])
        case "learned2d":
            state["position.down"] = resize_grid(state["position.down"], (h, 1), (h2, 1), **how)
            state["position.across"] = resize_grid(state["position.across"], (1, w), (1, w2), **how)
        case "relative":
            distances = (2 * h - 1) * (2 * w - 1)
            for name in [name for name in state if name.endswith("attention.bias.table")]:
                table = state[name]  # (k, distances + prefix)
                grids = (2 * h - 1, 2 * w - 1), (2 * h2 - 1, 2 * w2 - 1)
                patches = resize_grid(table[:, :distances].T, *grids, **how).T
                state[name] = torch.cat([patches, table[:, distances:]], dim=1)
        case "pairwise":
            raise InputError(
                "Pairwise positions hold a number for each pair of patches, so the grid must stay.",
                f"{h}x{w} patches that become {h2}x{w2}",
                "Use relative positions for models that are resized.",
            )
        case _:
            pass  # computed from the grid, or none
