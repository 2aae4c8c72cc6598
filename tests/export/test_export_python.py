"""`vt.export`: the command's formats from Python, by the ending of the file."""

import re

import pytest

import vitrail as vt
from tests.support.models import add_noise

FIELDS = dict(width=12, depth=1, heads=3, patch=4, size=8, channels=3, classes=3)


@pytest.fixture(scope="module")
def bundle():
    return vt.Bundle(model=add_noise(vt.ViT(vt.ViTConfig(**FIELDS))), labels=["ant", "bee", "cat"])


def test_onnx(bundle, tmp_path):
    exported = vt.export(bundle, tmp_path / "pets.onnx")
    assert exported.path == tmp_path / "pets.onnx"
    assert not exported.proof.failed
    assert (tmp_path / "pets.onnx.proof.json").is_file()
    assert re.search(
        r"<Exported file: \S+pets.onnx; size: .* MB; largest difference: \S+ \(limit", repr(exported)
    )
    assert vt.Predictor(exported.path).engine.labels == ["ant", "bee", "cat"]


def test_a_page_and_a_file_on_disk(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    exported = vt.export(tmp_path / "pets.safetensors", tmp_path / "page.htm", to="html")
    assert "<html" in exported.path.read_text()
    assert exported.proof is None
    assert exported.config == bundle.model.config


@pytest.mark.parametrize(
    ("file", "how", "message"),
    [
        ("x.zip", {}, r"must end in \.onnx, \.pt2 or \.html, .* name the format with to="),
        ("x.onnx", {"to": "tflite"}, r"Unknown format 'tflite' for to=\. Choose from: onnx, torch-export"),
        ("x.onnx", {"dynamic": "width"}, r"dynamic= takes batch and size, not 'width'"),
        ("x.onnx", {"examples": ["a.png"]}, r"examples= is not for to='onnx'"),
        ("x.html", {"with_preprocess": True}, r"with_preprocess= is not for to='html'"),
        ("x.html", {"examples": ["none.png"]}, r"none\.png does not exist"),
        ("x.onnx", {"device": "cuda"}, r"device= is for to='torch-export': ONNX Runtime chooses"),
        ("x.onnx", {"heads": 4}, r"Bundle is loaded already and takes no options \(heads\)"),
        ("none/x.onnx", {}, "There is no folder"),
    ],
)
def test_mistakes(bundle, tmp_path, file, how, message):
    with pytest.raises(vt.InputError, match=message):
        vt.export(bundle, tmp_path / file, **how)
    assert list(tmp_path.iterdir()) == []


def test_the_name_stays_a_function(bundle):
    """A module of that name would replace it as soon as something imports it."""
    import vitrail.exporters.html  # noqa: F401

    assert callable(vt.export)
    assert vt.export.__module__ == "vitrail.exporters.api"
