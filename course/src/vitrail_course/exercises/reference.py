"""The solution that a student's functions are compared with. template.py describes each function.

Deliberately plain. tests/course/exercises compares it with the package's model and with NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vitrail_course.exercises.template import inside

Weights = dict[str, Tensor]


def patches(images: Tensor, P: int) -> Tensor:
    B, C, H, W = images.shape
    blocks = images.reshape(B, C, H // P, P, W // P, P)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * P * P)  # rows, columns, then C, P, P


def positions(count: int, width: int) -> Tensor:
    frequencies = 10_000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(count)[:, None] * frequencies  # (count, width/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    centered = x - x.mean(dim=-1, keepdim=True)
    variance = (centered**2).mean(dim=-1, keepdim=True)
    return centered / torch.sqrt(variance + eps) * weight + bias


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (..., T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1) @ v


def multi_head_attention(z: Tensor, weights: Weights, heads: int) -> Tensor:
    B, T, D = z.shape
    qkv = z @ weights["qkv.weight"].T + weights["qkv.bias"]
    q, k, v = qkv.reshape(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)  # (B, k, T, d) each
    joined = attention(q, k, v).transpose(1, 2).reshape(B, T, D)
    return joined @ weights["out.weight"].T + weights["out.bias"]


def mlp(z: Tensor, weights: Weights) -> Tensor:
    hidden = z @ weights["fc1.weight"].T + weights["fc1.bias"]
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return hidden @ weights["fc2.weight"].T + weights["fc2.bias"]


def block(z: Tensor, weights: Weights, heads: int) -> Tensor:
    normed = layer_norm(z, weights["norm1.weight"], weights["norm1.bias"])
    z = multi_head_attention(normed, inside(weights, "attention"), heads) + z  # Eq. 2
    normed = layer_norm(z, weights["norm2.weight"], weights["norm2.bias"])
    return mlp(normed, inside(weights, "mlp")) + z  # Eq. 3


def vit(images: Tensor, weights: Weights, config: Any) -> Tensor:
    E = weights["tokens.proj.weight"].flatten(1).T  # (C P P, D)
    embedded = patches(images, config.patch) @ E + weights["tokens.proj.bias"]
    x_class = weights["prefix"].expand(len(images), 1, -1)
    z = torch.cat([x_class, embedded], dim=1) + weights["position.table"]  # Eq. 1
    for index in range(config.depth):
        z = block(z, inside(weights, f"blocks.{index}"), config.heads)
    y = layer_norm(z, weights["norm.weight"], weights["norm.bias"])[:, 0]  # Eq. 4
    return y @ weights["head.weight"].T + weights["head.bias"]
