"""The report of an inspection: all figures that apply, complete or not at all."""

import csv
import os

import numpy as np
import pytest
from PIL import Image

import vitrail as vt
from tests.support.read_pages import HOSTILE_NAMES, ParsedPage, check_safe
from vitrail.base.errors import InputError
from vitrail.views import figures
from vitrail.views.figure import InspectionRequest
from vitrail.views.figures import FIGURES
from vitrail.views.inspection_page import write_inspection

pytestmark = pytest.mark.slow  # all figures of several models

OF_WEIGHTS = {name for name, spec in FIGURES.items() if not spec.needs_images}

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


def test_all_figures_of_a_model_and_images(tmp_path, photos):
    calls = []
    request = InspectionRequest(bundle_of(), photos, max_images=2, progress=lambda *args: calls.append(args))
    assert write_inspection(request, tmp_path / "out", command="vitrail inspect x y") == {}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"index.html", *(f"{n}.{kind}" for n in FIGURES for kind in ("png", "svg", "csv"))}
    read = ParsedPage((tmp_path / "out" / "index.html").read_text())
    check_safe(read)
    assert len(read.all("img")) == len(FIGURES)
    for title in (spec.title for spec in FIGURES.values()):
        assert title in read.text
    for name in FIGURES:
        with open(tmp_path / "out" / f"{name}.csv", newline="") as file:
            header, *rows = csv.reader(file)
        assert rows
        assert {len(row) for row in rows} == {len(header)}
    assert calls[-1] == ("figures", len(FIGURES), len(FIGURES))
    assert ("distance", 3, 3) in calls
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_figures_that_take_long_are_named_with_their_time(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(figures, "_QUICK", 0.0)
    missing = write_inspection(InspectionRequest(bundle_of(), photos), tmp_path / "quick")
    assert set(missing) == {"attribution", "scoring", "ablation"}
    assert (
        "It would take about 0 s; draw it with all=True, or alone with only='scoring'" in missing["scoring"]
    )
    page = ParsedPage((tmp_path / "quick" / "index.html").read_text()).text
    assert f"ablation: {missing['ablation']}" in page
    assert write_inspection(InspectionRequest(bundle_of(), photos), tmp_path / "all", every=True) == {}
    only = ["ablation"]
    assert write_inspection(InspectionRequest(bundle_of(), photos), tmp_path / "one", only=only) == {}


def test_without_images_the_figures_of_the_weights(tmp_path):
    write_inspection(InspectionRequest(bundle_of()), tmp_path / "out")
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == OF_WEIGHTS


def test_skipped_figures_are_listed_unless_they_were_requested(tmp_path):
    request = InspectionRequest(bundle_of(position="none"))
    missing = write_inspection(request, tmp_path / "out")
    assert list(missing) == ["positions"]
    assert "Figures that were not drawn" in ParsedPage((tmp_path / "out" / "index.html").read_text()).text
    with pytest.raises(InputError):
        write_inspection(request, tmp_path / "other", only=["positions"])
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
def test_figures_of_other_layouts(tmp_path, photos, change):
    missing = write_inspection(InspectionRequest(bundle_of(**change), photos[:1]), tmp_path / "out")
    without_head = {"attribution", "scoring", "lens", "ablation"}
    assert set(missing) <= (without_head if change.get("classes") == 0 else set()), missing


def test_hostile_names_are_escaped(tmp_path, photos):
    for n, name in enumerate(HOSTILE_NAMES):
        path = photos[0].with_name(name.replace("/", "_").replace("\x00", "")[:60] + f"{n}.png")
        path.write_bytes(photos[0].read_bytes())
    labels = ["<script>alert(1)</script>", "\"'>", "$x_1$"]
    request = InspectionRequest(bundle_of(labels), sorted(photos[0].parent.iterdir()))
    request.bundle.card = vt.Card(name="<b>bold</b>")
    write_inspection(request, tmp_path / "out", only=["attribution", "lens", "features"])
    read = ParsedPage((tmp_path / "out" / "index.html").read_text())
    check_safe(read)
    assert "<b>bold</b>" in read.text


def test_a_broken_image_is_named_and_skipped(tmp_path, photos):
    photos[1].write_bytes(b"no image")
    request = InspectionRequest(bundle_of(), photos)
    write_inspection(request, tmp_path / "out", only=["rollout", "distance"])
    [(name, _)] = request.corrupt.reasons.items()
    assert name.endswith("1.png")
    assert "1.png" in ParsedPage((tmp_path / "out" / "index.html").read_text()).text
    for path in photos:
        path.write_bytes(b"no image")
    with pytest.raises(InputError, match=r"None of the 3 images could be read"):
        write_inspection(InspectionRequest(bundle_of(), photos), tmp_path / "none", only=["rollout"])
    assert not (tmp_path / "none").exists()
    missing = write_inspection(InspectionRequest(bundle_of(), photos), tmp_path / "weights")
    assert set(missing) == set(FIGURES) - OF_WEIGHTS


def test_a_folder_filled_in_the_meantime_is_not_replaced(tmp_path, monkeypatch):
    def make_and_fill(spec, request, folder):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine.txt").write_text("mine")
        return make_figure(spec, request, folder)

    make_figure = figures.make_figure
    monkeypatch.setattr(figures, "make_figure", make_and_fill)
    with pytest.raises(OSError, match="not empty"):
        write_inspection(InspectionRequest(bundle_of()), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine.txt"]
    assert os.listdir(tmp_path) == ["out"]


def test_invalid_requests_are_rejected(tmp_path):
    with pytest.raises(InputError, match=r"unknown figure 'filter'. Did you mean"):
        write_inspection(InspectionRequest(bundle_of()), tmp_path / "out", only=["filter"])
    with pytest.raises(InputError, match=r"The figure 'rollout' needs images"):
        write_inspection(InspectionRequest(bundle_of()), tmp_path / "out", only=["rollout"])
    with pytest.raises(InputError, match="this one takes text"):
        write_inspection(
            InspectionRequest(
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
