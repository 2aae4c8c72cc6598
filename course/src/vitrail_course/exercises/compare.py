"""Comparison of a student's result with the expected tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 1e-6  # float64 differs by at most 1e-14, with a float32 on the way by less than this


def is_same(result: Any, expected: Tensor) -> bool:
    return describe_difference(result, expected) is None


def is_same_mistake(result: Any, mistaken: Tensor) -> bool:
    """Whether a result is that of a common mistake, which may hold NaN."""
    if not isinstance(result, Tensor) or result.shape != mistaken.shape:
        return False
    return bool(torch.allclose(result.double(), mistaken.double(), rtol=0, atol=_TOLERANCE, equal_nan=True))


def describe_difference(result: Any, expected: Tensor) -> str | None:
    """What is wrong with a result, or None if it is correct."""
    if result is None:
        return "It must return a tensor but returns None. Is the return statement missing?"
    if not isinstance(result, Tensor):
        return f"It must return a tensor but returns a {type(result).__name__}."
    if result.shape != expected.shape:
        return f"The shape is {tuple(result.shape)} but must be {tuple(expected.shape)}."
    if not result.is_floating_point():
        return f"The result must be floating point but is {result.dtype}."
    difference = (result.detach().double() - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest = difference.max()
    if largest < _TOLERANCE:
        return None
    index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    values = f"at {list(index)}: expected {expected[index].item():.4g}, got {result[index].item():.4g}"
    if torch.isinf(largest):
        return f"The result has NaN or infinity, {values}."
    return f"The largest difference is {largest.item():.2g}, {values}."


def copy_value(value: Any) -> Any:
    """A deep copy of tensors, and of tuples and dictionaries of them."""
    match value:
        case Tensor():
            return value.clone()
        case tuple():
            return tuple(copy_value(item) for item in value)
        case dict():
            return {name: copy_value(item) for name, item in value.items()}
    return value


def is_unchanged(value: Any, before: Any) -> bool:
    match before:
        case Tensor():
            return bool(torch.equal(value, before))
        case dict():
            return value.keys() == before.keys() and all(is_unchanged(value[n], before[n]) for n in before)
    return bool(value == before)
