"""The Triton kernels compute what their twins in `tests.support.plain_kernels` do, in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the tests run in a process of their own. bf16 products
are wrong in it; tests/gpu has them on a GPU.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FP8 = torch.float8_e4m3fn
inside = pytest.mark.skipif(
    not INTERPRETED, reason="runs in the process that test_all_in_the_interpreter starts"
)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="needs Triton")
def test_all_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(".") >= 25  # they were not skipped


def assert_fp8_close(found, expected):
    """Equal but for numbers that round up to a power of two, which the interpreter converts wrongly."""
    found, expected = found.float(), expected.float()
    mantissa, _ = torch.frexp(expected)
    comparable = mantissa.abs() != 0.5
    assert comparable.float().mean() > 0.5
    near = (found - expected).abs() <= 0.126 * expected.abs() + 2**-9  # a step, where sums differ in rounding
    assert near[comparable].all()
    assert (found == expected)[comparable].float().mean() > 0.99


@inside
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("shape", [(37, 100), (5, 1024)])
def test_norm(shape, centered):
    from tests.support import plain_kernels as plain
    from vitrail.fast.blocks import Norm
    from vitrail.fast.kernels.norm_inference import norm

    torch.manual_seed(0)
    z, (shift, weight, bias) = torch.randn(shape), torch.randn(3, shape[1])
    how = Norm(shift=shift, weight=weight, bias=bias, eps=1e-6, centered=centered)
    torch.testing.assert_close(norm(how, z), plain.norm(how, z), atol=2e-6, rtol=1e-5)
    how = replace(how, factor=50.0)
    assert_fp8_close(norm(how, z), plain.norm(how, z))


@inside
def test_gelu_is_exact_to_the_rounding_of_bf16():
    from vitrail.fast.kernels.gelu import bias_gelu

    x, bias = torch.linspace(-8, 8, 6400).view(100, 64), torch.linspace(-0.1, 0.1, 64)
    exact = torch.nn.functional.gelu((x + bias).double())
    error = (bias_gelu(x.clone(), bias) - exact).abs()
    step = 2.0**-8 * exact.abs()  # the distance of two neighbors in bf16 is this or twice as much
    assert (error <= 0.5 * step + 2e-6).all()


@inside
@pytest.mark.parametrize("kind", [torch.float32, FP8])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("what", ["plain", "gelu", "add", "fp8"])
def test_product(kind, parts, what):
    from tests.support import plain_kernels as plain
    from vitrail.fast.kernels.product import Tiles, product
    from vitrail.fast.products import Product

    torch.manual_seed(0)
    x, weight = torch.randn(150, 96).to(kind), torch.randn(256, 96).to(kind)
    scales, bias = torch.rand(2, 256)
    how = {
        "plain": {},
        "gelu": {"scales": scales, "bias": bias, "gelu": True},
        "add": {"scales": scales, "add": True},
        "fp8": {"bias": bias, "factor": 2.0},
    }[what]
    one = Product(weight=weight, **how)
    before = torch.randn(150, 256).to(FP8 if what == "fp8" else torch.float32)
    found = product(one, x, before.clone(), Tiles(64, 128, 64, 4, 2, parts))
    expected = plain.product(one, x, before.clone())
    if what == "fp8":
        assert_fp8_close(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-3 if what == "gelu" else 1e-4, rtol=2e-3)


def chain_inputs(M=150, D=96, hidden=256, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    z, x = torch.randn(M, D), torch.randn(M, hidden)
    down, up, shift, bias = (
        torch.randn(D, hidden),
        torch.randn(hidden, D),
        torch.randn(D),
        torch.randn(hidden),
    )
    return (one.to(device, dtype) for one in (z, x, down / 10, up)), shift.to(device), bias.to(device)


@inside
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_products_of_a_chain(centered, gelu):
    """One leaves the statistics of the tokens, with which the next one normalizes."""
    from tests.support import plain_kernels as plain
    from vitrail.fast.blocks import Norm
    from vitrail.fast.chain import ChainTiles, FoldedNorm
    from vitrail.fast.kernels import chain_products as chain

    (z, x, down, up), shift, bias = chain_inputs()
    tiles = ChainTiles(rows=64, columns=32, depth=32)
    found, expected = z.clone(), z.clone()
    statistics = chain.add_project(x, down, found, shift, tiles)
    torch.testing.assert_close(plain.add_project(x, down, expected, shift, tiles), statistics)
    torch.testing.assert_close(found, expected)
    sums, shifted = up.sum(1), up @ shift
    norm = FoldedNorm(statistics=statistics, sums=sums, shifted=shifted, eps=1e-6, centered=centered)
    how = {"bias": bias, "norm": norm, "gelu": gelu}
    y = chain.project(found, up, tiles, **how)
    torch.testing.assert_close(y, plain.project(found, up, tiles, **how), atol=1e-3, rtol=2e-3)
    whole = Norm(shift=shift, weight=torch.ones(96), bias=torch.zeros(96), eps=1e-6, centered=centered)
    exact = plain.norm(whole, found) @ up.T + bias
    torch.testing.assert_close(y, torch.nn.functional.gelu(exact) if gelu else exact, atol=1e-3, rtol=2e-3)


@inside
def test_parts_are_added_up_in_the_norm():
    from tests.support import plain_kernels as plain
    from vitrail.fast.blocks import Norm
    from vitrail.fast.chain import ChainTiles
    from vitrail.fast.kernels import chain_products as chain
    from vitrail.fast.kernels.norm_inference import norm

    (z, x, down, _), shift, _ = chain_inputs()
    tiles = ChainTiles(rows=64, columns=32, depth=32, splits=3)
    parts = chain.project_in_parts(x, down, tiles)
    torch.testing.assert_close(parts, plain.project_in_parts(x, down, tiles), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts.sum(0), x @ down.T, atol=1e-5, rtol=1e-5)
    found, expected = z.clone(), z.clone()
    how = Norm(shift=shift, weight=torch.ones(96), bias=torch.zeros(96), eps=1e-6, centered=True)
    torch.testing.assert_close(norm(how, found, parts), plain.norm(how, expected, parts))
    torch.testing.assert_close(found, expected)


@inside
@pytest.mark.parametrize(("tokens", "queries"), [(37, 37), (37, 2), (150, 150)])
def test_attention_of_the_first_tokens(tokens, queries):
    from tests.support import plain_kernels as plain
    from vitrail.fast.kernels import chain_products as chain

    torch.manual_seed(0)
    qkv = torch.randn(2, tokens, 3 * 3 * 32)
    found = chain.attend_first(qkv, 3, 0.2, queries)
    torch.testing.assert_close(found, plain.attend_first(qkv, 3, 0.2, queries), atol=1e-5, rtol=1e-5)
