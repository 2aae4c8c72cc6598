"""Kernels and accelerated models on a GPU: the same numbers as torch in fp32, to rounding."""

import pytest
import torch

import vitrail as vt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
ROUNDING = 4e-3  # of bf16, relative to the norm of the result


def near(found, expected, rounding=ROUNDING):
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).norm() < rounding * expected.double().norm()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(50, 768), (197, 1024), (3, 100)])
def test_norm(rows, width, fp8):
    from tests.support import plain_kernels as plain
    from vitrail.fast.blocks import Norm
    from vitrail.fast.kernels.norm_inference import norm

    torch.manual_seed(0)
    z = torch.randn(rows, width, device="cuda").to(BF16)
    shift, weight, bias = torch.randn(3, width, device="cuda")
    how = Norm(shift=shift, weight=weight, bias=bias, eps=1e-6, centered=True, factor=40.0 if fp8 else None)
    near(norm(how, z).float(), plain.norm(how, z).float())


def test_gelu_is_exact_to_the_rounding_of_bf16():
    from vitrail.fast.kernels.gelu import bias_gelu

    x = torch.linspace(-8, 8, 65536, device="cuda").view(64, 1024)
    exact = torch.nn.functional.gelu(x.double())
    found = bias_gelu(x.clone(), torch.zeros(1024, device="cuda"))
    assert ((found - exact).abs() <= 2.0**-9 * exact.abs() + 2e-6).all()


@hopper
@pytest.mark.parametrize("kind", [BF16, FP8])
@pytest.mark.parametrize("what", ["bias", "gelu", "add", "fp8"])
def test_product(kind, what):
    from tests.support import plain_kernels as plain
    from vitrail.fast.kernels.product import LARGE_TILES, SMALL_TILES, product
    from vitrail.fast.products import Product

    torch.manual_seed(0)
    with torch.device("cuda"):
        x, weight = torch.randn(1000, 768).to(kind), torch.randn(512, 768).to(kind)
        scales, bias = torch.rand(512) / 20, torch.randn(512)
        before = torch.randn(1000, 512).to(FP8 if what == "fp8" else BF16)
    how = {"scales": scales} | {
        "bias": {"bias": bias},
        "gelu": {"bias": bias, "gelu": True},
        "add": {"add": True},
        "fp8": {"bias": bias, "gelu": True, "factor": 30.0},
    }[what]
    one = Product(weight=weight, **how)
    expected = plain.product(one, x, before.clone()).float()
    for tiles in (*SMALL_TILES, *LARGE_TILES):
        found = product(one, x, before.clone(), tiles).float()
        near(found, expected, 1e-2 if FP8 in (kind, before.dtype) else ROUNDING)


@hopper
@pytest.mark.parametrize("rows", [1, 197, 394])
def test_kernels_of_a_chain(rows):
    from tests.support import plain_kernels as plain
    from vitrail.fast.blocks import Norm
    from vitrail.fast.chain import FoldedNorm, choose_tiles
    from vitrail.fast.kernels import chain_products as chain
    from vitrail.fast.kernels.norm_inference import norm

    torch.manual_seed(0)
    with torch.device("cuda"):
        z, x = torch.randn(rows, 768).to(BF16), torch.randn(rows, 3072).to(BF16)
        down, up = (torch.randn(768, 3072) / 50).to(BF16), (torch.randn(3072, 768) / 30).to(BF16)
        shift, one, bias = torch.randn(768), torch.ones(768), torch.randn(3072)
    found, expected, exact = z.clone(), z.clone(), z.double() + x.double() @ down.double().T
    tiles = choose_tiles(rows, down, add=True)
    statistics = chain.add_project(x, down, found, shift, tiles)
    near(found, exact)
    near(statistics, plain.add_project(x, down, expected, shift, tiles))
    sums, shifted = up.float().sum(1), up.float() @ shift
    how = FoldedNorm(statistics=statistics, sums=sums, shifted=shifted, eps=1e-6, centered=True)
    y = chain.project(found, up, choose_tiles(rows, up), bias=bias, norm=how, gelu=True)
    normed = torch.nn.functional.layer_norm(found.double() + shift, (768,), eps=1e-6)
    near(y, torch.nn.functional.gelu(normed @ up.double().T + bias))
    again = z.clone()
    parts = chain.project_in_parts(x, down, choose_tiles(rows, down, parts=True))
    whole = Norm(shift=shift, weight=one, bias=0 * one, eps=1e-6, centered=True)
    y = norm(whole, again, parts, dependent=True)
    near(again, exact)
    near(y, torch.nn.functional.layer_norm(again.double() + shift, (768,), eps=1e-6))
    qkv = torch.randn(2, 197, 2304, device="cuda").to(BF16)
    near(
        chain.attend_first(qkv, 12, 0.125, rows % 197 or 197),
        plain.attend_first(qkv, 12, 0.125, rows % 197 or 197),
    )


