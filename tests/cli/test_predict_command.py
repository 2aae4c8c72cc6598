"""`vitrail predict`: rows in order, complete lines, safe cells, reasons for unreadable images."""

import csv
import io
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.evaluation.trained_images import fit_statistics
from vitrail.predict import Predictor
from vitrail.predict.output_rows import writing_rows

STRANGE = ["=1+1.png", "+a.png", "@b.png", "two\nlines.png", 'quo"te, comma.png', os.fsdecode(b"caf\xe9.png")]
LABELS = ["ant", "=bee", "cat"]


@pytest.fixture(scope="module")
def bundle():
    torch.manual_seed(0)
    model = add_noise(
        vt.ViT(vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=8, channels=3, classes=3))
    )
    return vt.Bundle(model=model, labels=LABELS)


@pytest.fixture
def place(bundle, tmp_path, monkeypatch):
    """A model, and images with strange names, one of them corrupt."""
    monkeypatch.chdir(tmp_path)
    bundle.save("model.safetensors")
    os.mkdir("photos")
    for number, name in enumerate(STRANGE):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join("photos", name))
    (tmp_path / "photos" / "broken.png").write_bytes(b"not an image")
    return tmp_path


@pytest.fixture
def good(place):
    (place / "photos" / "broken.png").unlink()
    return place


