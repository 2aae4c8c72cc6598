"""`vitrail export --to onnx`: the same outputs in ONNX Runtime for many configs, and the proof."""

import dataclasses
import hashlib
import json
import re
import sys

import numpy as np
import onnx
import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import FileError, InputError
from vitrail.base.telemetry import import_onnxruntime
from vitrail.cli import main
from vitrail.exporters import proof as proofs
from vitrail.exporters.graph import Graph, Plan, plan_for
from vitrail.exporters.onnx import check_weight_bytes, write_onnx
from vitrail.exporters.proof import write_checked
from vitrail.exporters.resize import ResizeToInput
from vitrail.model import surgery
from vitrail.views.sample import SAMPLE_FILE
from vitrail.weights.bundle.bundle import Source

BASE = dict(width=32, depth=2, heads=2, patch=8, size=(16, 24), classes=5)
NO_CLASS = dict(class_token=False, pool="mean")

# Together these cover the options of the config. Each export takes seconds: the rest runs with `pytest -m slow`.
MODELS = {
    "paper, one channel": dict(channels=1, layer_scale=0.1, embedding_norm="after"),
    "rotary, registers, mean": dict(
        position="rotary", registers=3, pool="mean", qk_norm=True, norm="rms", mlp="gated", activation="silu"
    ),
    "attention pool, no head": dict(NO_CLASS, pool="attention", position="sincos2d", classes=0),
    "distilled, four channels, post-norm": dict(
        distillation_token=True, head="distilled", channels=4, block="post-norm", position="relative"
    ),
}
DYNAMIC = {
    "conv stem": dict(embedding="conv", qkv_bias="no-k", head="tanh", activation="quick-gelu"),
}
SLOW = {
    "resnet stem": (dict(embedding="resnet", patch=16, size=(32, 48)), ()),
    "dinov3": (dict(position="rotary-dinov3", registers=4, layer_scale=0.1, head_width=8), ("size",)),
    "learned2d": (dict(position="learned2d", position_at="every", rows="class"), ("size",)),
    "sincos1d": (dict(NO_CLASS, position="sincos1d", pool="mean-all"), ("size",)),
    "pairwise, parallel": (dict(position="pairwise", block="parallel"), ()),
    "flatten, no residual": (
        dict(NO_CLASS, pool="flatten", embedding="mlp", block="no-residual", scale="none"),
        (),
    ),
    "learned, any size": (dict(registers=2, rows="patches", norm_pre=True, pool="class-mean"), ("size",)),
}


def bundle_of(**fields):
    torch.manual_seed(0)
    config = vt.ViTConfig(**{**BASE, **fields})
    labels = [f"class {number}" for number in range(config.classes)] if config.classes else None
    return vt.Bundle(model=add_noise(vt.ViT(config)), labels=labels)


def session(path):
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def largest(one, other):
    return np.abs(one - other).max() / max(1, np.abs(other).max())


def check_file(bundle, path, proof, sizes):
    """Compare file and model on random inputs that the proof did not use."""
    run, model = session(path), bundle.model
    names = [one.name for one in run.get_outputs()]
    assert names == (["logits", "embedding"] if model.config.classes else ["embedding"])
    for size in sizes:
        fitted = surgery.resize(model, size)
        for count in (1, 2, 5):
            images = torch.randn(count, model.config.channels, *size)
            outputs = dict(zip(names, run.run(names, {"images": images.numpy()}), strict=True))
            with torch.no_grad():
                embedding = fitted.encode(images).pooled
                assert largest(outputs["embedding"], embedding.numpy()) < 1e-4
                if model.config.classes:
                    assert largest(outputs["logits"], fitted.head(embedding).numpy()) < 1e-4
    assert not proof.failed
    data = path.read_bytes()
    assert proof.sha256 == hashlib.sha256(data).hexdigest()
    assert b"site-packages" not in data
    # No source paths of this machine; weights may contain the bytes ".py", but no name before them.
    assert not re.search(rb"[\w/]{6}\.py", data)
    onnx.checker.check_model(onnx.load(path), full_check=True)


