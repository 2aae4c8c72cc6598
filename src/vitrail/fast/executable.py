"""What computes a model in another way than its own code. The model holds the parameters, unchanged.

A twin is a second tree of modules over the parameters of a model. Parts of it may be replaced; a step of it
trains the model, which users, taps, callbacks, EMA and evaluation hold.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from vitrail.base.errors import DeviceWarning, InputError
from vitrail.model import ViT
from vitrail.model.tap import is_watched

M = TypeVar("M", bound=nn.Module)


class Executable(nn.Module):
    """A module with the forward pass of a model, computed another way (`vitrail.fast.prepare`).

    The model itself is `.model`: for its weights, EMA, evaluation, `vt.record` and `vt.edit`. While something
    watches its activations, the model computes, because they do not all exist elsewhere.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.say: Callable[[str], None] = lambda text: warnings.warn(text, DeviceWarning, stacklevel=2)
        """Called with what a user should know."""
        self._watchable, self._told = list(model.modules()), False

    @property
    def watched(self) -> bool:
        """Whether this thread records or edits activations, so that the model must compute them itself."""
        if not is_watched(self._watchable):
            return False
        if (what := self.why_not_watched()) is not None:
            raise InputError(
                f"Activations of {what} cannot be recorded or edited, because another module computes it; "
                "record those of the trained model, after the epoch."
            )
        if not self._told:
            self._told = True
            self.say("Activations are recorded or edited, so the plain model computes meanwhile.")
        return True

    def why_not_watched(self) -> str | None:
        """What is computed that the model itself cannot compute; None if it can."""
        return None


def share_parameters(model: M) -> M:
    """Build a twin: copy the modules of a model, but not its parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def hold_parameters(model: nn.Module, twin: nn.Module) -> None:
    """Let a model hold the parameters of its twin, after these have been replaced by shards."""
    for name, module in twin.named_modules():
        if module._parameters:  # a module without any, such as shared dropout, may be the twin's alone
            model.get_submodule(name)._parameters.update(module._parameters)


def variant(kind: type[M], module: nn.Module, **attributes: Any) -> M:
    """Build a module of a subclass with everything that `module` has: parameters, submodules, hooks."""
    new = kind.__new__(kind)
    vars(new).update({name: v.copy() if isinstance(v, dict) else v for name, v in vars(module).items()})
    for name, value in attributes.items():
        setattr(new, name, value)
    return new


def replace_modules(root: nn.Module, build: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace every module below `root` for which `build` returns another: children before their parents."""
    for parent in reversed(list(root.modules())):
        for name, child in list(parent.named_children()):
            if (new := build(child)) is not None:
                setattr(parent, name, new)
