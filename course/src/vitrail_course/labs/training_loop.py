"""Training loop for models that are not trained by a recipe: AdamW, linear warmup, cosine decay to zero."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

_WARMUP = 0.05  # fraction of the steps
_WEIGHT_DECAY, _CLIP_NORM = 0.01, 1.0


def train_model(model: nn.Module, batch_loss: Callable[[], Tensor], steps: int, lr: float) -> list[float]:
    """Train a model and return the loss of every step.

    Args:
        batch_loss: draws a batch and returns the model's loss on it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=_WEIGHT_DECAY)
    model.train()
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_factor(step, steps)
        optimizer.zero_grad()
        loss = batch_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def lr_factor(step: int, steps: int) -> float:
    """The factor on the learning rate at a step: linear warmup, then a half cosine down to 0."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
