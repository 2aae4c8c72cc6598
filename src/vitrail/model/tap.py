"""Names for activations, so that they can be looked at (`record`) and changed (`edit`).

A tap is an identity placed where an activation arises; its path in the model is its name, such as
`blocks.3.attention.weights`. Every other module without children has a name as well, and can be
tapped the same way: `blocks.3.norm1` is what that norm returns. Untouched, a tap costs a call of an
identity, nothing when compiled, and attention runs in its fused kernel; where its scores or weights
are wanted, and only in the blocks where they are, it runs step by step.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from vitrail.errors import InputError, suggest


class Tap(nn.Identity):
    """A place to look: returns what it is given.

    Args:
        explicit: whether the activation exists only while its parent works step by step.
    """

    def __init__(self, *, explicit: bool = False) -> None:
        super().__init__()
        self.explicit = explicit


class Tape(dict[str, Tensor]):
    """What `record` saw, by name: for each name the tensor that came last."""

    def __missing__(self, name: str) -> Tensor:
        raise InputError(
            "A tape holds the names that were recorded, once the model has run.",
            repr(name),
            suggest(name, self) if self else "Call the model inside the `with` block first.",
        )


@contextmanager
def record(model: nn.Module, *names: str) -> Iterator[Tape]:
    """Keep the activations whose names match, while the model runs inside the `with` block.

        with vt.record(model, "blocks.*.attention.weights", "embed") as tape:
            model(images)
        tape["blocks.3.attention.weights"]                   # (B, k, T, T)

    A `*` stands for one part of a name. Tensors stay in the graph, so gradients can be taken of
    them; run the model under `torch.no_grad()` where that is not wanted.
    """
    tape = Tape()

    def keep(name: str, activation: Tensor) -> None:
        tape[name] = activation

    with ExitStack() as stack:
        for name, module in find(model, *names).items():
            _attach(stack, model, name, module, keep)
        yield tape


@contextmanager
def edit(model: nn.Module, edits: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace activations by a function of them, while the model runs inside the `with` block.

    def silence_head_2(weights):                         # (B, k, T, T)
        keep = torch.ones(weights.shape[1], 1, 1)
        keep[2] = 0
        return weights * keep

    with vt.edit(model, {"blocks.3.attention.weights": silence_head_2}):
        model(images)
    """

    def change(function: Callable[[Tensor], Tensor], name: str, activation: Tensor) -> Tensor:
        changed = function(activation)
        shape = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        if shape != tuple(activation.shape):
            raise InputError(
                f"An edit of {name} must return a tensor of the same shape, {tuple(activation.shape)}.",
                str(shape),
                "Return a changed copy of what came in.",
            )
        return changed

    with ExitStack() as stack:
        for pattern, function in edits.items():
            for name, module in find(model, pattern).items():
                _attach(stack, model, name, module, partial(change, function))
        yield


def find(model: nn.Module, *patterns: str) -> dict[str, nn.Module]:
    """The tappable modules whose names match any of the patterns, in the order of the model."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise InputError(
                "Taps need a model that is not compiled: compiled code has no places to look.",
                f"a model whose {name} is compiled" if name else "a compiled model",
                "Keep the uncompiled model, or build another and load its state_dict.",
            )
    taps = {name: module for name, module in model.named_modules() if not any(module.children())}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in taps):
            raise InputError("A tap must be a name the model has.", repr(pattern), _advice(pattern, taps))
    return {name: taps[name] for name in taps if any(_matches(name, pattern) for pattern in patterns)}


def _advice(pattern: str, taps: Iterable[str]) -> str:
    """The nearest name and all names, with the block numbers folded into a `*`."""
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in taps)
    blocks = [int(name.split(".")[1]) for name in taps if re.match(r"blocks\.\d+\.", name)]
    return suggest(str(pattern), kinds) + (f" Blocks are 0 to {max(blocks)}." if blocks else "")


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), str(pattern).split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _attach(
    stack: ExitStack,
    model: nn.Module,
    name: str,
    module: nn.Module,
    function: Callable[[str, Tensor], Tensor | None],
) -> None:
    """Call function(name, output) after the module, until the stack closes."""
    handle = module.register_forward_hook(lambda module, given, output: function(name, output))
    stack.callback(handle.remove)
    if isinstance(module, Tap) and module.explicit:
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        parent.explicit += 1  # a count, not a switch: several `with` blocks may want the same one
        stack.callback(lambda: setattr(parent, "explicit", parent.explicit - 1))