# ---- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_are_those_of_the_model(name, tmp_path):
    bundle = bundle_of(**MODELS[name])
    proof = write_onnx(bundle, tmp_path / "x.onnx")
    check_file(bundle, tmp_path / "x.onnx", proof, [bundle.model.config.pixels])
    assert [check.what for check in proof.checks] == [f"golden inputs, batch of {n}" for n in (1, 3, 4)]


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_dynamic_size(name, tmp_path):
    bundle = bundle_of(**DYNAMIC[name])
    proof = write_onnx(bundle, tmp_path / "x.onnx", dynamic=("batch", "size"))
    check_file(bundle, tmp_path / "x.onnx", proof, [(16, 24), (16, 16), (48, 32)])
    assert [check.what for check in proof.checks[3:]] == [
        f"golden inputs of {s}" for s in ("24x40", "16x16", "16x48")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_models(name, tmp_path):
    fields, dynamic = SLOW[name]
    bundle = bundle_of(**fields)
    proof = write_onnx(bundle, tmp_path / "x.onnx", dynamic=dynamic)
    (h, w), own = bundle.model.config.patch_pixels, bundle.model.config.pixels
    check_file(bundle, tmp_path / "x.onnx", proof, [own, (4 * h, 3 * w)] if dynamic else [own])


RESAMPLE = [
    {},
    dict(method="bilinear", antialias=False),
    dict(antialias=False),
    dict(antialias=False, corners=True),
    dict(antialias=False, offset=0.1),
]


@pytest.mark.parametrize("resample", RESAMPLE, ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(registers=2, rows="class"),
        dict(position="learned2d"),
        dict(position="sincos1d"),
        dict(NO_CLASS, position="sincos2d"),
        dict(position="rotary", registers=1),
        dict(position="rotary-dinov3"),
        dict(position="none"),
    ],
    ids=str,
)
def test_positions_for_any_grid_are_those_of_surgery(fields, resample):
    """In eager mode, without an export."""
    bundle = bundle_of(**fields)
    graph = Graph(bundle.model, bundle.preprocess, Plan(any_size=True, resample=resample))
    for size in [(16, 24), (8, 8), (40, 24), (16, 64), (8, 48)]:
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            expected = surgery.resize(bundle.model, size, **resample)(images)
            assert largest(graph(images)[0].numpy(), expected.numpy()) < 1e-5, size


def test_positions_are_resampled_as_in_the_source_library():
    bundle = bundle_of()
    bundle.source = Source(family="torchvision", spelled={}, tensors={})
    plan = plan_for(bundle, dynamic=("size",))
    assert plan.resample == {"method": "bicubic", "antialias": False, "corners": True}


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (dict(position="pairwise"), dict(dynamic=("size",)), "position=.pairwise"),
        (dict(position="relative"), dict(dynamic=("size",)), "position=.relative"),
        (dict(embedding="resnet", patch=16, size=32), dict(dynamic=("size",)), "embedding=.resnet"),
        (dict(NO_CLASS, pool="flatten"), dict(dynamic=("size",)), "pool=.flatten"),
        ({}, dict(dynamic=("size",), with_preprocess=True), "with_preprocess=True .* dynamic size"),
    ],
)
def test_unsupported_options_are_refused_by_name(fields, options, message):
    with pytest.raises(InputError, match=message):
        plan_for(bundle_of(**fields), **options)


def test_other_inputs_and_interpolations_are_refused_by_name():
    text = vt.ViTConfig(width=12, depth=1, heads=3, input="text", vocabulary=9, size=8, patch=1, classes=2)
    with pytest.raises(InputError, match="input='text'"):
        plan_for(vt.Bundle(model=vt.ViT(text)))
    bundle = bundle_of()
    bundle.preprocess = dataclasses.replace(bundle.preprocess, interpolation="nearest")
    with pytest.raises(InputError, match=r"interpolation .*'nearest'"):
        plan_for(bundle, with_preprocess=True)
    assert not plan_for(bundle).with_preprocess


