"""The report on an evaluation."""

import base64
import dataclasses
import io
import re
import sys
import xml.etree.ElementTree as ET
from functools import cache
from html import unescape

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from tests.support.read_pages import HOSTILE_NAMES, ParsedPage, check_safe
from vitrail.base.errors import InputError, MissingExtra
from vitrail.cli import app
from vitrail.evaluation.calibration import predict_top1, reliability_bins
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.evaluation.forward import run_model
from vitrail.evaluation.trained_images import TrainedOn
from vitrail.images.formats.sources import Dataset, Split
from vitrail.views import charts, rollout
from vitrail.views.evaluation_page import (
    calibration_section,
    confused_pairs,
    confusion_section,
    evaluation_page,
    notes_sections,
    real_labels_section,
)
from vitrail.views.gallery import (
    encode_image,
    evenly_spaced,
    example_section,
    explain_images,
    mistake_section,
    overlay_rollout,
)
from vitrail.views.html_page import percent, render, wilson


def model_of(classes, **fields):
    torch.manual_seed(0)
    base = dict(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=classes)
    return add_noise(vt.ViT(vt.ViTConfig(**{**base, **fields})))


def data_of(bundle, names, count=60, multi_label=False):
    """Noise with labels for which the accuracy is two thirds."""
    config, rng = bundle.model.config, np.random.default_rng(0)
    images = rng.integers(0, 256, (count, *config.pixels, config.channels), dtype=np.uint8)
    split = Split(np.arange(count) % len(names), [f"image {i}" for i in range(count)], images=images)
    if config.classes:
        said = run_model(bundle.model, split, bundle.preprocess)[0].argmax(1).numpy()
        labels = np.where(np.arange(count) % 3, said, (said + 1) % len(names))
        labels = np.eye(len(names), dtype=np.int64)[labels] if multi_label else labels
        split = dataclasses.replace(split, labels=labels)
    return Dataset("noise", list(names), split, val=split)


@cache
def page_of(names, multi_label=False, **fields):
    bundle = vt.Bundle(model=model_of(len(names), **fields), labels=list(names))
    data = data_of(bundle, names, multi_label=multi_label)
    found = evaluate(bundle, data, probe=[] if multi_label else ["knn"])
    page = evaluation_page(found, bundle, data.val, model="tiny", command="vitrail evaluate x")
    return found, page, ParsedPage(render(page)), bundle, data.val


def rows(page, title):
    [section] = [one for one in page.sections if one.title == title]
    return section.tables[0].rows


# ---- the whole page -------------------------------------------------------------------------


def test_numbers_are_those_of_the_evaluation():
    found, page, read, bundle, _ = page_of(tuple("abcdefg"))
    check_safe(read)
    c, scores = found.calibration, found.metrics
    low, high = wilson(round(60 * scores.top1), 60)
    for words in (
        f"predicts {round(60 * scores.top1)} of 60 images of noise",
        f"top-1 accuracy on 60 images; 95 % confidence interval {100 * low:.1f} to {100 * high:.1f} %",
        f"{percent(scores.top5)} top-5 accuracy",
        f"{percent(scores.macro_f1)} macro-F1",
        f"{percent(c.ece)}, expected calibration error",
        f"{c.temperature:.3f}, fitted on these images; ECE {percent(c.ece_scaled)}",
        f"{scores.loss:.3f} cross-entropy loss",
        f"Always predicting “{max(scores.per_class, key=lambda one: one.count).name}”",
        "; ".join(bundle.preprocess.describe()),
        "60 of noise, split “val”, 7 classes",
        "vitrail evaluate x",
    ):
        assert words in read.text, words
    assert page.title == "tiny on noise"
    table = {row[0]: row[1:] for row in rows(page, "Classes")}
    for one in scores.per_class:
        values = (one.precision, one.recall, one.f1)
        metrics = ["–" if value is None else f"{100 * value:.1f} %" for value in values]
        assert table[one.name] == [f"{one.count:,}", *metrics]
    assert [row[4] for row in rows(page, "Feature probes")] == [percent(row.top1) for row in found.probes]
    for true, predicted, count, _ in rows(page, "Confusion"):
        assert scores.confusion["abcdefg".index(true)]["abcdefg".index(predicted)] == int(count)
    titles = [section.title for section in page.sections]
    assert titles == [
        "Most confident mistakes",
        "Examples",
        "Confusion",
        "Classes",
        "Calibration",
        "Feature probes",
        "Evaluation setup",
    ]


