"""Names for activations, so that they can be read (`record`) and changed (`edit`) while a model runs.

A `Tap` is an identity module placed where an activation is computed; its path in the model is its name,
such as `blocks.3.attention.weights`. Other modules without children can be tapped the same way:
`blocks.3.norm1` is the output of that norm. An unused tap costs one call of an identity, and nothing once
compiled. Attention runs in its fused kernel unless its scores or weights are recorded or edited; then those
blocks, and only those, compute it step by step.

A model may be used by several threads: `record` and `edit` concern the forward passes of their own thread.
"""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import InputError, suggest

_hooks_lock = threading.Lock()  # torch numbers its hooks without one, and `explicit` is a count


class Tap(nn.Identity):
    """An identity that gives an activation a name.

    Args:
        explicit: whether the activation exists only while the parent computes step by step.
    """

    def __init__(self, *, explicit: bool = False) -> None:
        super().__init__()
        self.explicit = explicit


class TappedModule(nn.Module):
    """Base class of modules with taps. Its repr omits them, and other children that do nothing."""

    def __repr__(self) -> str:
        children = [(name, child) for name, child in self._modules.items() if _has_effect(child)]
        lines = [f"({name}): {child!r}" for name, child in children]
        body = "\n".join(filter(None, [self.extra_repr(), *lines]))
        return (
            f"{type(self).__name__}(\n{indent(body, '  ')}\n)" if lines else f"{type(self).__name__}({body})"
        )


def _has_effect(module: nn.Module | None) -> bool:
    """False for identities, dropout with probability 0 and empty lists."""
    if module is None or isinstance(module, nn.Identity) or getattr(module, "p", None) == 0:
        return False
    return not isinstance(module, nn.ModuleList) or len(module) > 0


class Tape(dict[str, Tensor]):
    """The activations that `record` has stored, by name; a name holds the tensor of the last call."""

    def __missing__(self, name: str) -> Tensor:
        advice = suggest(name, self) if self else "Call the model inside the `with` block first."
        raise InputError(f"{name!r} was not recorded. {advice}")


@contextmanager
def record(model: nn.Module, *names: str) -> Iterator[Tape]:
    """Store the activations whose names match, while the model runs inside the `with` block.

        with vt.record(model, "blocks.*.attention.weights", "embed") as tape:
            model(images)
        tape["blocks.3.attention.weights"]                   # (B, k, T, T)

    A `*` matches one part of a name. Forward passes of other threads are not recorded. Tensors stay in the
    autograd graph, so that gradients can be taken with respect to them; run the model under `torch.no_grad()`
    if they are not needed.
    """
    tape = Tape()

    def store(name: str, activation: Tensor) -> None:
        tape[name] = activation

    with ExitStack() as stack:
        for name, module in _find_modules(model, *names).items():
            _attach(stack, model, name, module, store)
        yield tape


@contextmanager
def edit(model: nn.Module, edits: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace activations by a function of them, while this thread runs the model inside the `with` block.

    def ablate_head_2(weights):                          # (B, k, T, T)
        mask = torch.ones(weights.shape[1], 1, 1)
        mask[2] = 0
        return weights * mask

    with vt.edit(model, {"blocks.3.attention.weights": ablate_head_2}):
        model(images)
    """

    def replace(function: Callable[[Tensor], Tensor], name: str, activation: Tensor) -> Tensor:
        edited = function(activation)
        shape = tuple(edited.shape) if isinstance(edited, Tensor) else type(edited).__name__
        if shape != tuple(activation.shape):
            raise InputError(
                f"An edit of {name} must return a tensor of the same shape, {tuple(activation.shape)}, not "
                f"{shape}; return a modified copy of its input."
            )
        return edited

    with ExitStack() as stack:
        for pattern, function in edits.items():
            for name, module in _find_modules(model, pattern).items():
                _attach(stack, model, name, module, partial(replace, function))
        yield


def _find_modules(model: nn.Module, *patterns: str) -> dict[str, nn.Module]:
    """The modules without children whose names match any of the patterns, in the order of the model."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise InputError(
                f"Activations of a compiled model cannot be recorded or edited, and {name or 'the model'} is "
                "compiled; use the model from before torch.compile, or build another and load its state_dict."
            )
    taps = {name: module for name, module in model.named_modules() if not any(module.children())}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in taps):
            raise InputError(f"The model has no activation named {pattern!r}. {_advice(pattern, taps)}")
    return {name: taps[name] for name in taps if any(_matches(name, pattern) for pattern in patterns)}


def _advice(pattern: str, taps: Iterable[str]) -> str:
    """The closest name and all names, with block numbers replaced by `*`."""
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in taps)
    blocks = [int(name.split(".")[1]) for name in taps if re.match(r"blocks\.\d+\.", name)]
    return suggest(str(pattern), kinds) + (f" Blocks are 0 to {max(blocks)}." if blocks else "")


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), str(pattern).split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _attach(
    stack: ExitStack,
    model: nn.Module,
    name: str,
    module: nn.Module,
    function: Callable[[str, Tensor], Tensor | None],
) -> None:
    """Call function(name, output) after the module's forward in this thread, until the stack closes."""
    thread = threading.get_ident()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        # A backward pass runs checkpointed blocks again, on a GPU in a thread of torch.
        ours = threading.get_ident() == thread or torch._C._current_graph_task_id() != -1
        return function(name, output) if ours else None

    hook.thread = thread  # type: ignore[attr-defined]
    with _hooks_lock:
        stack.callback(_locked, module.register_forward_hook(hook).remove)
    if isinstance(module, Tap) and module.explicit:
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        _locked(_count_explicit, parent, 1)
        stack.callback(_locked, _count_explicit, parent, -1)


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """Whether a forward pass in this thread calls a hook of one of these modules."""
    hooked = [m for m in modules if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    kinds = [kind for m in hooked for kind in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    here = threading.get_ident()  # `record` and `edit` of another thread do not concern this one
    return any(getattr(hook, "thread", here) == here for kind in kinds for hook in list(kind.values()))


def _locked(function: Callable[..., object], *args: object) -> None:
    with _hooks_lock:
        function(*args)


def _count_explicit(parent: Any, by: int) -> None:
    parent.explicit += by  # a count, because several `with` blocks may need it at the same time