@hopper
@pytest.mark.parametrize("fields", [{}, {"layer_scale": 0.5}, {"pool": "mean"}, {"norm": "rms"}], ids=str)
@pytest.mark.parametrize("size", ["Ti/16", "B/16"])
def test_chained_kernels_in_a_cuda_graph_give_the_model_every_time(size, fields):
    from vitrail.fast.choices import Choices
    from vitrail.fast.cuda_graph import Replay
    from vitrail.fast.fused import FusedForward

    torch.manual_seed(0)
    model = vt.create(size, classes=10, depth=4, **fields).eval().cuda()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    run = Replay(FusedForward(model, Choices(torch.device("cuda"), remember=False), chained=True))
    with torch.inference_mode():
        for count in (1, 2, 3):
            images = torch.randn(count, 3, 224, 224, device="cuda")
            first = run(images)[1].clone()
            near(first.float(), model(images), 3e-2)
            for _ in range(50):  # a kernel that reads too early would differ
                assert torch.equal(run(images)[1], first)


@pytest.mark.parametrize("fields", [{}, {"layer_scale": 0.5}, {"qk_norm": True}, {"mlp": "gated"}], ids=str)
@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_accelerated_bf16_is_the_model(fields, goal):
    torch.manual_seed(0)
    model = vt.create("Ti/16", classes=10, **fields).eval().cuda()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    fast = vt.accelerate(model, goal=goal)
    images = torch.randn(5, 3, 224, 224, device="cuda")
    for part in (images, images[:2], images):  # other shapes, and a shape again
        with torch.no_grad():
            near(fast(part).float(), model(part), 3e-2)
    assert fast.report.precision == "bf16"


@hopper
def test_fused_kernels_in_a_cuda_graph_give_the_model():
    from vitrail.fast.choices import Choices
    from vitrail.fast.cuda_graph import Replay
    from vitrail.fast.fused import FusedForward

    torch.manual_seed(0)
    model = vt.create("B/16", classes=10, depth=3).eval().cuda()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    ranges = {name: 8.0 for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    images = torch.randn(32, 3, 224, 224, device="cuda")
    for given, limit in ((None, 3e-2), (ranges, 0.2)):
        fused = FusedForward(model, Choices(images.device, remember=False), ranges=given)
        with torch.inference_mode():
            run = Replay(fused)
            near(run(images)[1].float(), model(images), limit)
            other = torch.randn_like(images)
            near(run(other)[1].float(), model(other), limit)


@hopper
def test_fp8_passes_its_gate_or_names_the_layers():
    torch.manual_seed(0)
    model = vt.create("B/16", classes=10, depth=2).eval().cuda()
    torch.nn.init.normal_(model.head.weight, std=0.5)
    images = torch.randn(64, 3, 224, 224, device="cuda")
    fast = vt.accelerate(model, "fp8", calibrate=images, min_agreement=0.5)
    assert fast.report.gate.passed
    assert 0 <= fast.report.gate.kl < 0.5


def test_by_default_bf16_without_measuring(tmp_path):
    torch.manual_seed(0)
    model = vt.create("Ti/16", classes=10).eval().cuda()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    predict = vt.Predictor(model, batch=5)
    assert predict.acceleration.precision == "bf16"
    assert "CUDA graph" in predict.acceleration.route
    assert not list(tmp_path.iterdir())  # nothing was measured
    images = torch.rand(7, 3, 224, 224)
    found = torch.stack([torch.from_numpy(one.logits) for one in predict(images)])
    plain = vt.Predictor(model, batch=5, precision="fp32")(images)
    near(found, torch.stack([torch.from_numpy(one.logits) for one in plain]), 3e-2)


def test_merged_tokens_in_a_cuda_graph():
    from vitrail.fast.merge import MergedForward

    torch.manual_seed(0)
    model = vt.create("Ti/16", classes=10).eval().cuda()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    images = torch.randn(24, 3, 224, 224, device="cuda")
    fast = vt.accelerate(model, merge=8, calibrate=images, min_agreement=0.0)
    with torch.inference_mode():
        near(fast(images).float(), MergedForward(model, 8, torch.float32)(images)[1], 0.2)