def test_mistakes_are_shown_with_image_and_rollout():
    found, page, _, _, split = page_of(tuple("abc"))
    tiles = page.sections[0].images
    assert len(tiles) == 12
    for tile, mistake in zip(tiles, found.metrics.mistakes, strict=False):
        assert tile.title == f"Predicted: {mistake.predicted}"
        assert tile.lines == [
            f"True class: {mistake.label}",
            f"Confidence: {percent(mistake.confidence)}",
            mistake.name,
        ]
        (image, alt), (over, where) = tile.views
        pixels = np.asarray(Image.open(io.BytesIO(image)))
        assert np.array_equal(pixels, split.images[int(mistake.name.split()[1])][..., 0])
        assert np.asarray(Image.open(io.BytesIO(over))).shape == (8, 8, 3)  # in color
        assert alt == f"Image of class {mistake.label}, after preprocessing"
        assert re.fullmatch(r"Attention rollout, highest at row [12] of 2, column [12] of 2", where)


def test_examples_are_evenly_spaced_and_show_the_prediction():
    found, page, _, _, split = page_of(tuple("abc"))
    tiles = page.sections[1].images
    assert [tile.lines[2] for tile in tiles] == [f"image {i}" for i in evenly_spaced(60, 8)]
    for tile in tiles:
        was = found.classes[split.labels[int(tile.lines[2].split()[1])]]
        said = tile.title.removeprefix("Predicted: ")
        assert tile.lines[0] == ("Correct" if said == was else f"Wrong; true class: {was}")
    assert evenly_spaced(60, 8) == [3, 11, 18, 26, 33, 41, 48, 56]
    assert evenly_spaced(3, 8) == [0, 1, 2]
    assert evenly_spaced(0, 8) == []


def test_hostile_names_are_escaped_in_page_and_charts():
    names = [*HOSTILE_NAMES[:9], "$\\frac{1$"]
    _, page, read, _, _ = page_of(tuple(names))
    check_safe(read)
    for name in HOSTILE_NAMES[:7]:
        assert name in read.text, name
    drawn = [figure.image for section in page.sections for figure in section.figures]
    assert len(drawn) == 3
    for text in drawn:
        tags = {one.tag.rpartition("}")[2] for one in ET.fromstring(text).iter()}
        assert "script" not in tags
        assert "onerror" not in re.sub(r">[^<]*<", "><", text)
    for text in drawn[:2]:
        assert {"עברית", "$\\frac{1$", "\\u202egpj.exe"} <= {
            unescape(one).strip() for one in re.findall(">([^<>]+)<", text)
        }


@pytest.mark.parametrize(
    "fields",
    [
        dict(class_token=False, pool="mean"),
        dict(registers=3),
        dict(pool="attention"),
        dict(channels=13),
        dict(size=(8, 13), patch=(4, 3), remainder="cut", channels=3),
        dict(channels=4),
    ],
    ids=str,
)
def test_images_of_any_model(fields):
    bundle = vt.Bundle(model=model_of(2, **fields), labels=["a", "b"])
    data = data_of(bundle, "ab")
    found = evaluate(bundle, data)
    for section in (*mistake_section(found, bundle, data.val), *example_section(found, bundle, data.val)):
        assert len(section.images) >= 8
        assert all(len(tile.views) == 2 for tile in section.images)


def test_multi_label_report():
    found, page, read, _, _ = page_of(tuple("abc"), multi_label=True)
    assert f"{percent(found.metrics.mean_ap)} mean average precision" in read.text
    assert f"{percent(found.metrics.exact)} of 60 images with all labels correct" in read.text
    assert "Calibration" not in read.text
    assert rows(page, "Classes")[0][4].endswith(" %")


def test_a_multi_label_report_names_what_is_wrong_and_what_was_trained_on():
    found, _, _, bundle, split = page_of(tuple("abcdefg"), multi_label=True)
    found = dataclasses.replace(found, trained_on=TrainedOn(3, 57))
    page = evaluation_page(found, bundle, split)
    assert page.lead[1] == found.trained_on.sentence()
    mistakes, examples = page.sections[:2]
    assert "highest score is predicted and wrong" in mistakes.text[0]
    assert all(tile.lines[0].startswith("True classes: ") for tile in mistakes.images)
    wrong = [tile for tile in examples.images if tile.lines[0].startswith("Wrong; true classes: ")]
    assert wrong
    assert all(tile.title.count(",") < 4 for tile in examples.images)  # a long list is shortened


