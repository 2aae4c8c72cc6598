"""Preprocessing options, and what convert and verify refuse: other file endings, NaN and infinity."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError, FileError
from vitrail.cli import app, main
from vitrail.weights.bundle.golden import verify
from vitrail.weights.families.timm import TIMM

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
MEAN = "preprocess.mean=0.485,0.456,0.406"
STD = "preprocess.std=0.229,0.224,0.225"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_file(
        add_noise(VisionTransformer(**SMALL)).state_dict(), tmp_path / "timm.safetensors"
    )
    return tmp_path / "timm.safetensors"


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def refused(monkeypatch, capsys, *arguments):
    """The error message of a command that exits with 2."""
    monkeypatch.setattr("sys.argv", ["vitrail", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def sets(*fields):
    return [part for field in ("heads=2", *fields) for part in ("--set", field)]


# ---- preprocessing ------------------------------------------------------------------------------


def test_info_and_convert_take_mean_and_std(path):
    facts = json.loads(run("info", path, "--json", *sets(MEAN, STD, "preprocess.interpolation=lanczos")))
    assert "minus (0.485, 0.456, 0.406)" in facts["preprocessing"]
    assert "divided by (0.229, 0.224, 0.225)" in facts["preprocessing"]
    assert any("lanczos" in step for step in facts["preprocessing"])
    assert any("preprocess.mean is (0.485, 0.456, 0.406) as given" in note for note in facts["notes"])
    run("convert", path, "out.safetensors", *sets(MEAN, STD))
    spec = vt.load("out.safetensors").preprocess
    assert (spec.mean, spec.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    run("convert", "out.safetensors", "again.safetensors", "--set", "preprocess.mean=0.25")
    assert vt.load("again.safetensors").preprocess.mean == (0.25, 0.25, 0.25)


FIELDS = {
    "size": ("32x32", (32, 32)),
    "resize": ("squash", "squash"),
    "resize_to": ("40", (40, 40)),
    "interpolation": ("nearest", "nearest"),
    "backend": ("torch", "torch"),
    "crop_rounding": ("down", "down"),
    "scale": ("0.5", 0.5),
    "mean": ("0.1, 0.2, 0.3", (0.1, 0.2, 0.3)),
    "std": ("1", (1.0, 1.0, 1.0)),
}


def test_every_field_can_be_set(path):
    assert set(FIELDS) == {field.name for field in fields(vt.Preprocess)}
    for name, (text, value) in FIELDS.items():
        run("convert", path, f"{name}.safetensors", *sets(f"preprocess.{name}={text}"))
        assert getattr(vt.load(f"{name}.safetensors").preprocess, name) == value


def test_steps_can_be_removed(path):
    run("convert", path, "out.safetensors", *sets("preprocess.resize=none"))
    assert vt.load("out.safetensors").preprocess.resize == "none"
    run("convert", path, "uncropped.safetensors", *sets("preprocess.resize_to=none"))
    assert vt.load("uncropped.safetensors").preprocess.resize_to is None


def test_none_can_be_an_allowed_value(path, tmp_path):
    """pool_norm=none is one of the allowed values, not None."""
    state = {n: t for n, t in safetensors.torch.load_file(path).items() if not n.startswith("norm.")}
    safetensors.torch.save_file(
        state | {"fc_norm.weight": torch.ones(32), "fc_norm.bias": torch.ones(32)}, path
    )
    facts = json.loads(run("info", path, "--json", *sets("pool_norm=none")))
    assert facts["config"]["pool_norm"] == "none"


def test_given_fields_are_for_the_final_size(path):
    """A resize_to below the model's original size is valid for the new one."""
    bundle = vt.load(path, heads=2, size=16, preprocess={"resize_to": 20})
    assert (bundle.preprocess.target, bundle.preprocess.resize_to) == ((16, 16), (20, 20))


def test_predict_and_evaluate_use_them(path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    Image.fromarray(images[0]).save("a.png")
    splits = {
        f"{kind}_{split}": images if kind == "x" else np.arange(6) % 5
        for kind in "xy"
        for split in ("train", "test")
    }
    np.savez("data.npz", **splits)
    results = {}
    for more in ((), (MEAN, STD)):
        rows = run("predict", path, "a.png", "--format", "jsonl", *sets(*more))
        run("evaluate", path, "data.npz", "--json", f"{len(more)}.json", *sets(*more))
        results[more] = rows, json.loads((path.parent / f"{len(more)}.json").read_text())["calibration"]
    (plain, loss), (given, other) = results.values()
    assert plain != given
    assert loss != other


def test_walk_uses_them(path, monkeypatch, capsys):
    Image.new("RGB", (40, 40), "red").save("a.png")
    for model in (path, "mu/4"):
        outputs = {run("walk", model, "a.png", *sets(*more)) for more in ((), (MEAN, STD))}
        assert len(outputs) == 2
    assert "is a model size" in refused(
        monkeypatch, capsys, "walk", "mu/4", "a.png", "--set", "checkpoint_key=ema"
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("preprocess.maen=0.5", "Did you mean 'preprocess.mean'?"),
        ("preprocess=0.5", "unknown published preprocessing '0.5'"),
        ("preprocess.mean=a,b,c", "mean must be a tuple"),
        ("preprocess.mean=0.5,0.5", "as many numbers in std"),
        ("preprocess.interpolation=cubic", "interpolation"),
        ("preprocess.size=48", "48x48 is not the model's size 32x32"),
        ("preprocess.std=0", "at least 1e-6"),
    ],
)
def test_invalid_preprocessing(path, field, message, monkeypatch, capsys):
    assert message in refused(monkeypatch, capsys, "info", path, *sets(field))
    assert message in refused(monkeypatch, capsys, "convert", path, "out.safetensors", *sets(field))


