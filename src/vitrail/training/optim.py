"""Parameter groups, the optimizer, the learning rate schedule and the EMA of the weights."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.fast.lora import UPDATE
from vitrail.fast.parallelism import is_sharded, local_part
from vitrail.model import ViT
from vitrail.training.muon import Muon
from vitrail.training.recipes.settings import TrainConfig


def build_optimizer(model: ViT, settings: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, Muon or SGD, which can skip a step on the device (`optimizer_step`)."""
    groups = parameter_groups(model, settings)
    match settings.optimizer:
        case "adamw" | "muon":
            on_gpu = groups[0]["params"][0].is_cuda  # where a step may be captured in a CUDA graph
            kind = Muon if settings.optimizer == "muon" else torch.optim.AdamW
            adamw = kind(groups, lr=0.0, betas=settings.betas, fused=True, capturable=on_gpu)  # type: ignore[arg-type]
            for group in groups:  # a state to be read into on resume
                adamw.state.update((p, _state(p, muon=group["parts"] > 0)) for p in group["params"])
            return adamw
        case "sgd":
            fused = not is_sharded(groups[0]["params"][0])  # torch has no fused SGD of shards
            sgd = torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=fused, foreach=not fused)
            if settings.momentum:  # if the first step is skipped, the buffers would stay uninitialized
                for parameter in (p for group in groups for p in group["params"]):
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd


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
        parameter.requires_grad_(_is_trained(name, settings))


def _is_trained(name: str, settings: TrainConfig) -> bool:
    match settings.tune:
        case "lora":
            return name.startswith("head.") or UPDATE in name
        case "head":
            return name.startswith("head.")
        case "bias":
            return name.startswith("head.") or name.endswith(".bias")
        case _:
            return True


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
    match settings.schedule:
        case "cosine":
            factor = 0.5 - 0.5 * math.cos(math.pi * left)
        case "linear":
            factor = left
        case "constant":
            factor = 1.0
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