@pytest.mark.parametrize("names", [("ants", "bees"), tuple("0123456789"), ("a", "hard-leaved orchid", "c")])
def test_the_axis_labels_of_a_confusion_matrix_are_in_the_figure(names):
    text = charts.confusion_matrix(np.eye(len(names), dtype=int).tolist(), names)
    found = re.search(r'x="([-\d.]+)"[^>]*>true class<', text)
    assert float(found[1]) > 9  # its baseline, in points


def test_a_temperature_that_was_not_fitted_is_not_drawn():
    found, _, _, _, _ = page_of(tuple("abcdefg"))
    calibration = dataclasses.replace(found.calibration, fitted=False, temperature=1.0)
    [section] = calibration_section(dataclasses.replace(found, calibration=calibration))
    assert "scaling" not in section.figures[0].image + section.figures[0].alt
    assert not any("scaling" in str(value) for _, value in section.facts)


def test_many_classes_have_tables_instead_of_charts():
    names = [f"class {i}" for i in range(31)]
    found, page, *_ = page_of(tuple(names))
    assert [len(section.figures) for section in page.sections[2:4]] == [0, 0]
    assert len(rows(page, "Classes")) == 31
    many = dataclasses.replace(found.metrics, confusion=np.ones((31, 31), int).tolist())
    [section] = confusion_section(dataclasses.replace(found, metrics=many))
    assert len(section.tables[0].rows) == 31 * 30
    assert section.tables[0].search == "class"
    _, page, *_ = page_of(tuple(f"class {i}" for i in range(201)))
    assert "Confusion" not in [section.title for section in page.sections]
    assert len(rows(page, "Classes")) == 201


def test_a_model_without_a_head():
    bundle = vt.Bundle(model=model_of(0))
    data = data_of(bundle, "ab")
    found = evaluate(bundle, data, probe=["knn"])
    read = ParsedPage(render(evaluation_page(found, bundle, data.val)))
    assert f"{percent(max(row.top1 for row in found.probes))} accuracy of the best probe" in read.text
    assert "Examples" not in read.text


def test_real_labels_corrupt_files_and_notes():
    bundle = vt.Bundle(model=model_of(2), labels=["a", "b"])
    data = data_of(bundle, "ab")
    found = evaluate(bundle, data, real=[[0, 1]] * 50 + [[]] * 10)
    found = dataclasses.replace(
        found, corrupt={HOSTILE_NAMES[0]: "which is broken"}, notes=["one", "one", "two"]
    )
    [better] = real_labels_section(found)
    assert better.tables[0].rows[1] == ["ReaL", "100.0 %", "50"]
    broken, listed = notes_sections(found)
    assert broken.tables[0].rows == [(HOSTILE_NAMES[0], "which is broken")]
    assert listed.points == ["one", "two"]


def test_model_without_mistakes():
    bundle = vt.Bundle(model=model_of(2), labels=["a", "b"])
    data = data_of(bundle, "ab")
    said = run_model(bundle.model, data.val, bundle.preprocess)[0].argmax(1).numpy()
    split = dataclasses.replace(data.val, labels=said)
    right = dataclasses.replace(data, val=split)
    found = evaluate(bundle, right)
    read = ParsedPage(render(evaluation_page(found, bundle, split)))
    assert "There are no mistakes" in read.text
    assert "No class was mistaken for another." in read.text
    assert "no temperature could be fitted" in read.text


# ---- parts ----------------------------------------------------------------------------------