def test_a_model_beyond_2_gib_is_refused():
    with torch.device("meta"):
        model = vt.ViT(vt.ViTConfig(width=1280, depth=32, heads=16, patch=14, size=224))
    with pytest.raises(InputError, match=r"at most 2,147,483,647 bytes.* 2,5"):
        check_weight_bytes(vt.Bundle(model=model))


# ---- preprocessing ------------------------------------------------------------------------------

SHAPES = [(32, 32), (7, 200), (200, 7), (1, 1), (64, 64), (33, 31), (150, 221), (1, 50), (50, 1), (60, 12)]
SPECS = [
    dict(size=32),
    dict(size=(24, 32), resize_to=(29, 41)),
    dict(size=32, resize="shortest"),
    dict(size=(24, 32), resize="shortest", resize_to=37, crop_rounding="down"),
    dict(size=(25, 32), resize="shortest", resize_to=38),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_resized_pixels_are_bit_equal_to_pillow(spec, interpolation):
    """On noise, and on black and white, where every rounding error shows."""
    preprocess = vt.Preprocess(**spec, interpolation=interpolation)
    rng, resize = np.random.default_rng(0), ResizeToInput(preprocess)
    for shape in SHAPES:
        noise = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
        for image in (noise, (noise > 127).astype(np.uint8) * 255):
            ours = resize(torch.from_numpy(image)[None])[0].permute(1, 2, 0).numpy()
            assert np.array_equal(ours, preprocess.pixels(image)), shape


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resized_pixels_are_within_1_of_torch(interpolation):
    preprocess = vt.Preprocess(size=(24, 32), resize="shortest", interpolation=interpolation, backend="torch")
    rng, resize = np.random.default_rng(0), ResizeToInput(preprocess)
    for shape in SHAPES:
        image = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
        ours = resize(torch.from_numpy(image)[None])[0].permute(1, 2, 0).numpy()
        assert np.abs(ours - preprocess.pixels(image)).max() <= 1


@pytest.mark.slow
def test_images_of_any_size_go_into_the_graph(tmp_path):
    bundle = bundle_of()
    bundle.preprocess = vt.Preprocess(
        size=(16, 24),
        resize="shortest",
        resize_to=27,
        interpolation="bicubic",
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.4),
    )
    proof = write_onnx(bundle, tmp_path / "x.onnx", with_preprocess=True)
    assert len(proof.checks) == 7
    assert not any(check.different_pixels or check.largest_pixel_difference for check in proof.checks)
    assert sum(check.pixels for check in proof.checks) == 16 * 16 * 24 * 3
    run = session(tmp_path / "x.onnx")
    assert [one.name for one in run.get_outputs()] == ["logits", "embedding"]
    assert [(one.name, one.type, one.shape) for one in run.get_inputs()] == [
        ("raw_images", "tensor(uint8)", ["batch", "height", "width", 3])
    ]
    rng = np.random.default_rng(1)
    for shape in [(2, 16, 24, 3), (1, 300, 40, 3), (3, 40, 300, 3), (1, 1, 1, 3), (1, 9, 9, 3)]:
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        logits, _ = run.run(None, {"raw_images": images})
        with torch.no_grad():
            expected = bundle.model(bundle.preprocess.batch(list(images)))
        assert largest(logits, expected.numpy()) < 1e-4


# ---- the proof ----------------------------------------------------------------------------------


def eager(graph):
    """Run a graph in eager mode, in place of an exported file."""

    def run(batch):
        with torch.no_grad():
            outputs = graph(torch.from_numpy(batch))
        return {name: one.numpy() for name, one in zip(graph.outputs, outputs, strict=True)}

    return run


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(any_size=True), Plan(with_preprocess=True)], ids=["plain", "size", "preprocess"]
)
def test_a_proof_detects_a_changed_bias(plan):
    bundle = bundle_of()
    graph = Graph(bundle.model, bundle.preprocess, plan)
    assert not proofs.prove(bundle, plan, eager(graph), runtime="torch").failed
    with torch.no_grad():
        graph.model.head.bias[2] += 3e-3
    assert len(proofs.prove(bundle, plan, eager(graph), runtime="torch").failed) > 2


