"""Who learns, how fast: parameter groups, the optimizer, the rate at each step."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model import ViT
from vitrail.training.lora import UPDATE
from vitrail.training.settings import TrainConfig


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Matrices and kernels decay; norms, biases, positions, prefix, probe and factors do not."""
    still = ("position.", "prefix", "pool.probe", "attention.bias.")
    return parameter.ndim >= 2 and not any(word in name for word in still)


def learns(name: str, settings: TrainConfig) -> bool:
    match settings.tune:
        case "lora":
            return name.startswith("head.") or UPDATE in name
        case "head":
            return name.startswith("head.")
        case "bias":
            return name.startswith("head.") or name.endswith(".bias")
        case _:
            return True


def depth_of(name: str, depth: int) -> int:
    """How far up a parameter stands: 0 for the embedding, depth + 1 for the last norm and the head."""
    found = re.match(r"blocks\.(\d+)\.", name)
    if found:
        return int(found[1]) + 1
    return 0 if name.startswith(("tokens.", "prefix", "position.", "norm_pre.")) else depth + 1


def groups(model: ViT, settings: TrainConfig) -> list[dict[str, Any]]:
    """Parameters by decay and by share of the rate; those that do not learn are left out, and frozen."""
    found: dict[tuple[bool, float], list[nn.Parameter]] = {}
    depth = model.config.depth
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns(name, settings))
        if not parameter.requires_grad:
            continue
        behind = depth + 1 - depth_of(name, depth)
        share = settings.layer_decay**behind if settings.tune == "llrd" else 1.0
        found.setdefault((decays(name, parameter), share), []).append(parameter)
    return [
        {"params": some, "weight_decay": settings.weight_decay if decay else 0.0, "share": share, "lr": 0.0}
        for (decay, share), some in found.items()
    ]


def build_optimizer(model: ViT, settings: TrainConfig) -> torch.optim.Optimizer:
    """Fused: one kernel for all, and it can be told on the device to leave a step out (`found_inf`)."""
    parts = groups(model, settings)
    match settings.optimizer:
        case "adamw":
            return torch.optim.AdamW(parts, lr=0.0, betas=settings.betas, fused=True)  # type: ignore[arg-type]
        case "sgd":
            sgd = torch.optim.SGD(parts, lr=0.0, momentum=settings.momentum, fused=True)
            if settings.momentum:  # a first step that is left out would leave these as memory was
                for parameter in (p for group in parts for p in group["params"]):
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd


def rate_at(step: int, steps: int, settings: TrainConfig) -> float:
    """The learning rate of a step, from 0: up over the warm-up, then down by the schedule."""
    warm = settings.warmup * steps
    if step < warm:
        return settings.lr * (step + 1) / (warm + 1)
    left = 1 - (step - warm) / max(1.0, steps - warm)  # from 1 to 0
    match settings.schedule:
        case "cosine":
            share = 0.5 - 0.5 * math.cos(math.pi * left)
        case "linear":
            share = left
        case "constant":
            share = 1.0
    return settings.lr * (settings.last_lr + (1 - settings.last_lr) * share)


def average(mean: nn.Module, model: nn.Module, step: int, most: float) -> None:
    """EMA; at first it forgets faster, so that it does not remember the first random weights."""
    decay = min(most, (1 + step) / (10 + step))
    with torch.no_grad():
        ours: list[Tensor] = list(mean.parameters())
        torch._foreach_lerp_(ours, [p.detach() for p in model.parameters()], 1 - decay)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]
