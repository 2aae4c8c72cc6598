"""Evidence for errata: functions that return numbers by name. errata.toml names them."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.presets import create

Evidence = dict[str, Any]
_BASE: dict[str, Any] = {"width": 12, "depth": 1, "heads": 3, "patch": 4, "size": 8}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def max_difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@cache
def count_parameters(name: str, **fields: Any) -> int:
    """The number of parameters of a named model, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create(name, **fields).parameters())


def with_noise(model: nn.Module) -> Any:
    """The model in float64 with noise added to every parameter, as biases and heads start at zero."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


# ---- sizes ----------------------------------------------------------------------------------


def parameters_by_patch_size() -> Evidence:
    names = ("B/16", "B/32", "L/16", "L/32")
    with_head = {f"millions in {name}": count_parameters(name) / 1e6 for name in names}
    return {**with_head, "L/16 without head": count_parameters("L/16", classes=0) / 1e6}


def parameters_of_three_heads() -> Evidence:
    headless = count_parameters("B/16", classes=0)
    flat: dict[str, Any] = {"class_token": False}
    no_class_token = count_parameters("B/16", **flat, pool="mean", classes=0)
    return {
        "parameters for B/16 and 1,000 classes, linear": count_parameters("B/16") - headless,
        "one hidden layer": count_parameters("B/16", head="tanh") - headless,
        "all tokens flattened": count_parameters("B/16", **flat, pool="flatten") - no_class_token,
    }


def what_fine_tuning_keeps() -> Evidence:
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in create("B/16", classes=0).named_parameters()}
    listed = ("tokens.proj.weight", ".qkv.", ".mlp.")
    return {
        "parameters of B/16 kept": sum(sizes.values()),
        "on the slide's list": sum(n for name, n in sizes.items() if any(part in name for part in listed)),
    }


# ---- attention ------------------------------------------------------------------------------


def _largest_weight(q: Tensor, k: Tensor, divisor: float) -> float:
    return (q @ k.T / divisor).softmax(dim=-1).amax(dim=-1).mean().item()


def scale_is_the_width_of_a_head() -> Evidence:
    D, k, T = 768, 12, 197
    queries, keys = normal(T, D // k), normal(T, D // k)
    return {
        "largest weight of a query with sqrt(D)": _largest_weight(queries, keys, math.sqrt(D)),
        "with sqrt(d)": _largest_weight(queries, keys, math.sqrt(D // k)),
        "uniform weight": 1 / T,
    }


def biases_of_q_k_v() -> Evidence:
    attention, z, D = with_noise(ViT(ViTConfig(**_BASE))).blocks[0].attention, normal(1, 5, 12), 12
    output = attention(z)

    def without(part: int) -> float:
        bias = attention.qkv.bias.clone()
        attention.qkv.bias[part * D : (part + 1) * D] = 0
        change = max_difference(attention(z), output)
        attention.qkv.bias.copy_(bias)
        return change

    return {
        "parameters, B/16": count_parameters("B/16") - count_parameters("B/16", qkv_bias="none"),
        "change of the output without the query's": without(0),
        "the key's": without(1),
        "the value's": without(2),
    }


# ---- blocks ---------------------------------------------------------------------------------


def residual_and_gradient() -> Evidence:
    def gradient(block: Any) -> tuple[float, float]:
        """The gradient at the input of the first and of the last block."""
        torch.manual_seed(0)
        model = ViT(ViTConfig(width=16, depth=24, heads=2, patch=4, size=8, block=block)).double()
        inputs = [normal(1, 5, 16).requires_grad_()]
        for one in model.blocks:
            inputs.append(one(inputs[-1]))
        ends = torch.autograd.grad((inputs[-1] * normal(1, 5, 16)).sum(), [inputs[0], inputs[-2]])
        return ends[0].norm().item(), ends[1].norm().item()

    first, last = gradient("no-residual")
    return {
        "gradient at the first of 24 blocks, with residuals": gradient("pre-norm")[0],
        "without": first,
        "without, at the last block": last,
    }


def not_the_post_norm_of_vaswani() -> Evidence:
    z = normal(1, 5, 12)

    def deviation(block: Any) -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            out = ViT(ViTConfig(**_BASE, block=block)).double().blocks[0](z)
        return out.std(dim=-1, unbiased=False).mean().item()

    return {
        "standard deviation after Vaswani's block": deviation("post-norm"),
        "after the note's": deviation("res-post-norm"),
    }


# ---- text -----------------------------------------------------------------------------------


def bytes_of_the_token_ids() -> Evidence:
    """The first 256 ids of GPT's tokenizers are the bytes: printable ones first, then the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    single = printable + [byte for byte in range(256) if byte not in printable]
    start = b"\xf0\x9f"  # id 9468, with which almost every emoji starts; id 11410 has a space before it
    shown = [start + bytes(single[number] for number in pair) for pair in ((97, 248), (237, 122))]
    banana = [single.index(byte) for byte in "\N{BANANA}".encode()[2:]]
    return {
        "bytes of `97, 248` and `237, 122`": f"{shown[0][2:].hex(' ')}, {shown[1][2:].hex(' ')}",
        "after f0 9f": b"".join(shown).decode(),
        "a banana would end with": ", ".join(map(str, banana)),
    }
