"""The first value of every parameter, in one place."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


def initialise(model: nn.Module) -> None:
    """Give every parameter its first value, as the paper's own code (vision_transformer) does.

    | parameter                       | first value                                             |
    |---------------------------------|---------------------------------------------------------|
    | tokens.proj.weight              | LeCun normal: variance 1/(C P P), cut off at 2 sigma    |
    | tokens.proj.bias                | 0                                                       |
    | prefix                          | 0                                                       |
    | position.table                  | normal, sigma 0.02                                      |
    | blocks.*.norm?.weight           | 1                                                       |
    | blocks.*.norm?.bias             | 0                                                       |
    | blocks.*.attention.qkv.weight   | Xavier uniform, for q, k and v each by itself           |
    | blocks.*.attention.qkv.bias     | 0                                                       |
    | blocks.*.attention.out.weight   | Xavier uniform                                          |
    | blocks.*.attention.out.bias     | 0                                                       |
    | blocks.*.mlp.fc?.weight         | Xavier uniform                                          |
    | blocks.*.mlp.fc?.bias           | normal, sigma 1e-6                                      |
    | norm.weight                     | 1                                                       |
    | norm.bias                       | 0                                                       |
    | head.weight                     | 0                                                       |
    | head.bias                       | 0                                                       |
    """
    for name, parameter in model.named_parameters():
        [fill] = [fill for pattern, fill in PAPER.items() if fnmatchcase(name, pattern)]
        with torch.no_grad():
            fill(parameter)


def normal(sigma: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: nn.init.normal_(tensor, std=sigma)


def lecun_normal(kernel: Tensor) -> Tensor:
    sigma = math.sqrt(1 / kernel[0].numel())
    sigma /= 0.87962566103423978  # cutting off at two sigma takes this much of the deviation away
    return nn.init.trunc_normal_(kernel, std=sigma, a=-2 * sigma, b=2 * sigma)


def xavier_uniform_in_three(qkv: Tensor) -> Tensor:
    for matrix in qkv.chunk(3):
        nn.init.xavier_uniform_(matrix)
    return qkv


PAPER: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens.proj.weight": lecun_normal,
    "tokens.proj.bias": nn.init.zeros_,
    "prefix": nn.init.zeros_,
    "position.table": normal(0.02),
    "blocks.*.norm?.weight": nn.init.ones_,
    "blocks.*.norm?.bias": nn.init.zeros_,
    "blocks.*.attention.qkv.weight": xavier_uniform_in_three,
    "blocks.*.attention.qkv.bias": nn.init.zeros_,
    "blocks.*.attention.out.weight": nn.init.xavier_uniform_,
    "blocks.*.attention.out.bias": nn.init.zeros_,
    "blocks.*.mlp.fc?.weight": nn.init.xavier_uniform_,
    "blocks.*.mlp.fc?.bias": normal(1e-6),
    "norm.weight": nn.init.ones_,
    "norm.bias": nn.init.zeros_,
    "head.weight": nn.init.zeros_,
    "head.bias": nn.init.zeros_,
}