def test_preprocess_in_python(path):
    with pytest.raises(ConfigError, match="Did you mean 'mean'"):
        vt.load(path, heads=2, preprocess={"maen": 0.5})
    with pytest.raises(ConfigError, match="takes a mapping"):
        vt.load(path, heads=2, preprocess=0.5)
    with pytest.raises(ConfigError, match="have 1 values, but the model has 3 channels"):
        vt.load(path, heads=2, preprocess={"mean": (0.5,), "std": (0.5,)})


# ---- endings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["vitrail", "timm"])
@pytest.mark.parametrize("name", ["b.pt", "b.pth", "b.bin", "b.PT", "b.onnx", "b.ckpt", "b.h5"])
def test_endings_of_other_formats_are_refused(path, name, to, monkeypatch, capsys):
    message = refused(monkeypatch, capsys, "convert", path, name, "--to", to, *sets())
    assert name in message
    assert ".safetensors" in message
    assert (".npz" in message) == (to != "vitrail")
    assert [one.name for one in path.parent.iterdir()] == ["timm.safetensors"]


def test_a_vitrail_file_is_not_an_npz(path):
    with pytest.raises(FileError, match=r"cannot be written as \.npz"):
        vt.convert(path, "b.npz", to="vitrail", heads=2)
    with pytest.raises(FileError, match=r"a bundle is a \.safetensors file"):
        vt.load(path, heads=2).save("b.pt")


# ---- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["vitrail", "timm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_convert_refuses_nan_and_infinite_weights(path, value, everywhere, to, monkeypatch, capsys):
    state = safetensors.torch.load_file(path)
    for name in state if everywhere else ["blocks.1.mlp.fc2.weight"]:
        state[name].flatten()[-1] = value
    safetensors.torch.save_file(state, "bad.safetensors")
    message = refused(
        monkeypatch, capsys, "convert", "bad.safetensors", "out.safetensors", "--to", to, *sets()
    )
    assert "NaN or infinity in" in message
    assert everywhere or "blocks.1.mlp.fc2.weight" in message
    assert not (path.parent / "out.safetensors").exists()


def test_convert_refuses_infinite_logits(path, monkeypatch, capsys):
    """Each weight is finite, but their products overflow."""
    state = safetensors.torch.load_file(path)
    state["head.weight"] = torch.full_like(state["head.weight"], 3e38)
    safetensors.torch.save_file(state, "bad.safetensors")
    message = refused(monkeypatch, capsys, "convert", "bad.safetensors", "out.safetensors", *sets())
    assert "logits" in message
    assert not (path.parent / "out.safetensors").exists()


def test_nan_logits_of_the_other_library(path, monkeypatch):
    def peer(config, state):
        return lambda images: torch.full((len(images), config.classes), float("nan"))

    monkeypatch.setattr(
        "vitrail.weights.conversion.FAMILIES", [replace(TIMM, writer=replace(TIMM.writer, peer=peer))]
    )
    vt.load(path, heads=2).save("ours.safetensors")
    output = run("convert", "ours.safetensors", "out.safetensors", "--to", "timm", code=1)
    assert "nan" in output


def changed(path, **tensors):
    """Replace tensors of a vitrail file."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(safetensors.torch.load_file(path) | tensors, path, metadata)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_verify_names_nan_and_infinity(path, value):
    vt.load(path, heads=2).save("ours.safetensors")
    assert verify("ours.safetensors").holds
    changed("ours.safetensors", **{"head.bias": torch.full((5,), value)})
    output = run("verify", "ours.safetensors", code=1)
    assert "NaN or infinity in head.bias, logits now" in output
    changed("ours.safetensors", **{"golden/logits": torch.full((4, 5), value)})  # inf - inf and inf <= inf
    output = run("verify", "ours.safetensors", code=1)
    assert "logits stored" in output
    assert "The logits do not agree." in output
