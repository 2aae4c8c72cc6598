"""How a model runs: training or evaluation mode, gradient checkpointing, tensors without values."""

from __future__ import annotations

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


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each submodule's own mode is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


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
