"""The page of an evaluation says what the evaluation found, and shows the pictures."""

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
from conftest import shake
from read_pages import EVIL, Read, check_safe
from vitrail.cli import app
from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError, MissingExtra
from vitrail.evaluation.calibration import reliability, surest
from vitrail.evaluation.forward import outputs_of
from vitrail.evaluation.run import evaluate
from vitrail.inspect import rollout
from vitrail.report import charts
from vitrail.report.classes import confused, confusions
from vitrail.report.evaluation import evaluation_page, notes, real
from vitrail.report.gallery import evenly, examples, mistakes
from vitrail.report.numbers import percent, size, wilson
from vitrail.report.page import render
from vitrail.report.pictures import encode, lay_over, look


def model_of(classes, **fields):
    torch.manual_seed(0)
    base = dict(width=16, depth=2, heads=2, patch=4, size=8, channels=1, classes=classes)
    return shake(vt.ViT(vt.ViTConfig(**{**base, **fields})))


def data_of(bundle, names, count=60, several=False):
    """Noise, of which the model is right about two thirds."""
    config, chance = bundle.model.config, np.random.default_rng(0)
    images = chance.integers(0, 256, (count, *config.pixels, config.channels), dtype=np.uint8)
    split = Split(np.arange(count) % len(names), [f"picture {i}" for i in range(count)], images=images)
    if config.classes:
        said = outputs_of(bundle.model, split, bundle.preprocess)[0].argmax(1).numpy()
        labels = np.where(np.arange(count) % 3, said, (said + 1) % len(names))
        labels = np.eye(len(names), dtype=np.int64)[labels] if several else labels
        split = dataclasses.replace(split, labels=labels)
    return Dataset("noise", list(names), split, val=split)


@cache
def page_of(names, several=False, **fields):
    bundle = vt.Bundle(model=model_of(len(names), **fields), labels=list(names))
    data = data_of(bundle, names, several=several)
    found = evaluate(bundle, data, probe=[] if several else ["knn"])
    page = evaluation_page(found, bundle, data.val, model="tiny", command="vitrail evaluate x")
    return found, page, Read(render(page)), bundle, data.val


def rows(page, title):
    [section] = [one for one in page.sections if one.title == title]
    return section.tables[0].rows


# ---- the whole page -------------------------------------------------------------------------


def test_numbers_are_those_of_the_evaluation():
    found, page, read, bundle, _ = page_of(tuple("abcdefg"))
    check_safe(read)
    c, scores = found.calibration, found.scores
    low, high = wilson(round(60 * scores.top1), 60)
    for words in (
        f"named {round(60 * scores.top1)} rightly, {percent(scores.top1)}",
        f"right (top-1), of 60 pictures; 95 % interval {100 * low:.1f} to {100 * high:.1f} %",
        f"{percent(scores.top5)} have the right class",
        f"{percent(c.before)}, the mean distance",
        f"{c.temperature:.3f}, fitted on these same pictures: ECE {percent(c.after)}",
        f"{scores.loss:.3f} loss",
        f"Always saying “{max(scores.per_class, key=lambda one: one.count).name}”",
        "; ".join(bundle.preprocess.describe()),
        "60 in val of noise, 7 classes",
        "vitrail evaluate x",
    ):
        assert words in read.text, words
    assert page.title == "tiny on noise"
    table = {row[0]: row[1:] for row in rows(page, "Class by class")}
    for one in scores.per_class:
        share = ["–" if value is None else f"{100 * value:.1f} %" for value in (one.precision, one.recall)]
        assert table[one.name] == [f"{one.count:,}", *share]
    assert [row[4] for row in rows(page, "What its features are worth")] == [
        percent(row.top1) for row in found.probes
    ]
    for was, said, times, _ in rows(page, "What it confuses"):
        assert scores.confusion["abcdefg".index(was)]["abcdefg".index(said)] == int(times)
    titles = [section.title for section in page.sections]
    assert titles == [
        "Where it was sure and wrong",
        "Where it looks",
        "What it confuses",
        "Class by class",
        "How far its scores can be believed",
        "What its features are worth",
        "How this was measured",
    ]


def test_mistakes_come_with_their_pictures_and_where_the_model_looked():
    found, page, _, _, split = page_of(tuple("abc"))
    cards = page.sections[0].pictures
    assert len(cards) == 12
    for card, mistake in zip(cards, found.scores.mistakes, strict=False):
        assert card.title == f"Said {mistake.said}"
        assert card.lines == [f"It shows {mistake.was}", f"{percent(mistake.score)} sure", mistake.name]
        (picture, alt), (over, where) = card.views
        levels = np.asarray(Image.open(io.BytesIO(picture)))
        assert np.array_equal(levels, split.images[int(mistake.name.split()[1])][..., 0])
        assert np.asarray(Image.open(io.BytesIO(over))).shape == (8, 8, 3)  # in colour
        assert alt == f"A picture of {mistake.was}, as the model sees it"
        assert re.fullmatch(r"where the model looked: mostly at row [12] of 2, column [12] of 2", where)


