"""`vitrail embed` and `vitrail search`: exact search by image and by words, on real digit scenes."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

import vitrail as vt
from tests.support.digit_clip import FILE, save_scenes
from vitrail.base.errors import FileError, InputError
from vitrail.cli import app
from vitrail.predict.index import nearest, read_index, unit


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return save_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def index(tmp_path_factory, photos):
    path = tmp_path_factory.mktemp("index") / "index.safetensors"
    command("embed", FILE, photos, "-o", path)
    return path


def command(*arguments, code=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result


def refused(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert isinstance(result.exception, vt.VitrailError), result.output
    return str(result.exception)


def faiss_of_numpy(queries, rows, top, metric):
    """`faiss.knn`, as its documentation describes it."""
    assert metric == "inner product"
    scores = queries @ rows.T
    found = np.argsort(-scores, axis=1)[:, :top]
    return np.take_along_axis(scores, found, 1), found.astype(np.int64)


@pytest.mark.parametrize("package", ["real", "described"])
def test_many_rows_are_searched_by_faiss(package, monkeypatch):
    rng = np.random.default_rng(0)
    rows, queries = (unit(rng.normal(size=(count, 8))) for count in (300, 3))
    expected = nearest(queries, rows, 5)
    called = []
    if package == "real":
        faiss = pytest.importorskip("faiss")
    else:
        faiss = SimpleNamespace(knn=faiss_of_numpy, METRIC_INNER_PRODUCT="inner product")
    knn = faiss.knn
    monkeypatch.setattr(faiss, "knn", lambda *args, **how: called.append(args) or knn(*args, **how))
    monkeypatch.setitem(sys.modules, "faiss", faiss)
    assert nearest(queries, rows, 5)[1].tolist() == expected[1].tolist()
    assert not called  # few rows
    monkeypatch.setattr("vitrail.predict.index._MANY", 300)
    scores, found = nearest(queries, rows, 5)
    assert len(called) == 1
    assert found.tolist() == expected[1].tolist()
    np.testing.assert_allclose(scores, expected[0], atol=1e-6)
    monkeypatch.setitem(sys.modules, "faiss", None)  # not installed
    assert nearest(queries, rows, 5)[1].tolist() == expected[1].tolist()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 50), st.sampled_from([1, 7, 1 << 24]))
def test_the_search_is_exact(rows, queries, top, block):
    rng = np.random.default_rng(rows * 1000 + queries * 100 + top)
    data, asked = (unit(rng.normal(size=(count, 6))) for count in (rows, queries))
    import vitrail.predict.index as module

    before, module._BLOCK = module._BLOCK, block
    try:
        scores, found = nearest(asked, data, top)
    finally:
        module._BLOCK = before
    expected = -np.sort(-(asked @ data.T), axis=1)[:, :top]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(asked @ data.T, found, 1), expected, atol=1e-6)


def test_an_image_finds_itself_and_its_kind(index, photos):
    query = sorted((photos / "one").glob("*.png"))[0]
    hits = json.loads(command("search", index, query, "--top", 6, "--json").stdout)
    assert hits[0]["file"] == str(query)
    assert hits[0]["score"] == pytest.approx(1, abs=1e-5)
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)


def test_words_find_images(index):
    """Of the ten best for each word, most show it; chance is 10 %."""
    right = [
        hit["file"].split("/")[-2] == word
        for word in ("zero", "two", "four", "seven")
        for hit in json.loads(command("search", index, f"a {word}", "--top", 5, "--json").stdout)
    ]
    assert np.mean(right) > 0.5


def test_the_table_and_the_page(index, photos, tmp_path):
    (tmp_path / "<b>.png").write_bytes(sorted((photos / "two").glob("*.png"))[0].read_bytes())
    output = command(
        "search", index, tmp_path / "<b>.png", "--top", 3, "--html", tmp_path / "page.html"
    ).output
    assert output.splitlines()[0] == "score   file"
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png") == 4  # the query and three images
    assert "&lt;b&gt;.png" in page
    assert "<b>.png" not in page
    assert "already exists" in refused("search", index, "a two", "--html", tmp_path / "page.html")


def test_an_image_that_is_gone_stays_in_the_list(photos, tmp_path):
    for name in ("a", "b"):
        Image.new("L", (24, 24), 80 if name == "a" else 200).save(tmp_path / f"{name}.png")
    command("embed", FILE, tmp_path / "a.png", tmp_path / "b.png", "-o", tmp_path / "index.safetensors")
    (tmp_path / "b.png").unlink()
    page = tmp_path / "page.html"
    command("search", tmp_path / "index.safetensors", tmp_path / "a.png", "--html", page)
    assert "cannot be read any more" in page.read_text()


def test_bad_images_are_listed_and_skipped(tmp_path, photos):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    good = sorted((photos / "one").glob("*.png"))[0]
    result = command("embed", FILE, tmp_path / "bad.png", good, "-o", tmp_path / "i.safetensors", code=1)
    assert result.stderr.count("bad.png") == 1
    assert "1 image could not be read and is not in the index." in result.stderr
    assert result.stdout.startswith("1 image, embeddings of ")
    assert read_index(tmp_path / "i.safetensors").names == [str(good)]
    assert "None of the images" in refused(
        "embed", FILE, tmp_path / "bad.png", "-o", tmp_path / "j.safetensors"
    )
    assert not (tmp_path / "j.safetensors").exists()


def test_a_numpy_file_with_names(tmp_path, photos):
    command("embed", FILE, photos / "one", "-o", tmp_path / "i.npy")
    rows, about = np.load(tmp_path / "i.npy"), json.loads((tmp_path / "i.json").read_text())
    assert len(about["names"]) == len(rows)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    query = sorted((photos / "one").glob("*.png"))[1]
    hits = json.loads(command("search", tmp_path / "i.npy", query, "--json").stdout)
    assert hits[0]["file"] == str(query)


def test_a_numpy_file_that_is_no_index(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 3), np.float32))
    assert "a.json does not exist" in refused("search", tmp_path / "a.npy", "a two")
    assert "b.npy does not exist" in refused("search", tmp_path / "b.npy", "a two")
    about = {"format": 1, "golden": [[1.0]], "names": ["one"]}
    (tmp_path / "a.json").write_text(json.dumps(about))
    assert "names and embeddings do not fit" in refused("search", tmp_path / "a.npy", "a two")
    for text in ("{}", "[]", "nonsense"):
        (tmp_path / "a.json").write_text(text)
        assert "a.npy is not an index of images" in refused("search", tmp_path / "a.npy", "a two")
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 9), }"
    (tmp_path / "a.npy").write_bytes(header.ljust(127) + b"\n")
    assert "a.npy is not an index of images" in refused("search", tmp_path / "a.npy", "a two")
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    assert "a.npy is not an index of images" in refused("search", tmp_path / "a.npy", "a two")


def test_other_models(tmp_path, index, photos):
    """A classifier is searched by image only; another model's index is refused."""
    plain = tmp_path / "plain.safetensors"
    vt.Bundle(model=vt.create("mu/4", size=24, channels=1, classes=2, init="timm")).save(plain)
    command("embed", plain, photos / "one", "-o", tmp_path / "i.safetensors")
    query = sorted((photos / "one").glob("*.png"))[3]
    hits = json.loads(command("search", tmp_path / "i.safetensors", query, "--json").stdout)
    assert hits[0]["file"] == str(query)
    assert "no text tower" in refused("search", tmp_path / "i.safetensors", "some words")
    assert "made by another model" in refused("search", index, query, "--model", plain)
    baked = tmp_path / "baked.safetensors"
    vt.load(FILE).zero_shot(["a one", "a two"], ["{}"]).save(baked)
    hits = json.loads(command("search", index, query, "--model", baked, "--json").stdout)  # the same space
    assert hits[0]["file"] == str(query)


