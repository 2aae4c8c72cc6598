"""What `vitrail search` finds is of the right class, and `predict --embeddings` agrees with `vitrail embed`."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.command import run_command
from tests.support.digit_clip import DIGITS, FILE, save_scenes
from tests.support.shared_data import shared
from vitrail.predict.index import read_index, unit


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return save_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def index(tmp_path_factory, photos):
    path = tmp_path_factory.mktemp("index") / "index.safetensors"
    run("embed", FILE, photos, "-o", path, cwd=path.parent)
    return path


def run(*arguments, cwd):
    done = run_command(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def class_of(name):
    return Path(name).parent.name


def search(index, query, top):
    return json.loads(run("search", index, query, "--top", top, "--json", cwd=index.parent))


# ---- search -------------------------------------------------------------------------------------


def test_classes_of_what_an_image_finds(index):
    """One query of each class: each hit and its class are those of the nearest vectors."""
    opened = read_index(index)
    classes = [class_of(name) for name in opened.names]
    right = []
    for digit in DIGITS:
        row = classes.index(digit)
        hits = search(index, opened.names[row], 6)
        order = np.argsort(-(opened.embeddings @ opened.embeddings[row]))[:6]
        assert [hit["file"] for hit in hits] == [opened.names[other] for other in order]
        assert [class_of(hit["file"]) for hit in hits] == [classes[other] for other in order]
        assert class_of(hits[0]["file"]) == digit
        right += [class_of(hit["file"]) == digit for hit in hits[1:]]
    assert np.mean(right) > 0.4  # chance is 10 %


def test_classes_of_what_words_find(index):
    right = {
        word: [class_of(hit["file"]) == word for hit in search(index, f"a {word}", 5)] for word in DIGITS
    }
    assert np.mean([one for found in right.values() for one in found]) > 0.6
    assert sum(found[0] for found in right.values()) >= 7  # the best hit shows what was asked for


def test_ants_find_ants_and_bees_find_bees(tmp_path):
    """A real ImageNet model and photographs: each of five hits is of the query's class."""
    weights = shared("data/weights/deit_tiny_imagenet1k.safetensors")
    with tarfile.open(shared("data/hymenoptera_s160.tar")) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "hymenoptera_s160" / "val"
    run("embed", weights, folder, "-o", tmp_path / "index.safetensors", cwd=tmp_path)
    for query in ("ants/10308379_1b6c72e180.jpg", "bees/abeja.jpg"):
        hits = search(tmp_path / "index.safetensors", folder / query, 6)
        assert hits[0]["file"] == str(folder / query)
        assert [class_of(hit["file"]) for hit in hits] == [class_of(query)] * 6
    rows = read_index(tmp_path / "index.safetensors")
    classes = np.array([class_of(name) for name in rows.names])
    cosines = rows.embeddings @ rows.embeddings.T - 2 * np.eye(len(classes))
    assert np.mean(classes[np.argsort(-cosines)[:, :5]] == classes[:, None]) > 0.92  # 94.5 % were measured


# ---- predict --embeddings -----------------------------------------------------------------------


def test_embeddings_of_predict_and_of_embed(photos, tmp_path):
    """A classifier: the same vectors in the same order; embed scales them to length 1."""
    model = tmp_path / "digits.safetensors"
    vt.Bundle(model=vt.create("mu/4", size=24, channels=1, classes=2, init="timm")).save(model)
    table = run("predict", model, photos, "--embeddings", "p.npy", "--format", "jsonl", cwd=tmp_path)
    run("embed", model, photos, "-o", "e.npy", cwd=tmp_path)
    plain, scaled = np.load(tmp_path / "p.npy"), np.load(tmp_path / "e.npy")
    assert plain.shape == scaled.shape == (120, 32)
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).max() > 0.1
    np.testing.assert_allclose(unit(plain), scaled, atol=1e-6)
    names = [json.loads(line)["file"] for line in table.splitlines()]
    assert names == json.loads((tmp_path / "e.json").read_text())["names"]


def test_embeddings_of_a_model_with_words(photos, tmp_path):
    """A CLIP: predict writes pooled vectors; the projection of the model makes those of embed of them."""
    rows = run("predict", FILE, photos, "--embeddings", "p.npy", "--format", "jsonl", cwd=tmp_path)
    row = json.loads(rows.splitlines()[0])
    assert row == {"file": str(sorted(photos.rglob("*.png"))[0]), "error": None}  # it has no classes
    run("embed", FILE, photos, "-o", "e.npy", cwd=tmp_path)
    plain, scaled = np.load(tmp_path / "p.npy"), np.load(tmp_path / "e.npy")
    with torch.no_grad():
        projected = vt.load(FILE).model.head(torch.from_numpy(plain)).numpy()
    np.testing.assert_allclose(unit(projected), scaled, atol=1e-5)


@pytest.mark.parametrize("arguments", [["--embeddings", "e.npy", "--top", 3], ["--out", "parts/"], []])
def test_numbers_of_an_embedding_are_no_classes(photos, tmp_path, arguments):
    done = run_command("predict", FILE, photos, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no classes of its own; name some with --labels cat,dog" in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())
