"""`vt.accelerate`: the same forward, said reasons, and a gate that lossy precisions must pass."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import vitrail as vt
from tests.contract.test_options import CASES, config_of, difference
from tests.support.models import add_noise
from vitrail.base.errors import DeviceWarning
from vitrail.fast.accelerate import InferenceExecution
from vitrail.fast.gate import GateError, compare
from vitrail.fast.inference_routes import PLAIN, Accelerated, Acceleration, Builder, plain_forward
from vitrail.fast.int8 import choose_scales
from vitrail.fast.onnx_graph import OnnxForward
from vitrail.fast.prepare import prepare
from vitrail.fast.products import Product
from vitrail.fast.quantize import Observed, block_layers, observe
from vitrail.fast.smooth import Divide, smooth


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def trained():
    """A small model trained for a few seconds on the digits, with images and labels it was not trained on."""
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / 8 - 1)[:, None]
    labels = torch.from_numpy(digits.target)
    torch.manual_seed(0)
    model = vt.create("mu/4", size=8, patch=2, channels=1, classes=10, width=64, heads=2, depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(120):
        at = torch.arange(64) + 64 * (step % 20)
        loss = torch.nn.functional.cross_entropy(model(images[at]), labels[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), images[1300:1600], labels[1300:1600]


def use_the_graph(builder, precision, kept=()):
    """The quantized graph, even if PyTorch is faster for so small a model."""
    report = Acceleration(precision=precision, route="graph", kept=kept)
    return Accelerated(builder.model, OnnxForward(builder.int8_graph(kept)), report)


@pytest.fixture(scope="module")
def int8(trained):
    model, images, labels = trained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.fast.inference_routes.Builder.fastest", use_the_graph)
        return vt.accelerate(
            model, "int8", calibrate=images, labels=labels, min_agreement=0.9, remember=False
        )


def logits(module, images):
    with torch.no_grad():
        return module(images)


@pytest.mark.slow
def test_fp32_is_the_model_and_says_what_it_did(trained):
    model, images, _ = trained
    fast = vt.accelerate(model)
    torch.testing.assert_close(logits(fast, images[:7]), logits(model, images[:7]), atol=1e-4, rtol=1e-4)
    assert fast.report.precision == "fp32"
    assert fast.report.why
    rates = fast.report.images_per_second
    assert fast.report.route == max(rates, key=rates.get)  # never slower than plain
    assert set(rates) == {"PyTorch", "ONNX Runtime, fp32", "ONNX Runtime, fp32, an image for each thread"}
    assert fast.model is model


def test_int8_reports_agreement_kl_and_top1(trained, int8):
    model, images, labels = trained
    gate = int8.report.gate
    images, labels = images[1::2], labels[1::2]  # the others set the ranges
    assert gate.images == len(images)
    exact, found = logits(model, images), logits(int8, images)
    assert gate.agreement == pytest.approx((exact.argmax(1) == found.argmax(1)).float().mean().item())
    assert gate.top1_fp32 == pytest.approx((exact.argmax(1) == labels).float().mean().item())
    assert gate.top1 == pytest.approx((found.argmax(1) == labels).float().mean().item())
    assert gate.top1_fp32 > 0.5
    assert gate.agreement >= 0.97
    assert gate.passed
    assert 1e-4 < (found - exact).abs().max() < 0.2 * exact.abs().max()  # it does round
    assert json.loads(json.dumps(int8.report.as_dict()))["gate"]["agreement"] == gate.agreement
    assert "agreement" in gate.table()


@pytest.mark.slow
def test_answers_are_compared_on_images_that_set_no_range(trained, monkeypatch):
    model, images, _ = trained
    monkeypatch.setattr("vitrail.fast.inference_routes.Builder.fastest", use_the_graph)
    seen = []
    monkeypatch.setattr(
        "vitrail.fast.quantize.observe",
        lambda model, images, batch: seen.append(images) or observe(model, images, 8),
    )
    fast = vt.accelerate(model, "int8", calibrate=images, min_agreement=0.0, remember=False)
    assert torch.equal(seen[0], images[::2])
    exact, found = logits(model, images[1::2]), logits(fast, images[1::2])
    assert fast.report.gate.kl == pytest.approx(
        compare(found, exact, precision="", min_agreement=0).kl, rel=1e-3
    )


def test_int8_does_not_depend_on_the_batch(trained, int8):
    _, images, _ = trained
    alone = torch.cat([logits(int8, image[None]) for image in images[:5]])
    torch.testing.assert_close(logits(int8, images[:5]), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_kept_layers_are_not_rounded(trained, monkeypatch):
    model, images, _ = trained
    monkeypatch.setattr("vitrail.fast.inference_routes.Builder.fastest", use_the_graph)
    fast = vt.accelerate(model, "int8", calibrate=images, keep=list(block_layers(model)), remember=False)
    torch.testing.assert_close(logits(fast, images[:50]), logits(model, images[:50]), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_smoothing_never_changes_the_answers():
    """Over the cases that together contain every pair of options."""
    for case in CASES:
        config = config_of(case)
        model = add_noise(vt.ViT(config)).double().eval()
        batch = torch.randn(3, 3, *config.pixels, dtype=torch.float64)
        factors = {name: 1 + torch.rand(layer.in_features) for name, layer in block_layers(model).items()}
        smoothed = smooth(model, factors)
        assert difference(logits(smoothed, batch), logits(model, batch)) < 1e-5, case


def test_chosen_scales_cover_what_was_seen(trained):
    model, images, _ = trained
    seen = observe(model, images, 8)
    for name, scales in choose_scales(model, seen).items():
        weight = model.get_submodule(name).weight
        assert (scales.factors != 1).any() or name.endswith("fc2"), name
        for extreme in (seen[name].low, seen[name].high):
            rounded = scales.round_input(extreme) * scales.factors
            assert ((rounded - extreme).abs() <= 0.51 * scales.step * scales.factors + 1e-6).all(), name
        exact = weight * scales.factors
        assert (scales.rounded_weight() - exact).norm() < 0.01 * exact.norm(), name


def test_fc2_is_smoothed_only_where_few_channels_are_large(trained):
    """It takes a product with each image; smoothing of the other layers is free."""
    model, images, _ = trained
    seen = observe(model, images, 8)
    name = "blocks.1.mlp.fc2"
    for most, smoothed in ((7.0, False), (9.0, True)):
        high = torch.ones_like(seen[name].high)
        high[3] = most
        scales = choose_scales(model, {**seen, name: Observed(torch.zeros_like(high), high)})
        assert bool((scales[name].factors != 1).any()) == smoothed
        block = smooth(model, {name: scales[name].factors}).blocks[1]
        assert isinstance(block.mlp.hidden, Divide) == smoothed


@pytest.mark.slow
def test_a_gate_that_fails_names_layers_and_a_remedy(trained, monkeypatch):
    """Weights of one layer with a large outlier in each row: int8 has no steps left for the others."""
    model, images, _ = trained
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight[:, 0] = 400.0
        model.blocks[1].mlp.fc1.weight[0] = 0.0
        model.blocks[1].mlp.fc1.bias[0] = 0.0  # GELU(0) = 0: the outlier changes no answer in fp32
    monkeypatch.setattr(
        "vitrail.fast.int8._smoothing", lambda weight, seen, strength: torch.ones_like(seen.low)
    )
    monkeypatch.setattr("vitrail.fast.inference_routes.Builder.fastest", use_the_graph)
    with pytest.raises(GateError, match=r"blocks\.1\.mlp\.fc2") as caught:
        vt.accelerate(model, "int8", calibrate=images, remember=False)
    gate = caught.value.gate
    assert not gate.passed
    assert next(iter(gate.layers)) == "blocks.1.mlp.fc2"
    assert "blocks.1.mlp.fc2" in gate.keep
    fast = vt.accelerate(model, "int8", calibrate=images, keep="auto", remember=False)
    assert fast.report.gate.passed
    assert fast.report.kept == gate.keep


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "int4"}, "Unknown precision 'int4'"),
        ({"goal": "speed"}, "Unknown goal 'speed'"),
        ({"precision": "int8"}, "calibrate=images"),
        ({"precision": "int8", "calibrate": torch.zeros(3, 8, 8)}, "N, C, H, W"),
        ({"precision": "int8", "calibrate": torch.zeros(1, 1, 8, 8)}, "at least two images"),
        ({"precision": "fp8", "calibrate": torch.zeros(2, 1, 8, 8)}, "compute capability 9.0"),
        ({"precision": "bf16"}, "GPUs only"),
        ({"min_agreement": 99}, "from 0 to 1"),
        ({"precision": "int8", "calibrate": torch.zeros(2, 1, 8, 8), "labels": torch.zeros(3)}, "2 images"),
        ({"precision": "int8", "calibrate": torch.zeros(2, 1, 8, 8), "keep": ["blocks.9.x"]}, "blocks.0"),
        ({"precision": "int8", "calibrate": torch.zeros(2, 1, 8, 8), "keep": "blocks.0"}, 'or "auto"'),
    ],
)
def test_bad_arguments_are_explained(trained, arguments, words):
    with pytest.raises(vt.InputError, match=words):
        vt.accelerate(trained[0], **arguments)


def test_only_models_of_images_are_taken():
    with pytest.raises(vt.InputError, match="takes a ViT"):
        vt.accelerate("model.safetensors")


def test_comparing_equal_logits():
    exact = torch.randn(10, 4)
    gate = compare(exact, exact, precision="int8", min_agreement=1.0, labels=exact.argmax(1))
    assert (gate.agreement, gate.kl, gate.top1, gate.top1_fp32) == (1.0, 0.0, 1.0, 1.0)
    assert gate.passed


def test_a_route_that_is_not_quantized_is_not_called_so(trained, monkeypatch):
    """If the quantized route fails, another one computes, and the report must not say int8."""
    model, images, _ = trained
    other = plain_forward(model, torch.float32)

    def fail():
        raise RuntimeError("no such kernel")

    def routes(self, precision, kept):
        return {PLAIN: lambda: other, "another way": lambda: other, "quantized, int8": fail}, []

    monkeypatch.setattr(Builder, "routes", routes)
    fast = vt.accelerate(model, "int8", calibrate=images, remember=False)
    assert fast.report.precision == "fp32"
    assert any("quantized, int8 does not work here" in why for why in fast.report.why)


def test_narrow_layers_have_tiles_for_many_rows(monkeypatch):
    """192 columns, as in Ti/16, are no multiple of the large tiles' 128."""
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for columns in (192, 384, 768):
        weight = torch.zeros(columns, 768).to(torch.float8_e4m3fn)
        for rows in (197, 50432):
            assert Product(weight=weight, add=True).ways(rows), (columns, rows)
            few = Product(weight=weight, add=True).ways(100)
            assert list(few) == ["Triton 64x32x128, 4 warps, 4 stages, 1 parts"], "nothing to measure"


