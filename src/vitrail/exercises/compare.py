"""When two tensors are the same, and in which words they are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-6  # float64 differs by 1e-14 at most, a float32 on the way by less than this


def same(came: Any, right: Tensor) -> bool:
    return problem(came, right) is None


def alike(came: Any, slip: Tensor) -> bool:
    """The same as what a slip gives, which may be no number at all."""
    if not isinstance(came, Tensor) or came.shape != slip.shape:
        return False
    return bool(torch.allclose(came.double(), slip, rtol=0, atol=TOLERANCE, equal_nan=True))


def problem(came: Any, right: Tensor) -> str | None:
    """What is wrong with a result, if anything."""
    if not isinstance(came, Tensor):
        what = "nothing (is the return missing?)" if came is None else f"a {type(came).__name__}"
        return f"It must return a tensor, and returns {what}."
    if came.shape != right.shape:
        return f"The shape must be {tuple(right.shape)}, and is {tuple(came.shape)}."
    if not came.is_floating_point():
        return f"It must return real numbers, and returns {came.dtype}."
    difference = (came.detach().double() - right).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest = difference.max()
    if largest < TOLERANCE:
        return None
    where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    numbers = f"must be {right[where].item():.4g}, is {came[where].item():.4g}"
    if torch.isinf(largest):
        return f"There is a value that is no number, at {list(where)}: {numbers}."
    return f"The largest difference is {largest.item():.2g}, at {list(where)}: {numbers}."


def copied(value: Any) -> Any:
    """A copy that can be changed without harm: tensors, and tuples and dictionaries of them."""
    match value:
        case Tensor():
            return value.clone()
        case tuple():
            return tuple(copied(item) for item in value)
        case dict():
            return {name: copied(item) for name, item in value.items()}
    return value


def unchanged(value: Any, before: Any) -> bool:
    match before:
        case Tensor():
            return bool(torch.equal(value, before))
        case dict():
            return value.keys() == before.keys() and all(unchanged(value[n], before[n]) for n in before)
    return bool(value == before)
