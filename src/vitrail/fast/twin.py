"""A second tree of modules over the parameters of a model, in which parts may be replaced.

The model itself stays the paper's: it is what users, taps, callbacks, EMA and evaluation hold. A twin
computes with the same parameters, so a step of it trains the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def share_parameters(model: M) -> M:
    """Copy the modules of a model, but not its parameters and buffers: both have the same."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def hold_parameters(model: nn.Module, twin: nn.Module) -> None:
    """Let a model hold the parameters of its twin, after these have been replaced by shards."""
    for name, module in twin.named_modules():
        model.get_submodule(name)._parameters.update(module._parameters)


def take_parts(new: nn.Module, old: nn.Module) -> None:
    """Give a new module everything that an old one has: attributes, submodules, parameters, hooks."""
    containers = {name: value.copy() for name, value in vars(old).items() if isinstance(value, dict)}
    vars(new).update(vars(old) | containers)


def replace_modules(root: nn.Module, build: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace every module below `root` for which `build` returns another: children before their parents."""
    for parent in reversed(list(root.modules())):
        for name, child in list(parent.named_children()):
            if (new := build(child)) is not None:
                setattr(parent, name, new)
