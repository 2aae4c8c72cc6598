"""Predictions in parts: every image once after any interruption, and never parts of two models or lists."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from tests.support.shard_files import shard_folder
from tests.support.tiny_runs import file_hashes, write_folder
from vitrail.cli import app
from vitrail.predict import Predictor
from vitrail.predict.index import read_index
from vitrail.predict.parts import ImageList, PartOptions, Parts
from vitrail.predict.ray_engine import _actors


def save_model(path, seed):
    torch.manual_seed(seed)
    config = vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=8, channels=3, classes=3)
    vt.Bundle(model=add_noise(vt.ViT(config)), labels=["ant", "bee", "cat"]).save(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "m.safetensors", 0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("data") / "photos", each=9)
    (folder / "bee" / "broken.jpg").write_bytes(b"\xff\xd8 not an image")
    return folder


def invoke(*words):
    done = CliRunner().invoke(app, [*map(str, words)])
    return done.exit_code, f"{done.exception or ''} {done.output}"


def predict(model, photos, out, *more):
    return invoke(
        "predict", model, photos, "--out", f"{out}/", "--part-size", 5, "--workers", 0, "--quiet", *more
    )


def rows_of(folder):
    return [row for part in sorted(folder.glob("*.csv")) for row in rows_in(part)]


def rows_in(file):
    return list(csv.DictReader(file.read_text().splitlines()))


def test_the_union_of_parts_is_the_prediction(model, photos, tmp_path):
    out = tmp_path / "parts"
    code, text = predict(model, photos, out)
    assert code == 1
    assert "28 images in 6 parts" in text
    assert "1 images have no result" in text
    invoke("predict", model, photos, "--out", tmp_path / "one.csv", "--format", "csv", "--quiet")
    assert rows_of(out) == rows_in(tmp_path / "one.csv")
    errors = [json.loads(line) for file in out.glob("*.errors") for line in file.read_text().splitlines()]
    assert [Path(error["file"]).name for error in errors] == ["broken.jpg"]
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    code, text = predict(model, photos, out)
    assert (code, "6 of them from before" in text) == (1, True)
    assert before == {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    (out / "part-000003.csv").unlink()
    (out / ".0123456789abcdef.part").write_text("left by a kill")
    predict(model, photos, out)
    assert len(rows_of(out)) == 28
    assert set(os.listdir(out)) == set(before)


def test_jobs_of_an_array_share_the_parts(model, photos, tmp_path):
    for job in (3, 1, 2, 4):
        predict(model, photos, tmp_path / "parts", "--part", f"{job}/4")
        assert all(Path(row["file"]).exists() for row in rows_of(tmp_path / "parts"))
    names = [row["file"] for row in rows_of(tmp_path / "parts")]
    assert len(names) == len(set(names)) == 28


def test_another_model_list_or_format_is_refused(model, photos, tmp_path):
    out = tmp_path / "parts"
    predict(model, photos, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    other = save_model(tmp_path / "other.safetensors", 1)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "one.txt").write_text("mine")
    (tmp_path / "x" / "file").write_text("mine")
    for words, message in (
        ([other, photos], "the model or its options have changed"),
        ([model, photos / "ant"], "the list of images has changed"),
        ([model, photos, "--format", "jsonl"], "another format"),
        ([model, photos, "--top", "2"], "another number of classes"),
        ([model, photos, "--size", "16"], "the model or its options have changed"),
    ):
        code, text = predict(words[0], words[1], out, *words[2:])
        assert (code, message in text) == (1, True), text
    code, text = invoke("predict", model, photos, "--out", f"{out}/", "--part-size", 6)
    assert "another part size" in text
    assert before == {file.name: file.read_bytes() for file in out.iterdir()}
    assert "has no manifest.json" in predict(model, photos, tmp_path / "x")[1]
    assert (
        "is a file" in invoke("predict", model, photos, "--out", tmp_path / "x" / "file", "--part", "1/2")[1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "parquet"], "name a folder for them with --out"),
        (["--out", "p/", "--part", "0/4"], "counted from 1/16"),
        (["--out", "p/", "--part", "5/4"], "counted from 1/16"),
        (["--out", "p/", "--part", "one"], "counted from 1/16"),
        (["--out", "p/", "--part", "١/٤"], "in the digits 0 to 9, not '١/٤'"),
        (
            ["--out", "q.csv", "--part", "1/2"],
            "--part writes a folder of parts, and --out q.csv looks like a file",
        ),
        (["--out", "p/", "--engine", "spark"], "unknown engine 'spark'"),
        (["--out", "p/", "--format", "xlsx"], "unknown format 'xlsx' for parts"),
        (["--out", "p/", "--explain", "e"], "--explain is not for a folder of parts"),
        (["--out", "p/", "-"], "fixed list of images, not stdin"),
    ],
)
def test_wrong_use(model, photos, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, text = invoke("predict", model, photos, *words)
    assert (bool(code), message in text) == (True, True), text
    assert not os.listdir(tmp_path)


def test_parquet_and_npy(model, photos, tmp_path):
    import pyarrow.parquet as pq

    predict(model, photos, tmp_path / "csv", "--top", 2)
    predict(model, photos, tmp_path / "parquet", "--format", "parquet", "--top", 2)
    predict(model, photos, tmp_path / "npy", "--format", "npy")
    expected = rows_of(tmp_path / "csv")
    found = [
        row
        for part in sorted((tmp_path / "parquet").glob("*.parquet"))
        for row in pq.read_table(part).to_pylist()
    ]
    as_text = [{name: "" if value is None else str(value) for name, value in row.items()} for row in found]
    assert as_text == expected
    assert isinstance(found[0]["score"], float)
    scores = np.concatenate([np.load(part) for part in sorted((tmp_path / "npy").glob("*.npy"))])
    names = [
        name
        for part in sorted((tmp_path / "npy").glob("part*.json"))
        for name in json.loads(part.read_text())
    ]
    assert names == [row["file"] for row in expected]
    best = np.array([float(row["score"] or "nan") for row in expected])
    np.testing.assert_allclose(scores.max(axis=1), best, rtol=1e-6)


def test_embed_by_the_same_engine(model, photos, tmp_path):
    import pyarrow.parquet as pq

    invoke("embed", model, photos, "-o", tmp_path / "one.safetensors", "--quiet")
    one = read_index(tmp_path / "one.safetensors")
    for form in ("npy", "parquet"):
        code, _ = invoke(
            "embed", model, photos, "-o", f"{tmp_path / form}/", "--format", form, "--part-size", 9
        )
        assert code == 1  # for the image that cannot be read
    vectors = np.concatenate([np.load(part) for part in sorted((tmp_path / "npy").glob("*.npy"))])
    table = pq.read_table(tmp_path / "parquet" / "part-000001.parquet").to_pylist()
    np.testing.assert_array_equal(np.array(table[0]["embedding"], np.float32), vectors[9])
    kept = vectors[~np.isnan(vectors[:, 0])]
    np.testing.assert_allclose(kept, one.embeddings, atol=1e-6)
    assert len(vectors) == len(kept) + 1
    assert (
        "of another command (vitrail predict or vitrail embed)"
        in predict(model, photos, tmp_path / "npy", "--format", "npy")[1]
    )


def test_shards_are_predicted_as_their_files(model, photos, tmp_path):
    shards = shard_folder(photos, tmp_path / "shards")
    assert predict(model, shards, tmp_path / "a")[0] == 1
    predict(model, photos, tmp_path / "b")
    one, other = rows_of(tmp_path / "a"), rows_of(tmp_path / "b")
    assert [(row["label"], row["score"]) for row in one] == [(row["label"], row["score"]) for row in other]
    assert one[0]["file"] == "pets-000.tar/ant/00.jpg"
    workers = Predictor(model, workers=2)
    parts = Parts(tmp_path / "c", ImageList([str(shards)]), workers, PartOptions("predict", "csv", 1, 5))
    assert parts.write_missing().failed == 1
    assert rows_of(tmp_path / "c") == one


@pytest.mark.parametrize(
    ("cluster", "actors"),
    [
        ({"CPU": 2.0}, ({"num_cpus": 1}, 1)),  # two actors would wait for each other for ever
        ({"CPU": 1.0}, ({"num_cpus": 1}, 1)),
        ({"CPU": 16.0}, ({"num_cpus": 1}, 15)),
        ({"CPU": 2.0, "GPU": 4.0}, ({"num_gpus": 1}, 4)),
    ],
)
def test_one_core_is_left_for_ray(cluster, actors):
    assert _actors(cluster) == actors


@pytest.mark.slow  # half a minute: Ray starts its processes twice
def test_ray_writes_the_same_parts(model, photos, tmp_path):
    """Half of the parts, then the rest: an actor on two cores, because Ray needs one itself. A batch is a part,
    because scores are rounded by the size of their batch, and an actor's batches do not cross parts."""
    ray = [tmp_path / "ray", "--batch", 5, "--engine", "ray"]
    predict(model, photos, tmp_path / "local", "--batch", 5)
    code, text = predict(model, photos, *ray, "--part", "1/2")
    assert (code, "3 parts" in text) == (0, True), text  # the broken image is in the other half
    code, text = predict(model, photos, *ray)
    assert (code, "3 of them from before" in text) == (1, True), text
    assert rows_of(tmp_path / "ray") == rows_of(tmp_path / "local")
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "npy"])
def test_killed_twenty_times_every_image_is_there_once(model, tmp_path, form):
    """With -9, while parts are written; of npy a part has two files."""
    photos = write_folder(tmp_path / "photos", each=40)
    words = ["-m", "tests.support.killed_predictions", model, photos, tmp_path, form, "20"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["killed"] == 20
    out, whole = tmp_path / "parts", tmp_path / "all"
    assert file_hashes(out) == file_hashes(whole)  # nothing else is left, either
    assert len(list(out.glob(f"*.{form}"))) == 30
