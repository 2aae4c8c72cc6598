"""Whether two weight files hold the same, to the last bit."""

import safetensors.torch
import torch


def same_file(one, other):
    """Same names, same dtypes, same shapes, same bits."""
    a, b = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(*(one[name].flatten().view(torch.uint8) for one in (a, b))), name
    return True
