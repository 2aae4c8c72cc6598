"""How labs train what is no run of a recipe: AdamW, a short warm-up, then down a cosine to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

WARM = 0.05  # of all steps
DECAY, CLIP = 0.01, 1.0


def descend(model: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float) -> list[float]:
    """Train; `loss` draws a batch and says how wrong the model is. The loss of every step comes back."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=DECAY)
    model.train()
    curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * share(step, steps)
        optimizer.zero_grad()
        wrong = loss()
        wrong.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.append(wrong.item())
    model.eval()
    return curve


def share(step: int, steps: int) -> float:
    """Of the rate, at a step: a line up from near 0, then half a cosine down."""
    warm = max(1, round(WARM * steps))
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2
