"""Pretrained models in the commands: nothing downloads unasked, and what comes with the weights is kept."""

import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import vitrail as vt
from tests.support.hub_server import CARD, COMMAND, run_against, serve_hub
from tests.support.shared_data import shared
from vitrail.training.callbacks import NullCallback
from vitrail.weights.bundle.labels import rehead
from vitrail.weights.readers.hub import _parse_name
from vitrail.weights.readers.pretrained import PRETRAINED

pytestmark = pytest.mark.slow  # real processes

LABELS = ["tench, Tinca tinca", "goldfish, Carassius auratus", "great_white shark"]


@pytest.fixture(scope="module")
def hub():
    with serve_hub() as server:
        yield server


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small model of timm's names with labels, as a repository."""
    from timm.models.vision_transformer import VisionTransformer

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=1, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    config = {"architecture": "x", "num_classes": 3, "label_names": LABELS, "pretrained_cfg": {}}
    return {
        "README.md": CARD.encode(),
        "config.json": json.dumps(config).encode(),
        "model.safetensors": (folder / "model.safetensors").read_bytes(),
    }


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes, of which the model knows one."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in ("goldfish", "newt"):
        (root / name).mkdir()
        for index in range(6):
            Image.fromarray(rng.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(
                root / name / f"{index}.png"
            )
    return root


def test_a_run_from_the_hub_keeps_license_source_and_rows(hub, files, photos, tmp_path):
    commit = hub.add("owner/fish", files)
    train = ["train", str(photos), "--from", "hf:owner/fish", "--epochs", "1", "--out", str(tmp_path / "run")]
    out, said = run_against(hub, tmp_path / "hf", COMMAND, *train)
    size = sum(map(len, files.values())) / 1e6
    assert re.search(rf"Downloading {size:.1f} MB of hf:owner/fish, once, into the cache", said)
    assert "rows of 1 that the file knows by name, the others zero" in " ".join(out.split())
    assert "From scratch" not in out
    card = vt.load(tmp_path / "run" / "best.safetensors").card
    assert card.license == "apache-2.0"
    assert card.source == f"trained on {photos.name}, from hf:owner/fish@{commit}"
    vt.train(out=tmp_path / "run", resume=True, epochs=2, report=False)  # without the hub
    resumed = vt.load(tmp_path / "run" / "last.safetensors").card
    assert (resumed.license, resumed.source) == (card.license, card.source)
    _, said = run_against(hub, tmp_path / "hf", COMMAND, "info", "hf:owner/fish")
    assert said == ""  # it is in the cache


@pytest.mark.parametrize(
    "command",
    [
        ["train", "PHOTOS", "--out", "run", "--from", "hf:owner/no"],
        ["train", "PHOTOS", "--out", "run", "--teacher", "hf:owner/no"],
        ["evaluate", "hf:owner/no", "PHOTOS"],
        ["info", "hf:owner/no"],
        ["serve", "hf:owner/no"],
        pytest.param(["predict", "hf:owner/no", "PHOTOS"], marks=pytest.mark.slow),
        pytest.param(["inspect", "hf:owner/no"], marks=pytest.mark.slow),
        pytest.param(["export", "hf:owner/no", "--to", "onnx"], marks=pytest.mark.slow),
        pytest.param(["convert", "hf:owner/no", "x", "--to", "timm"], marks=pytest.mark.slow),
    ],
    ids=lambda command: " ".join(command[:1] + command[-2:-1]),
)
def test_offline_sends_nothing(hub, photos, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    command = [str(photos) if part == "PHOTOS" else part for part in command]
    before = len(hub.log)
    _, error = run_against(hub, tmp_path / "hf", COMMAND, *command, "--offline", fails=True)
    assert "of hf:owner/no is not in the cache, and nothing is downloaded offline" in " ".join(error.split())
    assert len(hub.log) == before
    assert not (tmp_path / "run").exists()


def test_a_run_from_scratch_on_few_photographs_names_the_other_way(photos, tmp_path):
    said = []

    class Listener(NullCallback):
        def on_message(self, text):
            said.append(text)

    model = dict(width=16, depth=1, heads=1)
    vt.train(
        photos,
        out=tmp_path / "a",
        recipe="small",
        epochs=1,
        model=model,
        size=32,
        report=False,
        callback=Listener(),
    )
    [note] = [text for text in said if text.startswith("From scratch with")]
    assert "from_='hf:facebook/deit-tiny-patch16-224' (downloads 23 MB once" in note


def test_the_listed_models_have_valid_names_and_facts(hub, tmp_path):
    for one in PRETRAINED:
        assert _parse_name(one.name)
        assert 20 < one.megabytes < 100
    out, _ = run_against(hub, tmp_path / "hf", COMMAND, "train", "--pretrained")
    assert all(f"{one.name}\n" in out and one.license in out for one in PRETRAINED)
    assert max(map(len, out.splitlines())) <= 100


# ---- rows of the head ----------------------------------------------------------------------------


def test_rows_are_kept_by_name():
    model = vt.create("mu/4", classes=3)
    torch.nn.init.normal_(model.head.weight)
    new, kept = rehead(model, LABELS, ["newt", "Great white shark", "goldfish"])
    assert kept == 2
    assert torch.equal(new.head.weight[1:], model.head.weight[[2, 1]])
    assert not new.head.weight[0].any()


def test_rows_of_a_real_model_classify_without_training(tmp_path):
    """DeiT-Ti knows ants and bees: with its two rows alone, 147 of these 153 photographs are right."""
    bundle = vt.load(shared("data/weights/deit_tiny_imagenet1k.safetensors"))
    bundle.labels = json.loads(shared("data/imagenet_labels.json").read_text())
    bundle.save(tmp_path / "deit.safetensors")
    with tarfile.open(shared("data/hymenoptera_s160.tar")) as archive:
        archive.extractall(tmp_path, filter="data")
    two = vt.load(tmp_path / "deit.safetensors", classes=["ants", "bees"])
    folders = tmp_path / "hymenoptera_s160" / "val"
    images = [path for name in two.labels for path in sorted((folders / name).iterdir())[:15]]
    found = vt.Predictor(two)(images)
    assert sum(one.label == path.parent.name for one, path in zip(found, images, strict=True)) >= 27


@pytest.mark.parametrize("fields", [{"classes": 0}, {"head": "mlp"}])
def test_other_heads_are_new(fields):
    model = vt.create("mu/4", **{"classes": 3, **fields})
    new, kept = rehead(model, LABELS, ["goldfish", "newt"])
    assert kept == 0
    assert new.head.weight.shape == (2, 32)
    assert not new.head.weight.any()


def test_load_with_names(tmp_path):
    model = vt.create("mu/4", classes=3)
    torch.nn.init.normal_(model.head.weight)
    vt.Bundle(model=model, labels=["ant", "bee", "cat"]).save(tmp_path / "x.safetensors")
    same = vt.load(tmp_path / "x.safetensors", classes=["ant", "bee", "cat"])
    assert torch.equal(same.model.head.weight, model.head.weight)
    other = vt.load(tmp_path / "x.safetensors", classes=["cat", "ant"])
    assert torch.equal(other.model.head.weight, model.head.weight[[2, 0]])
    assert other.labels == ["cat", "ant"]
    assert "rows of 2 that the file knows by name." in other.notes[-1]
    fresh = vt.load(tmp_path / "x.safetensors", classes=["dog", "eel", "fox"])
    assert not fresh.model.head.weight.any()


def test_the_page_lists_the_same_models():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for one in PRETRAINED:
        assert (
            f"| `{one.name}` | {one.megabytes} | {one.license} | {one.pretraining} | {one.advice} |" in page
        )