def test_what_is_recorded_of_an_accelerated_model_is_the_models(trained):
    """The fast way has no such activations: the model computes meanwhile, and says so."""
    model, images = trained[0], trained[1][:3]
    fast, said = vt.accelerate(model, remember=False), []
    fast.say = said.append
    with vt.record(model, "blocks.*.attention.weights") as tape, torch.no_grad():
        logits = fast(images)
    assert len(tape) == model.config.depth
    torch.testing.assert_close(logits, fast(images), rtol=0, atol=1e-4)
    (message,) = said
    assert "recorded or edited" in message


def test_without_a_listener_the_line_is_a_warning(trained):
    model, images, _ = trained
    fast = Accelerated(
        model, plain_forward(model, torch.float32), Acceleration(precision="fp32", route=PLAIN)
    )
    with vt.record(model, "encoded"), pytest.warns(DeviceWarning, match="the plain model computes meanwhile"):
        fast(images[:2])
    with vt.record(model, "encoded") as tape:  # said once
        fast(images[:2])
    assert len(tape["encoded"]) == 2


def test_inference_is_prepared_as_training_is(trained, monkeypatch):
    model, images, _ = trained
    plain = {PLAIN: lambda: plain_forward(model, torch.float32)}
    monkeypatch.setattr(Builder, "routes", lambda self, precision, kept: (plain, []))
    fast = prepare(model, InferenceExecution("fp32", remember=False))
    assert (fast.model, fast.report.route) == (model, PLAIN)
    assert torch.equal(logits(fast, images[:2]), logits(model, images[:2]))
    with pytest.raises(vt.InputError, match="a TrainingExecution or an InferenceExecution, not 'int8'"):
        prepare(model, "int8")


def test_what_another_thread_records_leaves_the_fast_way(trained):
    """Otherwise answers of one thread would be in another precision, by what the others do."""
    model, images = trained[0], trained[1][:3]
    fast, said = vt.accelerate(model, remember=False), []
    fast.say = said.append
    with ThreadPoolExecutor(1) as other, vt.record(model, "blocks.*.attention.weights") as tape:
        assert other.submit(lambda: fast.watched).result() is False
        other.submit(fast, images).result()
        assert not tape
        assert not said
        assert fast.watched
    assert not fast.watched
