"""The page of an inspection: every figure that fits, whole or not at all."""

import csv
import os

import numpy as np
import pytest
from PIL import Image

import vitrail as vt
from read_pages import EVIL, Read, check_safe
from vitrail.errors import InputError
from vitrail.report import inspection
from vitrail.report.inspection import FIGURES, OF_WEIGHTS, Asked, write_inspection

TINY = dict(width=32, depth=2, heads=2, patch=8, size=(24, 32), classes=3)


def bundle_of(labels=("a", "b", "c"), **change):
    config = vt.ViTConfig(**{**TINY, **change})
    return vt.Bundle(model=vt.ViT(config), labels=list(labels)[: config.classes] or None)


@pytest.fixture
def photos(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    folder.mkdir()
    for n in range(3):
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / f"{n}.png")
    return sorted(folder.iterdir())


def test_all_figures_of_a_model_and_pictures(tmp_path, photos):
    told = []
    ask = Asked(bundle_of(), photos, most=2, ahead=lambda *news: told.append(news))
    assert write_inspection(ask, tmp_path / "out", command="vitrail inspect x y") == {}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"index.html", *(f"{n}.{kind}" for n in FIGURES for kind in ("png", "svg", "csv"))}
    read = Read((tmp_path / "out" / "index.html").read_text())
    check_safe(read)
    assert len(read.all("img")) == len(FIGURES)
    for title, _ in FIGURES.values():
        assert title in read.text
    for name in FIGURES:
        with open(tmp_path / "out" / f"{name}.csv", newline="") as file:
            header, *rows = csv.reader(file)
        assert rows
        assert {len(row) for row in rows} == {len(header)}
    assert told[-1] == ("figures", len(FIGURES), len(FIGURES))
    assert ("distance", 3, 3) in told
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_without_pictures_the_figures_of_the_weights(tmp_path):
    write_inspection(Asked(bundle_of()), tmp_path / "out")
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == set(OF_WEIGHTS)


def test_what_does_not_fit_is_said_on_the_page_unless_it_was_asked_for(tmp_path):
    ask = Asked(bundle_of(position="none"))
    missing = write_inspection(ask, tmp_path / "out")
    assert list(missing) == ["positions"]
    assert "What does not fit this model" in Read((tmp_path / "out" / "index.html").read_text()).text
    with pytest.raises(InputError):
        write_inspection(ask, tmp_path / "other", only=["positions"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "change",
    [
        dict(class_token=False, pool="mean", position="sincos2d"),
        dict(registers=2, position="rotary"),
        dict(class_token=False, pool="attention", position="relative"),
        dict(distillation_token=True, head="distilled"),
        dict(classes=0),
    ],
    ids=lambda change: next(iter(change)) + str(len(change)),
)
def test_other_layouts(tmp_path, photos, change):
    missing = write_inspection(Asked(bundle_of(**change), photos[:1]), tmp_path / "out")
    without_head = {"attribution", "scoring", "lens", "ablation"}
    assert set(missing) <= (without_head if change.get("classes") == 0 else set()), missing


def test_hostile_names_are_text(tmp_path, photos):
    for n, name in enumerate(EVIL):
        place = photos[0].with_name(name.replace("/", "_").replace("\x00", "")[:60] + f"{n}.png")
        place.write_bytes(photos[0].read_bytes())
    labels = ["<script>alert(1)</script>", "\"'>", "$x_1$"]
    ask = Asked(bundle_of(labels), sorted(photos[0].parent.iterdir()))
    ask.bundle.card = vt.Card(name="<b>bold</b>")
    write_inspection(ask, tmp_path / "out", only=["attribution", "lens", "features"])
    read = Read((tmp_path / "out" / "index.html").read_text())
    check_safe(read)
    assert "<b>bold</b>" in read.text


def test_a_broken_picture_is_named_and_left_out(tmp_path, photos):
    photos[1].write_bytes(b"no picture")
    ask = Asked(bundle_of(), photos)
    write_inspection(ask, tmp_path / "out", only=["rollout", "distance"])
    [(name, _)] = ask.corrupt.names.items()
    assert name.endswith("1.png")
    assert "1.png" in Read((tmp_path / "out" / "index.html").read_text()).text
    for path in photos:
        path.write_bytes(b"no picture")
    with pytest.raises(
        InputError, match=r"There must be pictures that can be read. Got 3, none of which could"
    ):
        write_inspection(Asked(bundle_of(), photos), tmp_path / "none", only=["rollout"])
    assert not (tmp_path / "none").exists()


def test_a_folder_that_got_files_meanwhile_is_left_alone(tmp_path, monkeypatch):
    def make_and_fill(name, ask, folder):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine.txt").write_text("mine")
        return whole(name, ask, folder)

    whole = inspection.make
    monkeypatch.setattr(inspection, "make", make_and_fill)
    with pytest.raises(OSError, match="not empty"):
        write_inspection(Asked(bundle_of()), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine.txt"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_figure_that_is_none(tmp_path):
    with pytest.raises(InputError, match=r"A figure must be one there is. Got 'filter'. Did you mean"):
        write_inspection(Asked(bundle_of()), tmp_path / "out", only=["filter"])
    with pytest.raises(InputError, match=r"The figure rollout needs pictures. Got none. Name some"):
        write_inspection(Asked(bundle_of()), tmp_path / "out", only=["rollout"])
    with pytest.raises(InputError, match=r"The model must take pictures. Got one that takes text"):
        write_inspection(
            Asked(
                vt.Bundle(
                    model=vt.ViT(
                        vt.ViTConfig(
                            input="text",
                            vocabulary=9,
                            size=8,
                            patch=1,
                            width=32,
                            depth=1,
                            heads=2,
                            position="learned",
                            classes=2,
                        )
                    )
                )
            ),
            tmp_path / "out",
        )