def test_examples_are_taken_evenly_and_judged():
    found, page, _, _, split = page_of(tuple("abc"))
    cards = page.sections[1].pictures
    assert [card.lines[2] for card in cards] == [f"picture {i}" for i in evenly(60, 8)]
    for card in cards:
        was = found.classes[split.labels[int(card.lines[2].split()[1])]]
        said = card.title.removeprefix("Said ")
        assert card.lines[0] == ("Right" if said == was else f"Wrong: it shows {was}")
    assert evenly(60, 8) == [3, 11, 18, 26, 33, 41, 48, 56]
    assert evenly(3, 8) == [0, 1, 2]
    assert evenly(0, 8) == []


def test_hostile_names_are_text_in_page_and_drawings():
    names = [*EVIL[:9], "$\\frac{1$"]
    _, page, read, _, _ = page_of(tuple(names))
    check_safe(read)
    for name in EVIL[:7]:
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
def test_any_model(fields):
    bundle = vt.Bundle(model=model_of(2, **fields), labels=["a", "b"])
    data = data_of(bundle, "ab")
    found = evaluate(bundle, data)
    for section in (*mistakes(found, bundle, data.val), *examples(found, bundle, data.val)):
        assert len(section.pictures) >= 8
        assert all(len(card.views) == 2 for card in section.pictures)


def test_several_classes():
    found, page, read, _, _ = page_of(tuple("abc"), several=True)
    assert f"{percent(found.scores.mean_ap)} mean average precision" in read.text
    assert f"{percent(found.scores.exact)} of 60 pictures with every class right" in read.text
    assert "How far its scores can be believed" not in read.text
    assert rows(page, "Class by class")[0][4].endswith(" %")


def test_many_classes_have_tables_in_place_of_drawings():
    names = [f"class {i}" for i in range(31)]
    found, page, *_ = page_of(tuple(names))
    assert [len(section.figures) for section in page.sections[2:4]] == [0, 0]
    assert len(rows(page, "Class by class")) == 31
    many = dataclasses.replace(found.scores, confusion=np.ones((31, 31), int).tolist())
    [section] = confusions(dataclasses.replace(found, scores=many))
    assert len(section.tables[0].rows) == 20
    _, page, *_ = page_of(tuple(f"class {i}" for i in range(201)))
    assert "What it confuses" not in [section.title for section in page.sections]
    assert len(rows(page, "Class by class")) == 200


def test_a_model_without_a_head():
    bundle = vt.Bundle(model=model_of(0))
    data = data_of(bundle, "ab")
    found = evaluate(bundle, data, probe=["knn"])
    read = Read(render(evaluation_page(found, bundle, data.val)))
    assert f"{percent(max(row.top1 for row in found.probes))} right by the best probe" in read.text
    assert "Where it looks" not in read.text


def test_real_labels_corrupt_files_and_notes():
    bundle = vt.Bundle(model=model_of(2), labels=["a", "b"])
    data = data_of(bundle, "ab")
    found = evaluate(bundle, data, real=[[0, 1]] * 50 + [[]] * 10)
    found = dataclasses.replace(found, corrupt={EVIL[0]: "which is broken"}, notes=["one", "one", "two"])
    [better] = real(found)
    assert better.tables[0].rows[1] == ["by the ReaL labels", "100.0 %", "50"]
    broken, said = notes(found)
    assert broken.tables[0].rows == [(EVIL[0], "which is broken")]
    assert said.points == ["one", "two"]


def test_nothing_wrong():
    bundle = vt.Bundle(model=model_of(2), labels=["a", "b"])
    data = data_of(bundle, "ab")
    said = outputs_of(bundle.model, data.val, bundle.preprocess)[0].argmax(1).numpy()
    split = dataclasses.replace(data.val, labels=said)
    right = dataclasses.replace(data, val=split)
    found = evaluate(bundle, right)
    read = Read(render(evaluation_page(found, bundle, split)))
    assert "There is nothing to show: no answer was wrong." in read.text
    assert "No class was taken for another." in read.text
    assert "1, as these pictures hold nothing to fit it by" in read.text


# ---- parts ----------------------------------------------------------------------------------


