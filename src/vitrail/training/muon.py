"""Muon: momentum whose matrices are made orthogonal, so that a step changes all directions alike.

Keller Jordan et al., 2024. The singular values of the momentum of a matrix become about 1 by five
Newton-Schulz iterations: products only, which a GPU does in bf16. The step is scaled to the RMS of AdamW's
(Liu et al., "Muon is scalable for LLM training", 2025), so that learning rate and weight decay are those of
AdamW, which updates all other parameters.

torch.optim.Muon has numbers as learning rates and one matrix after the other; here the learning rate may be a
tensor that a CUDA graph reads, a step can be skipped on the device, and matrices of a shape are multiplied
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.fast.parallelism import gather, local_part, part_of, sharded_like

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial of singular values
_ITERATIONS = 5
_RMS = 0.2  # of a step of AdamW, over its learning rate


class Muon(torch.optim.AdamW):
    """Updates the parameters of groups with `parts` by Muon, and all others by AdamW.

    A group's `parts` says in how many matrices of equal height its parameters are cut: q, k and v of a qkv
    weight are three.
    """

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["parts"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups
        skipped: Tensor = self.found_inf  # type: ignore[attr-defined]
        for group in groups:
            if group["parts"]:
                self._update(group, skipped)

    @torch.no_grad()
    def _update(self, group: dict[str, Any], skipped: Tensor) -> None:
        by_shape: dict[torch.Size, list[Any]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        taken = 1 - skipped  # a skipped step has a learning rate of 0, and adds nothing to the momentum
        lr = group["lr"] * taken
        for some in by_shape.values():
            momenta = [local_part(self.state[p]["momentum"]) for p in some]
            gradients = [local_part(p.grad).masked_fill(skipped.bool(), 0) for p in some]
            for momentum, gradient in zip(momenta, gradients, strict=True):
                momentum.lerp_(gradient, (1 - MOMENTUM) * taken)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
            steps = self._orthogonal(some, ahead, group["parts"])
            weights = [local_part(p) for p in some]
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(weights, torch._foreach_mul(steps, lr))

    def _orthogonal(self, some: Sequence[Tensor], ahead: Sequence[Tensor], parts: int) -> list[Tensor]:
        """Of each local part its share of the whole matrix, made orthogonal and scaled."""
        whole = torch.stack([gather(sharded_like(a, p)) for a, p in zip(ahead, some, strict=True)])
        cut = whole.unflatten(1, (parts, -1)).flatten(0, 1)  # (n parts, N / parts, K)
        scale = _RMS * max(cut.shape[1:]) ** 0.5
        done = (orthogonalize(cut) * scale).to(whole.dtype).view_as(whole)
        return [part_of(one, p) for one, p in zip(done.unbind(0), some, strict=True)]


def orthogonalize(x: Tensor) -> Tensor:
    """Matrices (n, N, K) with the same singular vectors and singular values of about 1."""
    a, b, c = _COEFFICIENTS
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.bfloat16() if x.is_cuda else x  # on some CPUs, bf16 ends the process
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.float() if wide else x.mT.float()
