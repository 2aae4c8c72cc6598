"""Initialization of every parameter, in one table."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from vitrail.model.config import ViTConfig

_TABLE = """
| parameter                | paper        | timm        | torchvision  |
|--------------------------|--------------|-------------|--------------|
| tokens.stem.*            | unchanged    | unchanged   | unchanged    |
| tokens.proj.weight       | lecun        | torch       | lecun        |
| tokens.proj.bias         | 0            | unchanged   | 0            |
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

ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in _TABLE.split("\n")[3:-1]]


def initialize(model: nn.Module, config: ViTConfig) -> None:
    """Initialize all parameters of a ViT with the scheme of `config.init`: a column of the table above.

    The first row whose pattern matches a parameter's name applies. *lecun*: normal with variance 1/fan_in,
    truncated at 2 sigma. *xavier*: uniform up to sqrt(6/(fan_in + fan_out)); *xavier-by-3* for q, k and v
    separately. *torch*: uniform up to 1/sqrt(fan_in), the default of PyTorch's layers. *layer-scale*: the
    constant `config.layer_scale`. *unchanged*: as the module has initialized it. A library that lacks a
    part gets the value that it gives to similar ones. `config.position_sigma` overrides the table. Parameters
    on the meta device have no values to set, and trying would load PyTorch's compiler.
    """
    column = ("paper", "timm", "torchvision").index(config.init) + 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not has_values(parameter):
                continue
            row = next(row for row in ROWS if fnmatchcase(name, row[0]))
            _fill(parameter, row[column], config)
            if name.startswith("position.") and config.position_sigma is not None:
                nn.init.normal_(parameter, std=config.position_sigma)


def _fill(parameter: Tensor, scheme: str, config: ViTConfig) -> None:
    """Initialize one parameter with a scheme of the table."""
    match scheme:
        case "0" | "1":
            nn.init.constant_(parameter, float(scheme))
        case "normal-0.02" | "normal-1e-6":
            nn.init.normal_(parameter, std=float(scheme.removeprefix("normal-")))
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
        case "unchanged":
            pass


def lecun_normal(kernel: Tensor) -> Tensor:
    """Fill with a normal of variance 1/fan_in, truncated at 2 sigma (Flax's default)."""
    if not has_values(kernel):  # trunc_normal_ looks at the numbers
        return kernel
    sigma = math.sqrt(1 / kernel[0].numel())
    sigma /= 0.87962566103423978  # the standard deviation of a unit normal truncated at two sigma
    return nn.init.trunc_normal_(kernel, std=sigma, a=-2 * sigma, b=2 * sigma)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers; on the meta device and under FakeTensorMode it has only a shape."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class EmptyParameters(TorchFunctionMode):
    """Context in which parameters are built on the meta device, to be loaded with `assign=True`.

    It sends there what `torch.empty` makes; buffers are made with a dtype and keep their values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("dtype") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
