"""Bitwise comparison of weight files."""

import safetensors.torch
import torch


def same_file(one, other):
    """Whether two files hold the same names, dtypes, shapes and bits."""
    a, b = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(*(one[name].flatten().view(torch.uint8) for one in (a, b))), name
    return True
