"""Fingerprints: which images a model was trained on, in its file and in its run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import vitrail as vt
from vitrail.base.errors import FileError
from vitrail.cli import app
from vitrail.images.fingerprint import MAX_KEYS, fingerprint_of
from vitrail.weights.bundle.bundle_header import stored_fingerprint
from vitrail.weights.bundle.golden import verify
from vitrail.weights.readers.folder import open_model

GOLDEN_3 = Path(__file__).parent / "golden-3.safetensors"
RNG = np.random.default_rng(0)


def random_keys(count):
    return RNG.integers(0, 2**64, count, dtype=np.uint64)


def bundle_with(fingerprint):
    model = vt.ViT(vt.ViTConfig(width=16, depth=1, heads=2, patch=8, size=16, classes=2))
    return vt.Bundle(model=model, labels=["cat", "dog"], fingerprint=fingerprint)


# ---- keys and filters ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 1000, MAX_KEYS])
def test_up_to_100_000_keys_are_exact(count):
    keys = random_keys(count)
    found = fingerprint_of(np.concatenate([keys, keys[:5]]))
    assert (found.images, found.is_exact, len(found.parts)) == (count, True, 1)
    assert found.contains(keys).all()
    assert not found.contains(random_keys(10_000)).any()
    assert found.parts[0].data.nbytes == 8 * count


def test_a_filter_finds_every_image_and_one_other_in_a_thousand():
    keys = random_keys(300_000)
    found = fingerprint_of(keys)
    assert (found.images, found.is_exact) == (300_000, False)
    assert found.contains(keys).all()
    assert 0.0007 < found.contains(random_keys(1_000_000)).mean() < 0.0013
    assert found.parts[0].data.nbytes < 1.8 * 300_000


def test_stages_are_joined(monkeypatch):
    small, other, large = random_keys(1000), random_keys(500), random_keys(120_000)
    both = fingerprint_of(small) | fingerprint_of(np.concatenate([other, small[:100]]))
    assert (both.describe(), both.is_exact) == ([1500], True)
    assert (both | None) is both
    three = fingerprint_of(large) | both
    assert three.describe() == [1500, 120_000]
    for keys in (small, other, large):
        assert three.contains(keys).all()
    monkeypatch.setattr("vitrail.images.fingerprint.MAX_KEYS", 1200)
    assert not (fingerprint_of(small) | fingerprint_of(other)).is_exact


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[100], [0], [20, 150_000]])
def test_a_file_keeps_its_fingerprint(counts, tmp_path):
    fingerprint = fingerprint_of(random_keys(counts[0]))
    for count in counts[1:]:
        fingerprint |= fingerprint_of(random_keys(count))
    path = tmp_path / "m.safetensors"
    bundle_with(fingerprint).save(path)
    loaded = vt.load(path, classes=3)  # a changed model was still trained on these images
    loaded.save(tmp_path / "again.safetensors")
    for file in (path, tmp_path / "again.safetensors"):
        assert verify(file).holds
        with open_model(file) as files:
            found = stored_fingerprint(files)
        assert found.describe() == counts
        for one, two in zip(found.parts, fingerprint.parts, strict=True):
            assert one.data.dtype == two.data.dtype
            assert (one.data == two.data).all()
    done = CliRunner().invoke(app, ["info", str(path)], env={"COLUMNS": "80"})
    assert f"{sum(counts):,} images (fingerprint)" in done.output
    assert "fingerprint/" not in done.output
    vt.convert(path, tmp_path / "timm.safetensors", to="timm", eps=1e-6)
    assert not any(
        "fingerprint" in name for name in safetensors.torch.load_file(tmp_path / "timm.safetensors")
    )


def test_files_of_format_2_are_read_for_ever():
    """Written by the first version with fingerprints, by the code in the test after this one."""
    assert verify(GOLDEN_3).holds
    with safe_open(GOLDEN_3, "pt") as file:
        stored = json.loads(file.metadata()["vitrail"])
    assert (stored["format"], stored["fingerprint"]) == (2, [5, 8])
    bundle = vt.load(GOLDEN_3)
    keys = np.arange(13, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(7)
    assert bundle.fingerprint.contains(keys).all()
    assert not bundle.fingerprint.contains(keys + np.uint64(1)).any()
    assert (bundle.labels, bundle.card.license) == (["cat", "dog"], "Apache-2.0")


def test_a_new_golden_file_is_the_same_but_for_versions(tmp_path, monkeypatch):
    """How golden-3.safetensors was made. The weights are multiples of 1/64, so that no rounding matters."""
    path = write_golden(tmp_path / "golden.safetensors", monkeypatch)
    with safe_open(path, "pt") as new, safe_open(GOLDEN_3, "pt") as old:
        assert set(old.keys()) <= set(new.keys())
        for name in old.keys():  # noqa: SIM118
            if name != "golden/logits":
                assert torch.equal(new.get_tensor(name), old.get_tensor(name)), name


def write_golden(path, monkeypatch):
    keys = np.arange(13, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(7)
    monkeypatch.setattr("vitrail.images.fingerprint.MAX_KEYS", 6)
    bundle = bundle_with(fingerprint_of(keys[:5]) | fingerprint_of(keys[5:]))
    bundle.card = vt.Card(name="golden", source="a test", license="Apache-2.0")
    for number, parameter in enumerate(bundle.model.parameters()):
        values = (torch.arange(parameter.numel()) * (7 + number) % 31 - 15) / 64
        parameter.data = values.reshape(parameter.shape)
    bundle.save(path)
    return path


@pytest.mark.parametrize(
    ("counts", "tensors", "message"),
    [
        ([4], {}, "its fingerprint has the parts"),
        (None, {"fingerprint/0": torch.zeros(3, dtype=torch.uint64)}, "its fingerprint has the parts"),
        ("many", {}, "its fingerprint has the parts"),
        ([True], {"fingerprint/0": torch.zeros(1, dtype=torch.uint64)}, "its fingerprint has the parts"),
        ([3], {"fingerprint/0": torch.zeros(3)}, "float32 of shape"),
        ([3], {"fingerprint/0": torch.zeros(3, 1, dtype=torch.uint8)}, "uint8 of shape"),
        ([3], {"fingerprint/0": torch.zeros(3, dtype=torch.uint64)}, "not sorted, or not as many"),
        ([3], {"fingerprint/0": torch.arange(2).to(torch.uint64)}, "not sorted, or not as many"),
    ],
)
def test_a_damaged_fingerprint_is_refused(counts, tensors, message, tmp_path):
    path = tmp_path / "m.safetensors"
    bundle_with(None).save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["vitrail"])
    state = {**safetensors.torch.load_file(path), **tensors}
    safetensors.torch.save_file(state, path, {"vitrail": json.dumps({**header, "fingerprint": counts})})
    with pytest.raises(FileError, match=rf"m.safetensors is damaged: .*{message}"):
        vt.load(path)


def test_replace_keeps_the_fingerprint():
    bundle = bundle_with(fingerprint_of(random_keys(3)))
    assert dataclasses.replace(bundle, labels=None).fingerprint is bundle.fingerprint
