"""The registry of the figures of `vitrail inspect`, in the order of the page: first the user's images, then
statistics over them, then the weights."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.base.errors import InputError, option, suggest
from vitrail.model.device import eval_mode
from vitrail.views import (
    ablation,
    attribution,
    distance,
    features,
    filters,
    lens,
    positions,
    rollout,
    scoring,
    similarity,
)
from vitrail.views import attention_maps as attention
from vitrail.views.canvas import save_figure
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.figure_images import check_images, check_index, device_of

_ON_IMAGES = attribution, rollout, attention, features, lens, scoring, distance, similarity, ablation
FIGURES: dict[str, FigureSpec] = {
    module.FIGURE.name: module.FIGURE for module in (*_ON_IMAGES, filters, positions)
}
_QUICK = 10.0  # seconds; a figure that takes longer is drawn if it is asked for


@dataclass(frozen=True)
class MadeFigure:
    """A figure on disk (NAME.png, NAME.svg and NAME.csv) with its caption."""

    spec: FigureSpec
    svg: Path
    caption: str
    rows: int
    """Number of rows in the CSV file."""


@dataclass(frozen=True)
class Inspection:
    """The figures of a model, and the reasons why others were skipped."""

    figures: list[MadeFigure]
    skipped: dict[str, str]


def inspect_model(
    request: InspectionRequest, folder: Path, only: Sequence[str] = (), every: bool = False
) -> Inspection:
    """Compute and draw figures into a folder.

    Args:
        only: names of figures; by default all that apply, or without images those of the weights.
        every: whether figures that take long are drawn, too.
    """
    check_images(request.model)
    config = request.model.config
    for what, number, count in (("layer", request.layer, config.depth), ("head", request.head, config.heads)):
        if number is not None:
            check_index(what, number, count)
    names = _choose(only, has_images=bool(request.paths))
    slow = {} if only or every or not request.paths else _slow_figures(request)
    figures, skipped = [], {}
    for number, name in enumerate(names):
        request.progress("figures", number, len(names))
        try:
            if name in slow:
                raise InputError(slow[name])
            figures.append(make_figure(FIGURES[name], request, folder))
        except InputError as error:
            if only:  # the user requested it
                raise
            skipped[name] = str(error)
    request.progress("figures", len(names), len(names))
    return Inspection(figures, skipped)


def make_figure(spec: FigureSpec, request: InspectionRequest, folder: Path) -> MadeFigure:
    """Compute and draw one figure and write its files."""
    result, figure = spec.make(request)
    _, svg = save_figure(figure, folder / spec.name)
    header, rows = spec.table(result)
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    (folder / f"{spec.name}.csv").write_text(text.getvalue(), encoding="utf-8")
    return MadeFigure(spec, svg, spec.caption(result), len(rows))


def _choose(only: Sequence[str], *, has_images: bool) -> list[str]:
    """The names of the figures to make, in the order of the page."""
    for name in only:
        if name not in FIGURES:
            raise InputError(f"unknown figure {name!r}. {suggest(name, FIGURES)}")
        if FIGURES[name].needs_images and not has_images:
            raise InputError(f"The figure {name!r} needs images; pass image paths after the model.")
    return [
        name
        for name, spec in FIGURES.items()
        if (name in only if only else has_images or not spec.needs_images)
    ]


def _slow_figures(request: InspectionRequest) -> dict[str, str]:
    """The figures that take long on this machine, by the time of a forward pass, and what to do."""
    try:
        images = request.drawn.images.to(device_of(request.model))
    except InputError:  # no image can be read, as every figure will say
        return {}
    times = []
    with eval_mode(request.model):
        for _ in range(3):  # the first pass is slower
            start = time.perf_counter()
            float(request.model(images).sum())  # waits for a GPU
            times.append(time.perf_counter() - start)
    slow = {}
    for name, spec in FIGURES.items():
        taken = min(times) * spec.passes(request.model.config) if spec.passes else 0.0
        if taken > _QUICK:
            how_long = f"{taken:.0f} s" if taken < 90 else f"{taken / 60:.0f} minutes"
            slow[name] = (
                f"It would take about {how_long}; draw it with {option('all', True)}, or alone with "
                f"{option('only', name)}."
            )
    return slow