def test_image_files_are_preprocessed_and_unreadable_ones_skipped(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    paths[1].write_bytes(b"broken")
    bundle = vt.Bundle(model=model_of(2, channels=3))
    split = Split(np.zeros(3, np.int64), list("abc"), paths)
    first, last = explain_images(bundle, split, [0, 1, 2])
    assert (first.index, last.index) == (0, 2)
    assert np.array_equal(last.pixels, bundle.preprocess.pixels(Image.open(paths[2])))
    images = torch.stack([bundle.preprocess(Image.open(paths[i])) for i in (0, 2)])
    with torch.no_grad():
        assert np.allclose(last.logits, bundle.model(images)[1].numpy(), atol=1e-5)
    maps = rollout.compute(bundle.model, images).maps.reshape(2, 2, 2)
    assert np.allclose(last.rollout, maps[1], atol=1e-6)
    assert last.rollout.sum() == pytest.approx(1)
    assert explain_images(bundle, split, [1]) == []


def test_the_map_covers_its_patches():
    pixels = np.full((8, 13, 3), 200, np.uint8)
    values = np.zeros((2, 4))
    values[1, 2] = 1.0
    over = overlay_rollout(pixels, values, (4, 3)).astype(int)
    bright = np.zeros((8, 13), bool)
    bright[4:8, 6:9] = True
    assert (over[bright] == over[4, 6]).all()
    assert (over[~bright].sum(axis=1) < over[4, 6].sum()).all() or (over[:, 12] == 200).all()
    assert (over[:, 12] == 200).all()  # beyond the last complete patch
    assert over[0, 0].sum() < over[4, 6].sum()


def test_image_encoding():
    small, large = np.zeros((8, 8, 1), np.uint8), np.zeros((400, 800, 3), np.uint8)
    assert Image.open(io.BytesIO(encode_image(small))).format == "PNG"
    found = Image.open(io.BytesIO(encode_image(large)))
    assert (found.format, found.size) == ("JPEG", (320, 160))
    assert (
        np.asarray(Image.open(io.BytesIO(encode_image(np.full((4, 4, 2), [0, 255], np.uint8))))).max() == 128
    )


def test_wilson_by_hand():
    """Against the roots of (p - fraction)^2 = z^2 p (1 - p) / n, the definition of the interval."""
    for correct, count in ((0, 10), (10, 10), (299, 360), (1, 1)):
        z, fraction = 1.96, correct / count
        roots = np.roots([1 + z * z / count, -(2 * fraction + z * z / count), fraction * fraction])
        assert wilson(correct, count) == pytest.approx(sorted(np.clip(roots.real, 0, 1)), abs=1e-7)


def test_number_formats():
    assert [percent(fraction) for fraction in (0, 0.8306, 0.9996, 1)] == [
        "0.0 %",
        "83.1 %",
        "99.96 %",
        "100.0 %",
    ]


def test_confused_pairs():
    found, *_ = page_of(tuple("abc"))
    table = np.array(found.metrics.confusion)
    for true, predicted, count, fraction in confused_pairs(found.metrics, 99):
        row = "abc".index(true)
        assert table[row, "abc".index(predicted)] == count
        assert fraction == count / table[row].sum()
    assert len(confused_pairs(found.metrics, 99)) == (table * (1 - np.eye(3)) > 0).sum()


def test_reliability_diagram_shows_both_curves():
    found, _, _, bundle, split = page_of(tuple("abc"))
    c = found.calibration
    logits = run_model(bundle.model, split, bundle.preprocess)[0].numpy()
    predicted, scores = predict_top1(logits, c.temperature)
    wanted = reliability_bins(scores, predicted == split.labels)
    assert [one.count for one in c.scaled_bins] == [one.count for one in wanted]
    text = charts.reliability_diagram(c)
    assert "with temperature scaling" in text
    assert "with temperature scaling" not in charts.reliability_diagram(
        dataclasses.replace(c, scaled_bins=[])
    )


@pytest.mark.parametrize("epochs", [1, 2, 300])
def test_curves_of_any_length(epochs):
    rows = [{"epoch": n + 1, "loss": 2.0 / (n + 1), "val_loss": 2.5 / (n + 1)} for n in range(epochs)]
    rows[0].pop("val_loss") if epochs > 1 else None
    text = charts.curve(rows, {"loss": "training", "val_loss": "validation"}, "loss")
    assert ET.fromstring(text).tag.endswith("svg")
    assert text == charts.curve(rows, {"loss": "training", "val_loss": "validation"}, "loss")


# ---- the command ----------------------------------------------------------------------------


def evaluated(*arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_the_command_writes_a_new_page(tmp_path, monkeypatch):
    file, page = tmp_path / "tiny.safetensors", tmp_path / "page.html"
    vt.Bundle(model=model_of(10), labels=[str(i) for i in range(10)]).save(file)
    done = evaluated(file, "digits", "--html", page)
    assert f"Saved {page}" in "".join(done.stdout.split("\n"))
    read = ParsedPage(page.read_text())
    check_safe(read)
    assert "tiny.safetensors on digits" in read.text
    assert len(read.all("img")) == 2 * (12 + 8) + 3
    assert base64.b64decode(read.all("img")[0]["src"].partition(",")[2])
    before = page.read_bytes()
    with pytest.raises(InputError, match=r"--html"):
        evaluated(file, "digits", "--html", page)
    with pytest.raises(InputError, match=r"--html.*--json|different"):
        evaluated(file, "digits", "--html", tmp_path / "new", "--json", tmp_path / "new")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra):
        evaluated(file, "digits", "--html", tmp_path / "new.html")
    assert page.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "tiny.safetensors"]