def run(*arguments, stdin=None):
    command = ["predict", "model.safetensors", *map(str, arguments)]
    done = CliRunner().invoke(app, command, input=stdin, env={"COLUMNS": "80"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def answers(bundle):
    return {one.name: one for one in Predictor(bundle).stream("photos")}


# ---- rows -----------------------------------------------------------------------------------


def test_json_lines_keep_the_exact_names(place, bundle):
    done = run("photos", "--format", "jsonl", "--top", 2)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    expected = answers(bundle)
    assert [row["file"] for row in rows] == list(expected)
    assert {os.fsencode(row["file"]) for row in rows} == {
        os.path.join(b"photos", name) for name in os.listdir(b"photos")
    }
    for row in rows:
        one = expected[row["file"]]
        assert row["label"] == one.label
        assert [guess["label"] for guess in row["top"]] == [label for label, _ in one.top(2)]
        if one.score is not None:
            assert row["score"] == row["top"][0]["score"] == pytest.approx(one.score, abs=1e-6)
    [bad] = [row for row in rows if row["error"]]
    assert (bad["file"], bad["label"], bad["score"], bad["top"]) == ("photos/broken.png", None, None, [])
    assert done.exit_code == 1
    assert done.stderr.startswith("vitrail: 1 of 7 images could not be classified")


def test_csv_is_safe_in_a_spreadsheet(place, bundle):
    expected = answers(bundle)
    listing = b"photos\n\tmissing.png\n-missing.png\n"
    text = run("-", "--format", "csv", "--top", "2", stdin=listing).stdout_bytes.decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert list(rows[0]) == ["file", "label", "score", "label_1", "score_1", "label_2", "score_2", "error"]
    assert text.count("\r\n") == len(rows) + 1  # the other line break is inside quotes
    assert [row["file"] for row in rows] == [
        *(name.replace("\udce9", "\\udce9") for name in expected),
        "'\tmissing.png",
        "'-missing.png",
    ]
    cells = [cell for row in rows for cell in row.values()]
    assert not [cell for cell in cells if cell.startswith(tuple("=+-@\t\r"))]
    for row, one in zip(rows, expected.values(), strict=False):
        if one.error is None:
            assert row["label"] == row["label_1"] == one.label.replace("=bee", "'=bee")
            assert float(row["score"]) == float(row["score_1"]) == pytest.approx(one.score, abs=1e-6)
    assert "'=bee" in cells
    assert rows[-1]["error"] == "No such file or directory"


def test_names_that_start_like_formulas(good):
    os.chdir("photos")
    done = CliRunner().invoke(
        app, ["predict", "../model.safetensors", "--format", "csv", "--", "=1+1.png", "@b.png"]
    )
    assert done.exit_code == 0
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["file", "'=1+1.png", "'@b.png"]


def test_table_format(place, bundle):
    done = run("photos", "--top", 2)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["score", "label", "file"]
    first = next(iter(answers(bundle).values()))
    (best, score), (second, less) = first.top(2)
    assert lines[1] == f"{score:.4f}  {best:24}  {first.name}"
    assert lines[2] == f"{less:.4f}  {second}"
    assert "photos/two\\nlines.png" in done.stdout
    assert "photos/caf\\udce9.png" in done.stdout
    assert re.search(r"^-  +error  +photos/broken.png: .*not an image", done.stdout, re.M)


def test_predictions_below_the_threshold(good, bundle):
    scores = sorted(one.score for one in answers(bundle).values())
    card = vt.Card(metrics={"temperature": 1.0, "threshold": scores[2] + 1e-5})
    vt.Bundle(model=bundle.model, labels=LABELS, card=card).save("model.safetensors")
    rows = [json.loads(line) for line in run("photos", "--format", "jsonl").stdout.splitlines()]
    assert sum(row["label"] is None for row in rows) == 3
    assert all(row["top"][0]["label"] in LABELS for row in rows)
    for form in ("table", "csv"):
        assert run("photos", "--format", form).stdout.count("don't know") == 3


def test_images_out_of_distribution_are_marked(good, bundle):
    assert json.loads(run("photos", "--format", "jsonl").stdout.splitlines()[0])["ood"] is None
    embeddings = np.stack([one.embedding for one in answers(bundle).values()])
    rng = np.random.default_rng(0)
    train, val = (rng.choice(embeddings, 200) + rng.normal(size=(200, 1)) for _ in range(2))
    statistics = fit_statistics(train, np.zeros(200, np.int64), val, 10**9)
    distances = statistics.distances(embeddings)
    half = replace(statistics, threshold=np.array([np.median(distances)], np.float32))
    vt.Bundle(model=bundle.model, labels=LABELS, statistics=half).save("model.safetensors")
    expected = half.scores(embeddings)
    assert 0 < (expected > 1).sum() < len(expected)
    rows = [json.loads(line) for line in run("photos", "--format", "jsonl").stdout.splitlines()]
    assert [row["ood_score"] for row in rows] == pytest.approx(expected, rel=1e-4)
    assert [row["ood"] for row in rows] == [score > 1 for score in expected]
    table = list(csv.DictReader(io.StringIO(run("photos", "--format", "csv").stdout)))
    assert list(table[0]) == ["file", "label", "score", "ood", "ood_score", "error"]
    assert [row["ood"] for row in table] == ["yes" if row["ood"] else "no" for row in rows]
    lines = run("photos").stdout.splitlines()[1:]
    assert [line.endswith("  (out of distribution)") for line in lines] == [row["ood"] for row in rows]


def test_multi_label_rows(good, bundle):
    thresholds = tuple(0.5 if k % 2 else 1.0 for k in range(len(LABELS)))  # at 1 a class is never predicted
    scores = vt.Scores(activation="sigmoid", thresholds=thresholds)
    vt.Bundle(model=bundle.model, labels=LABELS, scores=scores).save("model.safetensors")
    rows = [json.loads(line) for line in run("photos", "--format", "jsonl", "--top", 5).stdout.splitlines()]
    table = list(csv.DictReader(io.StringIO(run("photos", "--format", "csv").stdout)))
    for row, cells in zip(rows, table, strict=True):
        above = [g for g in row["top"] if g["score"] > thresholds[LABELS.index(g["label"])]]
        assert row["labels"] == above
        assert row["label"] == (above[0]["label"] if above else None)
        text = "|".join(g["label"] for g in above) or "none"
        assert cells["label"].removeprefix("'") == text
    assert {len(row["labels"]) for row in rows} - {1}
    lines = run("photos").stdout.splitlines()
    assert "don't know" not in "".join(lines)
    assert len(lines) == len(rows) + 1
    best = rows[0]["top"][0]["score"]
    text = ", ".join(g["label"] for g in rows[0]["labels"]) or "none"
    assert lines[1].startswith(f"{best:.4f}  {text[:20]}")


@pytest.mark.parametrize("form", ["table", "csv", "jsonl"])
def test_rows_are_saved_to_a_new_file(good, form):
    shown = run("photos", "--format", form)
    done = run("photos", "--format", form, "--out", "rows")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert (good / "rows").read_bytes() == shown.stdout_bytes
    assert shown.stdout_bytes.endswith(b"\n")


def test_rows_are_written_before_later_images_are_read(good, bundle, monkeypatch):
    """A run that is killed leaves complete rows."""
    counts = []

    def count_rows(self, batch):
        counts.append(len((good / "rows").read_bytes().splitlines()))
        yield from predict_batch(self, batch)

    predict_batch = Predictor.predict_batch
    monkeypatch.setattr(Predictor, "predict_batch", count_rows)
    run("photos", "--format", "jsonl", "--out", "rows", "--batch", 2)
    assert counts == [0, 2, 4]


# ---- lists of paths -------------------------------------------------------------------------


def test_lists_on_stdin(place):
    names = [os.fsencode(os.path.join("photos", name)) for name in STRANGE]
    plain = [name for name in names if b"\n" not in name]
    for listing in (b"\n".join(plain), b"\r\n".join(plain) + b"\r\n\r\n"):
        done = run("-", "--format", "jsonl", stdin=listing)
        assert [os.fsencode(json.loads(line)["file"]) for line in done.stdout.splitlines()] == plain
        assert done.exit_code == 0
    done = run("photos/broken.png", "-", "photos/@b.png", "-0", "--format", "jsonl", stdin=b"\0".join(names))
    files = [os.fsencode(json.loads(line)["file"]) for line in done.stdout.splitlines()]
    assert files == [b"photos/broken.png", *names, b"photos/@b.png"]
    assert done.exit_code == 1


def test_stdin_that_is_not_a_list(place):
    with pytest.raises(InputError, match="not a list of paths"):
        run("-", stdin=b"x" * 200_000)


# ---- embeddings and overlays ----------------------------------------------------------------


@pytest.mark.parametrize("listing", [False, True])
def test_embeddings_align_with_the_rows(place, bundle, listing):
    expected = list(answers(bundle).values())
    paths, stdin = (["-"], b"photos\n") if listing else (["photos"], None)
    done = run(*paths, "--embeddings", "e.npy", "--batch", 2, stdin=stdin)
    assert done.exit_code == 1
    rows = np.load("e.npy")
    assert (rows.dtype, rows.shape) == (np.float32, (7, 12))
    for row, one in zip(rows, expected, strict=True):
        if one.error is None:
            assert np.allclose(row, one.embedding, atol=1e-5)
        else:
            assert np.isnan(row).all()
    assert sorted(os.listdir()) == ["e.npy", "model.safetensors", "photos"]


def test_embeddings_are_complete_or_missing(tmp_path):
    with pytest.raises(AttributeError), writing_rows(tmp_path / "e.npy", 3) as add:
        add("not a row")
    assert os.listdir(tmp_path) == []
    with pytest.raises(InputError, match="already"), writing_rows(tmp_path / "e.npy", 3):
        (tmp_path / "e.npy").write_text("theirs")
    assert os.listdir(tmp_path) == ["e.npy"]
    assert (tmp_path / "e.npy").read_text() == "theirs"
    with writing_rows(tmp_path / "none.npy", 3):
        pass
    assert np.load(tmp_path / "none.npy").shape == (0, 3)


def test_a_model_without_a_head(good):
    model = vt.ViT(vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=8, channels=3, classes=0))
    vt.Bundle(model=add_noise(model)).save("model.safetensors")
    with pytest.raises(InputError, match="--top needs a model with classes"):
        run("photos", "--top", 5, "--embeddings", "e.npy")
    with pytest.raises(InputError, match="gives only embeddings"):
        run("photos")
    for form in ("table", "csv", "jsonl"):
        done = run("photos", "--embeddings", f"{form}.npy", "--format", form)
        assert done.exit_code == 0
        assert "label" not in done.stdout
        assert np.isfinite(np.load(f"{form}.npy")).all()


def test_explain_saves_an_overlay_of_each_image(place):
    done = run("photos/@b.png", "photos/broken.png", "photos/=1+1.png", "--explain", "why")
    assert done.exit_code == 1
    assert sorted(os.listdir("why")) == ["000001-_b.png", "000003-_1_1.png"]
    for name in os.listdir("why"):
        with Image.open(os.path.join("why", name)) as image:
            assert min(image.size) > 100
            assert len(set(image.convert("RGB").tobytes())) > 20


# ---- wrong use ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No images given"),
        (["photos", "--format", "cvs"], "Did you mean 'csv'"),
        (["photos", "--out", "model.safetensors"], "--out never overwrites"),
        (["photos", "--embeddings", "e.bin"], "must name a .npy file"),
        (["photos", "--out", "a.npy", "--embeddings", "a.npy"], "both name a.npy"),
        (["photos", "--explain", "photos"], "--explain must name a new or empty folder"),
        (["photos", "--set", "hads=3"], "--set takes FIELD=VALUE"),
    ],
)
def test_wrong_use_is_one_message_and_leaves_no_files(place, arguments, message):
    before = sorted(os.listdir())
    with pytest.raises(InputError) as caught:
        run(*arguments)
    assert message in str(caught.value)
    assert sorted(os.listdir()) == before


def test_an_empty_folder_and_a_missing_file_get_rows(place):
    (place / "empty").mkdir()
    done = run("empty", "missing.png", "photos/@b.png", "--format", "jsonl")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [bool(row["error"]) for row in rows] == [True, True, False]
    assert done.exit_code == 1
    assert "empty contains no images; name image files, or a folder with some." in done.stderr
    assert "1 of 2 images could not be classified" in done.stderr


def test_an_empty_folder_alone_is_not_called_an_image(place):
    (place / "empty").mkdir()
    done = run("empty")
    assert done.exit_code == 1
    assert "empty contains no images" in done.stderr
    assert "could not be classified" not in done.stderr