@pytest.mark.parametrize("mistake", ["positions", "crop", "nan"])
def test_a_proof_detects_mistakes(mistake):
    bundle, plan = bundle_of(), Plan(any_size=mistake == "positions", with_preprocess=mistake == "crop")
    bundle.preprocess = vt.Preprocess(size=(16, 24), resize="shortest", resize_to=27, interpolation="bicubic")
    wrong_plan = dataclasses.replace(plan, resample=dict(antialias=False))
    spec = dataclasses.replace(bundle.preprocess, resize_to=26) if mistake == "crop" else bundle.preprocess
    graph = Graph(bundle.model, spec, wrong_plan if mistake == "positions" else plan)
    if mistake == "nan":
        with torch.no_grad():
            graph.model.head.bias[2] = float("nan")
    failed = proofs.prove(bundle, plan, eager(graph), runtime="torch").failed
    assert failed
    if mistake == "crop":
        assert max(check.largest_pixel_difference for check in failed) > 1


def test_a_file_that_fails_the_check_is_not_written(tmp_path):
    wrong = proofs.Check(what="golden", inputs=4, difference=0.5, limit=1e-4, same_class=3)
    speed = proofs.Speed(runtime="x", n=1, threads=1, eager=1.0, exported=1.0)
    seen = []

    def prove(partial):
        seen.append(partial.read_bytes())
        return proofs.Proof(checks=[wrong], speed=speed)

    with pytest.raises(FileError, match=r"golden: a difference of 0.5 .*0.0001.*not written"):
        write_checked(tmp_path / "x.onnx", b"data", prove, "onnx")
    with pytest.raises(FileError, match=r"RuntimeError: no kernel.*not written"):
        write_checked(
            tmp_path / "x.onnx",
            b"data",
            lambda partial: (_ for _ in ()).throw(RuntimeError("no kernel")),
            "onnx",
        )
    assert seen == [b"data"]
    assert not [*tmp_path.iterdir()]


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def export(tmp_path, monkeypatch, capfd):
    """Run the command in this process: (exit code, stdout, stderr), including what C code prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vitrail", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capfd.readouterr()

    return run


def test_the_command_prints_the_proof_and_nothing_else(export, tmp_path):
    code, out, err = export(SAMPLE_FILE, "--to", "onnx", "--dynamic", "batch, size")
    assert (code, err) == (0, "")
    words = ["outputs", "difference", "same class", "one image", "versions", "sha256", "Saved"]
    assert [line[: len(word)] for line, word in zip(out.splitlines(), words, strict=True)] == words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.proof.json"]
    proof = json.loads((tmp_path / "model.onnx.proof.json").read_text())
    assert proof["sha256"] in out
    assert proof["opset"] == 20
    assert {"torch", "onnx", "onnxscript", "onnxruntime", "pillow", "vitrail"} <= set(proof["versions"])
    assert proof["speed"]["n"] >= 3
    assert str(tmp_path) not in json.dumps(proof)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "tflite"], "tflite.*onnx, torch-export, html"),
        (["--to", "onnx", "--out", "x.pt2"], "must end in .onnx.*x.pt2"),
        (["--to", "torch-export", "--out", "x.onnx"], "must end in .pt2.*x.onnx"),
        (["--to", "onnx", "--out", "none/x.onnx"], "no folder none"),
        (["--to", "onnx", "--dynamic", "height"], "--dynamic.*height"),
        (["--to", "html", "--dynamic", "size"], "--dynamic"),
        (["--to", "html", "--with-preprocess"], "--with-preprocess"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(arguments, message, export, tmp_path):
    code, out, err = export(SAMPLE_FILE, *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("mine", ["model.onnx", "model.onnx.proof.json"])
def test_existing_files_are_not_overwritten(mine, export, tmp_path):
    (tmp_path / mine).write_text("mine")
    code, out, err = export(SAMPLE_FILE, "--to", "onnx")
    assert (code, out) == (2, "")
    assert re.search(rf"{re.escape(mine)} .*already", err)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(mine, "mine")]