@pytest.mark.parametrize(
    ("query", "reason"), [("nothing.jpg", "No such file or directory"), (".", "it is a folder")]
)
def test_bad_queries(index, query, reason):
    told = f"{query} cannot be searched for: {reason}. Name an image file, or words in quotes."
    assert refused("search", index, query) == told


@pytest.mark.parametrize("ending", ["safetensors", "npy"])
def test_search_opens_the_model_as_embed_did(photos, tmp_path, monkeypatch, ending):
    """Size and preprocessing are those of the index, and the path of the model is found from any folder."""
    (tmp_path / "model").mkdir()
    vt.load(FILE).save(tmp_path / "model" / "clip.safetensors")
    monkeypatch.chdir(tmp_path / "model")
    index, query = tmp_path / f"index.{ending}", sorted((photos / "one").glob("*.png"))[0]
    how = ["--size", "32x24", "--set", "preprocess.mean=0.4"]
    command("embed", "clip.safetensors", photos, "-o", index, *how)
    assert read_index(index).arguments == {"size": (32, 24), "preprocess": {"mean": 0.4}}
    monkeypatch.chdir(tmp_path)
    hits = json.loads(command("search", index, query, "--json").stdout)
    assert (hits[0]["file"], hits[0]["score"]) == (str(query), pytest.approx(1, abs=1e-5))
    moved = (tmp_path / "model" / "clip.safetensors").rename(tmp_path / "moved.safetensors")
    told = "The model that made the index, clip.safetensors, does not exist any more; give its path with --model."
    assert refused("search", index, query) == told
    assert json.loads(command("search", index, query, "--json", "--model", moved).stdout) == hits
    told = refused("search", index, query, "--model", moved, "--size", 24)
    assert (
        "by clip.safetensors with size=(32, 24), preprocess={'mean': 0.4}. Give that model with --model"
        in told
    )
    assert "its settings with --set" in told
    assert "unknown family 'clop'" in refused("search", index, query, "--model", moved, "--family", "clop")


def test_an_index_of_before(index, photos, tmp_path):
    """Without settings, an index is as it was: old ones have no arguments, and damaged ones are refused."""
    with safe_open(index, "np") as file:
        about = json.loads(file.metadata()["vitrail.index"])
        tensors = {name: file.get_tensor(name) for name in ("embeddings", "golden", "names")}
    assert set(about) == {"format", "model", "folder"}
    for arguments, message in (([1], "its arguments are no object"), ({"nothing": 1}, "nothing")):
        text = json.dumps({**about, "arguments": arguments})
        save_file(tensors, tmp_path / "i.safetensors", {"vitrail.index": text})
        assert message in refused("search", tmp_path / "i.safetensors", "a two")


def test_an_index_is_no_model(index):
    told = refused("info", index)
    assert (
        "is an index of images made by vitrail embed and no model; search in it with vitrail search" in told
    )


def test_bad_indexes(tmp_path, index):
    assert "is not an index" in refused("search", FILE, "a two")
    with pytest.raises(FileError, match="No such file"):
        read_index(tmp_path / "nothing.safetensors")
    assert ".safetensors or .npy" in refused("embed", FILE, tmp_path, "-o", tmp_path / "x.txt")
    with pytest.raises(InputError, match="use the model that made the index"):
        read_index(index).search(np.ones(3))