def test_pictures_of_files_as_the_model_sees_them(tmp_path):
    chance = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path in paths:
        Image.fromarray(chance.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    paths[1].write_bytes(b"broken")
    bundle = vt.Bundle(model=model_of(2, channels=3))
    split = Split(np.zeros(3, np.int64), list("abc"), paths)
    first, last = look(bundle, split, [0, 1, 2])
    assert (first.place, last.place) == (0, 2)
    assert np.array_equal(last.pixels, bundle.preprocess.pixels(Image.open(paths[2])))
    images = torch.stack([bundle.preprocess(Image.open(paths[i])) for i in (0, 2)])
    with torch.no_grad():
        assert np.allclose(last.logits, bundle.model(images)[1].numpy(), atol=1e-5)
    maps = rollout.compute(bundle.model, images).maps.reshape(2, 2, 2)
    assert np.allclose(last.looked, maps[1], atol=1e-6)
    assert last.looked.sum() == pytest.approx(1)
    assert look(bundle, split, [1]) == []


def test_the_map_lies_over_its_patches():
    pixels = np.full((8, 13, 3), 200, np.uint8)
    looked = np.zeros((2, 4))
    looked[1, 2] = 1.0
    over = lay_over(pixels, looked, (4, 3)).astype(int)
    bright = np.zeros((8, 13), bool)
    bright[4:8, 6:9] = True
    assert (over[bright] == over[4, 6]).all()
    assert (over[~bright].sum(axis=1) < over[4, 6].sum()).all() or (over[:, 12] == 200).all()
    assert (over[:, 12] == 200).all()  # beyond the last whole patch nothing was seen
    assert over[0, 0].sum() < over[4, 6].sum()


def test_files_of_pictures():
    small, large = np.zeros((8, 8, 1), np.uint8), np.zeros((400, 800, 3), np.uint8)
    assert Image.open(io.BytesIO(encode(small))).format == "PNG"
    found = Image.open(io.BytesIO(encode(large)))
    assert (found.format, found.size) == ("JPEG", (320, 160))
    assert np.asarray(Image.open(io.BytesIO(encode(np.full((4, 4, 2), [0, 255], np.uint8))))).max() == 128


def test_wilson_by_hand():
    """Against the roots of (p - share)^2 = z^2 p (1 - p) / n, which the interval is."""
    for right, count in ((0, 10), (10, 10), (299, 360), (1, 1)):
        z, share = 1.96, right / count
        roots = np.roots([1 + z * z / count, -(2 * share + z * z / count), share * share])
        assert wilson(right, count) == pytest.approx(sorted(np.clip(roots.real, 0, 1)), abs=1e-7)


def test_numbers_in_words():
    assert [percent(share) for share in (0, 0.8306, 0.9996, 1)] == ["0.0 %", "83.1 %", "99.96 %", "100.0 %"]
    assert [size(n) for n in (5, 1500, 86_700_000, 2_000_000_000)] == [
        "5 bytes",
        "1.5 kB",
        "86.7 MB",
        "2.0 GB",
    ]


def test_confused_pairs():
    found, *_ = page_of(tuple("abc"))
    table = np.array(found.scores.confusion)
    for was, said, times, share in confused(found.scores, 99):
        row = "abc".index(was)
        assert table[row, "abc".index(said)] == times
        assert share == times / table[row].sum()
    assert len(confused(found.scores, 99)) == (table * (1 - np.eye(3)) > 0).sum()


def test_the_reliability_diagram_has_both_lines():
    found, _, _, bundle, split = page_of(tuple("abc"))
    c = found.calibration
    logits = outputs_of(bundle.model, split, bundle.preprocess)[0].numpy()
    said, scores = surest(logits, c.temperature)
    wanted = reliability(scores, said == split.labels)
    assert [one.count for one in c.cooled] == [one.count for one in wanted]
    text = charts.reliability(c)
    assert "with the temperature" in text
    assert "with the temperature" not in charts.reliability(dataclasses.replace(c, cooled=[]))


@pytest.mark.parametrize("epochs", [1, 2, 300])
def test_curves_of_any_length(epochs):
    rows = [{"epoch": n + 1, "loss": 2.0 / (n + 1), "val_loss": 2.5 / (n + 1)} for n in range(epochs)]
    rows[0].pop("val_loss") if epochs > 1 else None
    text = charts.curve(rows, {"loss": "training", "val_loss": "held out"}, "loss")
    assert ET.fromstring(text).tag.endswith("svg")
    assert text == charts.curve(rows, {"loss": "training", "val_loss": "held out"}, "loss")


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
    assert f"To read in a browser: {page}" in " ".join(done.stdout.split("\n"))
    read = Read(page.read_text())
    check_safe(read)
    assert "tiny.safetensors on digits" in read.text
    assert len(read.all("img")) == 2 * (12 + 8) + 3
    assert base64.b64decode(read.all("img")[0]["src"].partition(",")[2])
    before = page.read_bytes()
    with pytest.raises(InputError, match=r"^--html must name a new file: nothing of yours is overwritten"):
        evaluated(file, "digits", "--html", page)
    with pytest.raises(InputError, match=r"^Each option needs a file of its own\."):
        evaluated(file, "digits", "--html", tmp_path / "new", "--json", tmp_path / "new")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra):
        evaluated(file, "digits", "--html", tmp_path / "new.html")
    assert page.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "tiny.safetensors"]
