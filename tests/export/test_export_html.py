"""`vitrail export --to html` as a user runs it, and which models it refuses."""

import base64
import json
import os
import re
import sys

import pytest
import torch
from PIL import Image

import vitrail as vt
from vitrail.base.errors import InputError
from vitrail.cli import main
from vitrail.exporters import html
from vitrail.views.sample import SAMPLE_FILE
from vitrail.weights.bundle.bundle import Bundle

SMALL = dict(width=8, depth=1, heads=2, patch=4, size=8, channels=1, classes=3)


@pytest.fixture
def export(tmp_path, monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vitrail", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


def embedded_model(text):
    """The JSON that describes the model in the page."""
    return json.loads(re.search(r'id="model">(.*?)</script>', text, re.DOTALL)[1])


def test_the_command_writes_one_self_contained_file(export, tmp_path):
    assert export(SAMPLE_FILE, "--to", "html") == (
        0,
        "Saved classroom.html (0.4 MB); open it in a browser.\n",
        "",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["classroom.html"]
    text = (tmp_path / "classroom.html").read_text()
    assert embedded_model(text)["parameters"] == 105_098
    assert not re.search(r'(?:src|href)="(?!data:|https://arxiv\.org/abs/2010\.11929")', text)


def test_examples_are_the_users_images(export, tmp_path):
    (tmp_path / "mine").mkdir()
    for n in range(12):
        Image.new("L", (40, 40), 20 * n).save(tmp_path / "mine" / f"gray {n:02}.png")
    assert export(SAMPLE_FILE, "--to", "html", "--examples", "mine")[0] == 0
    examples = embedded_model((tmp_path / "classroom.html").read_text())["examples"]
    assert len(examples) == 10
    assert examples[0]["name"] == "gray 00.png"
    assert set(base64.b64decode(examples[0]["pixels"])) == {0}
    assert len(base64.b64decode(examples[-1]["pixels"])) == 28 * 28


def test_an_existing_file_is_not_overwritten(export, tmp_path):
    (tmp_path / "mine.html").write_text("mine")
    code, out, err = export(SAMPLE_FILE, "--to", "html", "--out", "mine.html")
    assert (code, out) == (2, "")
    assert re.match(r"vitrail: mine\.html .*already", err)
    assert "overwrite" in err
    assert (tmp_path / "mine.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "tflite"], "tflite.*onnx, torch-export, html"),
        (["--to", "html", "--out", "page.txt"], "must end in .html.*page.txt"),
        (["--to", "html", "--examples", "nowhere"], "nowhere does not exist"),
        (["--to", "onnx", "--examples", "."], "--examples is not for --to onnx"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, export, tmp_path):
    code, out, err = export(SAMPLE_FILE, *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert not [*tmp_path.iterdir()]


REFUSED = [
    dict(position="rotary", width=16),
    dict(position="pairwise"),
    dict(position_at="every"),
    dict(embedding="mlp"),
    dict(embedding_norm="after"),
    dict(norm_pre=True),
    dict(block="post-norm"),
    dict(norm="rms"),
    dict(qk_norm=True),
    dict(activation="silu"),
    dict(mlp="gated"),
    dict(mlp_hidden=2),
    dict(pool="attention"),
    dict(head="tanh"),
    dict(channels=2),
]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: next(iter(change)))
def test_unsupported_config_values_are_refused_by_name(change, tmp_path):
    field, value = next(iter(change.items()))
    bundle = Bundle(model=vt.ViT(vt.ViTConfig(**{**SMALL, **change})))
    with pytest.raises(InputError, match=rf"supports models with {field} .*not {field}={value!r}"):
        html.write_classroom(bundle, tmp_path / "page.html")
    assert not [*tmp_path.iterdir()]


def test_other_inputs_are_refused(tmp_path):
    text = vt.ViTConfig(width=8, depth=1, heads=2, input="text", size=6, patch=1, vocabulary=9, classes=3)
    with pytest.raises(InputError, match=r"input 'image', not input='text'"):
        html.write_classroom(Bundle(model=vt.ViT(text)), tmp_path / "page.html")


def test_every_config_field_is_supported_exported_or_irrelevant():
    """A new field of the config must be added to one of these sets."""
    shape = {"width", "depth", "heads", "head_width", "mlp_width", "patch", "size", "registers", "classes"}
    exported = {"embedding_bias", "class_token", "distillation_token", "rows", "eps", "scale", "qkv_bias"}
    exported |= {"layer_scale", "pool_norm", "head_bias", "remainder"}
    refused = {"vocabulary", "head_hidden"}  # fields of refused inputs, heads and pools
    refused |= {"pool_tokens", "pool_heads", "pool_mlp_width"}
    training = {"dropout", "attention_dropout", "patch_dropout", "drop_path", "init", "position_sigma"}
    parts = [set(html.SUPPORTED), shape, exported, refused, training]
    assert set.union(*parts) == set(vt.ViTConfig.__dataclass_fields__)
    assert sum(map(len, parts)) == len(set.union(*parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(classes=0), "head.*classes=0"),
        (dict(size=132), "at most 1,024 tokens.* 1,090 .*132x132.*4x4"),
        (dict(width=512, depth=2), r"at most 6,000,000 parameters.* 6,3\d\d,\d\d\d"),
    ],
)
def test_models_without_a_head_or_too_large_are_refused(change, message, tmp_path):
    bundle = Bundle(model=vt.ViT(vt.ViTConfig(**{**SMALL, **change})))
    with pytest.raises(InputError, match=message):
        html.write_classroom(bundle, tmp_path / "page.html")


def test_weights_with_nan_are_refused(tmp_path):
    model = vt.ViT(vt.ViTConfig(**SMALL))
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="infinite or NaN"):
        html.write_classroom(Bundle(model=model), tmp_path / "page.html")


def test_a_large_page_is_written_with_a_remark_on_its_size(tmp_path):
    model = vt.ViT(vt.ViTConfig(**{**SMALL, "width": 384, "depth": 2}))
    remarks = html.write_classroom(Bundle(model=model), tmp_path / "page.html")
    size = (tmp_path / "page.html").stat().st_size / 1e6
    assert len(remarks) == 1
    assert f"{size:.0f} MB" in remarks[0]


def test_without_scikit_learn_the_page_has_no_examples(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    remarks = html.write_classroom(vt.load(SAMPLE_FILE), tmp_path / "page.html")
    assert len(remarks) == 1
    assert re.match("The page has no example images.*sklearn", remarks[0])
    assert embedded_model((tmp_path / "page.html").read_text())["examples"] == []


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        html.write_classroom(Bundle(model=vt.ViT(vt.ViTConfig(**SMALL))), tmp_path / "page.html")
    assert not [*tmp_path.iterdir()]
