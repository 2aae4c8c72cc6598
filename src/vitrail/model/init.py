"""The first value of every parameter, in one place."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig

TABLE = """
| parameter                | paper        | timm        | torchvision  |
|--------------------------|--------------|-------------|--------------|
| tokens.stem.*            | its own      | its own     | its own      |
| tokens.proj.weight       | lecun        | torch       | lecun        |
| tokens.proj.bias         | 0            | torch-bias  | 0            |
| tokens.fc.weight         | xavier       | normal-0.02 | xavier       |
| tokens.fc.bias           | normal-1e-6  | 0           | normal-1e-6  |
| prefix                   | 0            | normal-1e-6 | 0            |
| position.*               | normal-0.02  | normal-0.02 | normal-0.02  |
| *.attention.bias.table   | 0            | 0           | 0            |
| *norm*.weight            | 1            | 1           | 1            |
| *norm*.bias              | 0            | 0           | 0            |
| *attention.qkv.weight    | xavier-by-3  | normal-0.02 | xavier       |
| *attention.qkv.bias      | 0            | 0           | 0            |
| *attention.out.weight    | xavier       | normal-0.02 | torch        |
| *attention.out.bias      | 0            | 0           | 0            |
| *mlp.*.weight            | xavier       | normal-0.02 | xavier       |
| *mlp.*.bias              | normal-1e-6  | 0           | normal-1e-6  |
| blocks.*.scale?.weight   | layer-scale  | layer-scale | layer-scale  |
| pool.probe               | xavier       | normal-0.02 | xavier       |
| head.fc1.weight          | lecun        | normal-0.02 | lecun        |
| head.fc1.bias            | 0            | 0           | 0            |
| head*.weight             | 0            | normal-0.02 | 0            |
| head*.bias               | 0            | 0           | 0            |
"""

ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.split("\n")[3:-1]]


def initialise(model: nn.Module, config: ViTConfig) -> None:
    """Give every parameter its first value, as one of three libraries does (`config.init`).

    The TABLE above says which; its first row that matches a parameter's name counts. The words:
    *lecun*, normal of variance 1/fan-in cut off at 2 sigma; *xavier*, uniform up to
    sqrt(6/(fan-in + fan-out)), *by-3* for q, k and v each by itself; *torch*, uniform up to
    1/sqrt(fan-in), as PyTorch's layers begin; *layer-scale*, the config's. Where a library has no
    such part, its column follows its habit with similar ones. `config.position_sigma` goes before all.
    """
    column = ("paper", "timm", "torchvision").index(config.init) + 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            row = next(row for row in ROWS if fnmatchcase(name, row[0]))
            fill(parameter, row[column], config)
            if name.startswith("position.") and config.position_sigma is not None:
                nn.init.normal_(parameter, std=config.position_sigma)


def fill(parameter: Tensor, word: str, config: ViTConfig) -> None:
    """Fill one parameter with what the table's word says."""
    match word:
        case "0" | "1":
            nn.init.constant_(parameter, float(word))
        case "normal-0.02" | "normal-1e-6":
            nn.init.normal_(parameter, std=float(word.removeprefix("normal-")))
        case "lecun":
            lecun_normal(parameter)
        case "xavier":
            nn.init.xavier_uniform_(parameter)
        case "xavier-by-3":
            for matrix in parameter.chunk(3):
                nn.init.xavier_uniform_(matrix)
        case "layer-scale":
            nn.init.constant_(parameter, config.layer_scale or 1.0)
        case "torch":
            limit = 1 / math.sqrt(parameter[0].numel())
            nn.init.uniform_(parameter, -limit, limit)
        case "torch-bias" | "its own":
            pass  # what nn.Conv2d and the stem have filled in


def lecun_normal(kernel: Tensor) -> Tensor:
    sigma = math.sqrt(1 / kernel[0].numel())
    sigma /= 0.87962566103423978  # cutting off at two sigma takes this much of the deviation away
    return nn.init.trunc_normal_(kernel, std=sigma, a=-2 * sigma, b=2 * sigma)
