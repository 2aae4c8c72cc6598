"""Every Triton kernel is launched on the GPU of its tensors, whichever is torch's current one.

The current device is faked, and so are the tensors' and the launches: there need not be a GPU.
"""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.fast.blocks import Norm
from vitrail.fast.chain import ChainTiles
from vitrail.fast.products import Product
from vitrail.model.device import ComputeDevice

pytest.importorskip("triton", reason="the kernels are written in Triton")
KERNELS = (
    *("chain_products", "gelu", "norm_inference", "product", "attention_kernel"),
    *("gelu_training", "norm_training"),
)
MODULES = [f"fast.kernels.{name}" for name in KERNELS]


class OnSecondGPU(torch.Tensor):
    """A tensor that says so; its memory is the CPU's."""

    is_cuda = True

    def get_device(self):
        return 1


@pytest.fixture
def current(monkeypatch):
    """The number of the current device, in a list."""
    current = [0]

    def exchange(index):
        before = current[0]
        if index >= 0:
            current[0] = index
        return before if index >= 0 else -1

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    return current


@pytest.fixture
def launches(monkeypatch, current):
    """The module, name and device of every launch."""
    from triton.runtime.jit import JITFunction

    found = []

    def launch(self, *args, **options):
        found.append((self.fn.__module__, self.fn.__name__, current[0]))

    monkeypatch.setattr(JITFunction, "run", launch)
    return found


def tensor(*shape):
    return torch.zeros(shape).as_subclass(OnSecondGPU)


def launch_inference():
    chain, gelu, norm, product = (import_module(f"vitrail.{name}") for name in MODULES[:4])
    x, weight, out, row = tensor(64, 64), tensor(64, 64), tensor(64, 64), tensor(64)
    tiles = ChainTiles(rows=64, columns=32, depth=32)
    chain.project(x, weight, tiles)
    chain.add_project(x, weight, out, row, tiles)
    chain.project_in_parts(x, weight, tiles)
    chain.attend_first(tensor(2, 5, 3 * 64), 2, 1.0, 1)
    gelu.bias_gelu(x, row)
    norm.norm(Norm(shift=row, weight=row, bias=row, eps=1e-6, centered=True), x)
    product.product(Product(weight=weight), x, out, product.SMALL_TILES[0])


def launch_training():
    attention, gelu, norm = (import_module(f"vitrail.{name}") for name in MODULES[4:])
    empty, bias = tensor(0), tensor(3 * 2 * 16)
    for tokens in (5, 200):
        qkv, out, lse = tensor(2, tokens, 3, 2, 16), tensor(2, tokens, 2, 16), tensor(2, 2, tokens)
        if tokens <= attention.MAX_FUSED:
            attention.short_attention(qkv, bias, empty, empty, empty, 1.0, 1e-6)
        attention.short_attention_backward(qkv, out, lse, out, empty, empty, empty, 1.0, 1e-6)
    x, row = tensor(6, 64), tensor(64)
    gelu.gelu(x, row)
    gelu.gelu_backward(x, x)
    norm.layer_norm(x, row, row, 1e-6)
    norm.layer_norm_backward(x, row, tensor(6), tensor(6), x)


def test_every_kernel_runs_on_the_device_of_its_tensors(launches, current):
    launch_inference()
    launch_training()
    assert {device for _, _, device in launches} == {1}, launches
    assert current == [0]
    kernels = set()
    for name in MODULES:
        source = Path(vitrail.__path__[0], *name.split(".")).with_suffix(".py").read_text()
        kernels |= {
            (f"vitrail.{name}", one) for one in re.findall(r"^ *(_\w+)\[.+\]\(", source, re.MULTILINE)
        }
    assert {launch[:2] for launch in launches} == kernels, "a kernel is not launched here"
    assert len(kernels) == 12


def test_the_gpu_of_a_run_is_the_current_one(current):
    for device, index in ((torch.device("cuda", 1), 1), (torch.device("cpu"), 0)):
        with ComputeDevice(device, torch.float32, "").current():
            assert current == [index]
        assert current == [0]
