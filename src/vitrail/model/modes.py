"""How a model runs: training or evaluation mode, gradient checkpointing, tensors without values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from vitrail.model.position import Rotate
    from vitrail.model.segments import Segments

_modes_lock = threading.Lock()
_entered: dict[nn.Module, tuple[int, bool]] = {}
"""How many `eval_mode` blocks each module is in now, and its own mode from before the first of them."""


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each submodule's own mode is restored afterwards.

    The mode is a flag of the module, which all threads see: the first of them to enter sets it, the last one
    to leave restores it. So a model that is being trained may be evaluated between two steps, by several
    threads too, but must not take a step in one thread while another evaluates it.
    """
    modules = list(model.modules())
    try:
        with _modes_lock:
            before = [_entered.get(module, (0, module.training)) for module in modules]
            for module, (count, own) in zip(modules, before, strict=True):
                _entered[module] = count + 1, own
            if any(module.training for module in modules):
                model.eval()
        with torch.no_grad():
            yield
    finally:
        with _modes_lock:
            for module in modules:
                count, own = _entered.pop(module, (0, module.training))  # none if interrupted above
                if count > 1:
                    _entered[module] = count - 1, own
                elif module.training != own:
                    module.training = own


def run_block(
    block: nn.Module, z: Tensor, mask: Tensor | Segments | None, rotate: Rotate, *, checkpointing: bool
) -> Tensor:
    """One block of a model; checkpointed, only its input is stored, and the backward pass runs it again."""
    if checkpointing and torch.is_grad_enabled():
        return checkpoint(block, z, mask, rotate=rotate, use_reentrant=False)
    return block(z, mask, rotate=rotate)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers; on the meta device and under FakeTensorMode it has only a shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
