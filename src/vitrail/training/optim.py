"""Parameter groups, the optimizer, the learning rate schedule and the EMA of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.fast.lora import UPDATE
from vitrail.fast.parallelism import gather, is_sharded, local_part, part_of, sharded_like
from vitrail.model import ViT
from vitrail.training.recipes.settings import TrainConfig


def build_optimizer(model: ViT, settings: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, Muon or SGD, which can skip a step on the device (`optimizer_step`)."""
    groups = parameter_groups(model, settings)
    parameters = [(p, group["parts"]) for group in groups for p in group["params"]]
    first = parameters[0][0]
    if settings.optimizer == "sgd":
        fused = not is_sharded(first)  # torch has no fused SGD of shards
        sgd = torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=fused, foreach=not fused)
        if settings.momentum:  # if the first step is skipped, the buffers would stay uninitialized
            sgd.state.update((p, {"momentum_buffer": torch.zeros_like(p)}) for p, _ in parameters)
        return sgd
    kind = Muon if settings.optimizer == "muon" else torch.optim.AdamW
    on_gpu = first.is_cuda  # where a step may be captured in a CUDA graph
    adamw = kind(groups, lr=0.0, betas=settings.betas, fused=True, capturable=on_gpu)  # type: ignore[arg-type]
    adamw.state.update((p, _state(p, muon=parts > 0)) for p, parts in parameters)  # to be read into on resume
    return adamw


def _state(parameter: Tensor, *, muon: bool) -> dict[str, Tensor]:
    if muon:
        return {"momentum": torch.zeros_like(parameter)}
    step = torch.zeros((), device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def parameter_groups(model: ViT, settings: TrainConfig) -> list[dict[str, Any]]:
    """Trained parameters by weight decay, learning rate factor and parts for Muon; all others are frozen."""
    groups: dict[tuple[bool, float, int], list[nn.Parameter]] = {}
    depth = model.config.depth
    freeze(model, settings)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        below = depth + 1 - _layer_index(name, depth)
        factor = settings.layer_decay**below if settings.tune == "llrd" else 1.0
        parts = _parts(name, parameter) if settings.optimizer == "muon" else 0
        groups.setdefault((_has_decay(name, parameter), factor, parts), []).append(parameter)
    return [
        {
            "params": some,
            "weight_decay": settings.weight_decay if decay else 0.0,
            "factor": factor,
            "parts": parts,
            "lr": 0.0,
        }
        for (decay, factor, parts), some in groups.items()
    ]


def freeze(model: ViT, settings: TrainConfig) -> None:
    """Freeze the parameters that are not trained."""
    for name, parameter in model.named_parameters():
        trained = {"lora": UPDATE in name, "head": False, "bias": name.endswith(".bias")}.get(
            settings.tune, True
        )
        parameter.requires_grad_(trained or name.startswith("head."))


def _has_decay(name: str, parameter: nn.Parameter) -> bool:
    """Matrices and kernels have weight decay; norms, biases, positions, prefix, probe and scales do not."""
    without = ("position.", "prefix", "pool.probe", "attention.bias.")
    return parameter.ndim >= 2 and not any(word in name for word in without)


def _parts(name: str, parameter: nn.Parameter) -> int:
    """In how many matrices Muon cuts a parameter of the blocks; 0 if AdamW updates it."""
    if not name.startswith("blocks.") or parameter.ndim != 2 or not _has_decay(name, parameter):
        return 0
    return 3 if name.endswith("attention.qkv.weight") and len(parameter) == 3 * parameter.shape[1] else 1


def _layer_index(name: str, depth: int) -> int:
    """0 for the embedding, i + 1 for block i, depth + 1 for the last norm and the head."""
    match = re.match(r"blocks\.(\d+)\.", name)
    if match:
        return int(match[1]) + 1
    return 0 if name.startswith(("tokens.", "prefix", "position.", "norm_pre.")) else depth + 1


def lr_at(step: int, steps: int, settings: TrainConfig) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up, then the schedule."""
    warmup = settings.warmup * steps
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    left = 1 - (step - warmup) / max(1.0, steps - warmup)  # from 1 to 0
    factor = {"cosine": 0.5 - 0.5 * math.cos(math.pi * left), "linear": left, "constant": 1.0}[
        settings.schedule
    ]
    return settings.lr * (settings.last_lr + (1 - settings.last_lr) * factor)


def set_lr(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]


def optimizer_step(optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
    """Change the weights, unless `skipped` is 1: decided on the device, if the optimizer can."""
    if optimizer.defaults["fused"]:
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped:
        optimizer.step()


def ema_weight(step: int, max_decay: float) -> float:
    """The weight of the model in its EMA after a step: 1 - decay.

    The decay is lower at first, so that the random weights fade sooner.
    """
    return 1 - min(max_decay, (1 + step) / (10 + step))


def update_ema(ema: nn.Module, model: nn.Module, weight: float | Tensor) -> None:
    """Update the EMA of the weights: average + weight (parameter - average)."""
    averages = [local_part(p) for p in ema.parameters()]
    parameters = [local_part(p.detach()) for p in model.parameters()]
    with torch.no_grad():
        if not isinstance(weight, Tensor):
            torch._foreach_lerp_(averages, parameters, weight)
            return
        change = torch._foreach_sub(parameters, averages)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(averages, change)


# ---- Muon -----------------------------------------------------------------------------------

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
        """Newton-Schulz update of each local shard, scaled."""
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
