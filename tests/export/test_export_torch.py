"""`vitrail export --to torch-export`: a .pt2 file with the outputs of the model."""

import json

import pytest
import torch
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.exporters.torch_export import write_torch
from vitrail.fast.onnx_graph import quiet


@pytest.fixture
def bundle():
    config = vt.ViTConfig(width=32, depth=2, heads=2, patch=8, size=(16, 24), classes=3, registers=2)
    card = vt.Card(metrics={"temperature": 2.0})
    return vt.Bundle(model=add_noise(vt.ViT(config)), labels=["ant", "bee", "cat"], card=card)


def test_a_program_with_dynamic_batch_and_size(bundle, tmp_path):
    proof = write_torch(bundle, tmp_path / "x.pt2", dynamic=("batch", "size"))
    assert not proof.failed
    assert len(proof.checks) == 6
    files = {"vitrail": "", "vitrail.export": ""}
    with quiet():
        program = torch.export.load(tmp_path / "x.pt2", extra_files=files).module()
    metadata = {name: json.loads(text) for name, text in files.items()}
    assert metadata["vitrail"]["labels"] == ["ant", "bee", "cat"]
    assert metadata["vitrail"]["card"]["metrics"] == {"temperature": 2.0}
    assert metadata["vitrail.export"] == {"takes": "images", "any_size": True}
    for size in [(16, 24), (32, 16)]:
        images = torch.randn(3, 3, *size)
        with torch.no_grad():
            logits, embedding = program(images)
            expected = vt.surgery.resize(bundle.model, size)
            assert (logits - expected(images)).abs().max() < 1e-4
            assert (embedding - expected.encode(images).pooled).abs().max() < 1e-4
    assert b"site-packages" not in (tmp_path / "x.pt2").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.pt2", "x.pt2.proof.json"]


@pytest.mark.slow
def test_a_program_that_resizes(bundle, tmp_path):
    proof = write_torch(bundle, tmp_path / "x.pt2", with_preprocess=True)
    assert len(proof.checks) == 7
    assert not any(check.different_pixels for check in proof.checks)


def test_the_device_is_for_programs(bundle, tmp_path):
    bundle.save(tmp_path / "x.safetensors")
    model = str(tmp_path / "x.safetensors")
    for to, words in (("onnx", "ONNX Runtime chooses"), ("html", "a browser chooses")):
        done = CliRunner().invoke(app, ["export", model, "--to", to, "--device", "cuda"])
        assert words in str(done.exception)
    if not torch.cuda.is_available():
        done = CliRunner().invoke(app, ["export", model, "--to", "torch-export", "--device", "cuda"])
        assert "cuda" in str(done.exception)
    bundle.model.to("meta")
    with pytest.raises(InputError, match="the program is for meta"):
        write_torch(bundle, tmp_path / "y.pt2", with_preprocess=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a program for a GPU needs one")
def test_a_program_for_a_gpu(bundle, tmp_path):
    bundle.model.to("cuda")
    assert not write_torch(bundle, tmp_path / "x.pt2").failed
    with quiet():
        program = torch.export.load(tmp_path / "x.pt2").module()
    logits, _ = program(torch.zeros(2, 3, 16, 24, device="cuda"))
    assert logits.device.type == "cuda"
