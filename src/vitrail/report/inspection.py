"""The page of `vitrail inspect`: every figure that fits a model, and the numbers of each beside it.

The folder gets index.html, which needs no other file, and for each figure NAME.png, NAME.svg and
NAME.csv. It is written under another name and renamed at the end: whole, or not there.
"""

from __future__ import annotations

import csv
import io
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config import by
from vitrail.data.loader import Corrupt, Reader
from vitrail.data.sources import Split
from vitrail.errors import InputError, printable, suggest
from vitrail.inspect import (
    ablation,
    attention,
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
from vitrail.inspect.canvas import save
from vitrail.inspect.pictures import Pictures, check_number, check_pictures, from_pixels
from vitrail.report.page import Figure, Page, Section, check_extras, write_page
from vitrail.weights.bundle import Bundle

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

BATCH = 32  # pictures at once, for the statistics over all of them

Ahead = Callable[[str, int, int], None]


@dataclass(eq=False)
class Asked:
    """What is to be looked at: a model, some pictures to be drawn, and all of them to be counted."""

    bundle: Bundle
    paths: Sequence[Path] = ()
    most: int = 8
    """How many pictures are drawn."""
    layer: int | None = None
    head: int | None = None
    target: int | None = None
    """The class that the answers are explained for; each picture's own answer when not given."""
    ahead: Ahead = lambda name, done, of: None
    corrupt: Corrupt = field(default_factory=lambda: Corrupt("skip"))
    pictures: Pictures | None = None
    maps: dict[str, Any] = field(default_factory=dict)
    """The attributions, which the scoring judges."""

    def read(self, name: str) -> Iterator[tuple[list[str], Any]]:
        """All pictures that can be read, some at a time: names, and levels (b, H, W, C)."""
        spec = self.bundle.preprocess
        assert spec is not None
        names = [str(path) for path in self.paths]
        split = Split(np.zeros(len(names), dtype=np.int64), names, list(self.paths))
        reader = Reader(split, spec, augment=None, seed=0, workers=2, corrupt=self.corrupt)
        try:
            parts = torch.arange(len(names)).split(BATCH)
            for number, batch in enumerate(reader.batches((0, part) for part in parts)):
                kept = batch.kept > 0
                seen = [names[int(i)] for i in batch.indices[kept]]
                if seen:
                    yield seen, batch.images[kept].permute(0, 2, 3, 1).numpy()
                self.ahead(name, min((number + 1) * BATCH, len(names)), len(names))
        finally:
            reader.close()

    def batches(self, name: str) -> Iterator[Tensor]:
        """The same, as the model takes them."""
        assert self.bundle.preprocess is not None
        for names, pixels in self.read(name):
            yield from_pixels(pixels, self.bundle.preprocess, names).images

    def drawn(self) -> Pictures:
        """The first pictures that can be read."""
        if self.pictures is None:
            assert self.bundle.preprocess is not None
            names: list[str] = []
            found: list[Any] = []
            for some, pixels in self.read("pictures"):
                names, found = names + some, [*found, *pixels]
                if len(names) >= self.most:
                    break
            if not names:
                reason = next(iter(self.corrupt.names.values()), "There are none.")
                got = f"{len(self.paths):,}, none of which could"
                raise InputError("There must be pictures that can be read.", got, reason)
            spec, shown = self.bundle.preprocess, [Path(name).name for name in names[: self.most]]
            self.pictures = from_pixels(np.stack(found[: self.most]), spec, shown)
        return self.pictures


Made = tuple[Any, Any, "Drawing"]  # the figure's module, what it computed, and its drawing


def of_filters(ask: Asked) -> Made:
    found = filters.compute(ask.bundle.model)
    return filters, found, filters.draw(found)


def of_positions(ask: Asked) -> Made:
    found = positions.compute(ask.bundle.model, head=ask.head)
    return positions, found, positions.draw(found)


def of_attention(ask: Asked) -> Made:
    seen = ask.drawn()
    layer = -1 if ask.layer is None else ask.layer
    found = attention.compute(ask.bundle.model, seen.images, layer=layer, head=ask.head)
    return attention, found, attention.draw(found, seen.pixels)


def of_rollout(ask: Asked) -> Made:
    seen = ask.drawn()
    method: rollout.Method = "both" if ask.bundle.model.config.classes else "rollout"
    found = rollout.compute(ask.bundle.model, seen.images, method=method, target=ask.target)
    return rollout, found, rollout.draw(found, seen.pixels)


def of_distance(ask: Asked) -> Made:
    found = distance.compute(ask.bundle.model, ask.batches("distance"))
    return distance, found, distance.draw(found)


def of_features(ask: Asked) -> Made:
    seen = ask.drawn()
    found = features.compute(ask.bundle.model, seen.images)
    return features, found, features.draw(found, seen)


def of_similarity(ask: Asked) -> Made:
    found = similarity.compute(ask.bundle.model, ask.drawn().images)
    return similarity, found, similarity.draw(found)


def of_attribution(ask: Asked) -> Made:
    seen = ask.drawn()
    found = attribution.compute(ask.bundle.model, seen.images, target=ask.target)
    ask.maps = found.maps
    return attribution, found, attribution.draw(found, seen.pixels, ask.bundle.labels)


def of_scoring(ask: Asked) -> Made:
    maps = ask.maps or attribution.compute(ask.bundle.model, ask.drawn().images, target=ask.target).maps
    found = scoring.compute(ask.bundle.model, ask.drawn().images, maps, target=ask.target)
    return scoring, found, scoring.draw(found)


def of_lens(ask: Asked) -> Made:
    found = lens.compute(ask.bundle.model, ask.drawn().images, target=ask.target)
    return lens, found, lens.draw(found, ask.bundle.labels, ask.drawn().names)


def of_ablation(ask: Asked) -> Made:
    found = ablation.compute(ask.bundle.model, ask.drawn().images)
    return ablation, found, ablation.draw(found)


OF_WEIGHTS: dict[str, tuple[str, Callable[[Asked], Made]]] = {
    "filters": ("What the patch embedding looks for", of_filters),
    "positions": ("What the positions know of each other", of_positions),
}
OF_PICTURES: dict[str, tuple[str, Callable[[Asked], Made]]] = {
    "attention": ("Where one block looks", of_attention),
    "rollout": ("Where the whole model looks", of_rollout),
    "attribution": ("Which patches made the answer", of_attribution),
    "scoring": ("Which of these to believe", of_scoring),
    "lens": ("When it knows the answer", of_lens),
    "distance": ("How far it looks", of_distance),
    "features": ("What it sees in each patch", of_features),
    "similarity": ("How far apart the blocks are", of_similarity),
    "ablation": ("What it would miss", of_ablation),
}
FIGURES = {**OF_WEIGHTS, **OF_PICTURES}


def write_inspection(ask: Asked, out: Path, *, only: Sequence[str] = (), command: str = "") -> dict[str, str]:
    """Write the folder `out`; returns the figures that do not fit this model, and why.

    Args:
        only: names of figures; all that fit when not given, without pictures those of the weights.
    """
    check_extras()
    check_pictures(ask.bundle.model)
    config = ask.bundle.model.config
    for what, number, count in (("--layer", ask.layer, config.depth), ("--head", ask.head, config.heads)):
        if number is not None:  # said here: a figure that refuses it would be left out instead
            check_number(what, number, count)
    names = chosen(only, bool(ask.paths))
    aside = out.parent / f".{secrets.token_hex(8)}.part"
    out.parent.mkdir(parents=True, exist_ok=True)
    aside.mkdir()
    try:
        sections, missing = [], {}
        for number, name in enumerate(names):
            ask.ahead("figures", number, len(names))
            try:
                sections.append(make(name, ask, aside))
            except InputError as error:
                if only:  # it was asked for by its name
                    raise
                missing[name] = str(error)
        ask.ahead("figures", len(names), len(names))
        write_page(aside / "index.html", page_of(ask, sections, missing, command))
        if out.is_dir():
            out.rmdir()  # empty, or the system says no
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return missing


def chosen(only: Sequence[str], pictures: bool) -> list[str]:
    """The figures to make, in their order; those of pictures need some."""
    for name in only:
        if name not in FIGURES:
            raise InputError("A figure must be one there is.", repr(name), suggest(name, FIGURES))
        if name in OF_PICTURES and not pictures:
            raise InputError(f"The figure {name} needs pictures.", "none", "Name some after the model.")
    wanted = only or (FIGURES if pictures else OF_WEIGHTS)
    return [name for name in FIGURES if name in wanted]


def make(name: str, ask: Asked, folder: Path) -> Section:
    """Compute and draw one figure, write its files, and its section of the page."""
    title, function = FIGURES[name]
    module, found, drawing = function(ask)
    png, svg = save(drawing, folder / name)
    header, rows = module.table(found)
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    (folder / f"{name}.csv").write_text(text.getvalue(), encoding="utf-8")
    words = module.caption(found)
    photo = name in OF_PICTURES and name not in ("scoring", "lens", "distance", "similarity", "ablation")
    image: str | bytes = png.read_bytes() if photo else svg.read_text(encoding="utf-8")
    figure = Figure(image, f"{title}: {words}", wide=True, photo=photo)
    files = f"Files: {name}.png, {name}.svg, {name}.csv ({len(rows):,} rows)."
    return Section(title, figures=[figure], how_to_read=words, text=[files])


def page_of(ask: Asked, sections: list[Section], missing: dict[str, str], command: str) -> Page:
    """Figures first, then what could not be drawn or read, then the model."""
    model, spec = ask.bundle.model, ask.bundle.preprocess
    assert spec is not None
    c, count = model.config, sum(p.numel() for p in model.parameters())
    name = ask.bundle.card.name or "a model"
    lead = (
        [f"What {name} has learned, and what it makes of {len(ask.paths):,} pictures."] if ask.paths else []
    )
    prefix = f"{c.prefix} + " if c.prefix else ""
    facts: list[tuple[str, object]] = [
        ("parameters", f"{count:,}"),
        ("blocks and heads", f"{c.depth} blocks of {c.heads} heads, width {c.width}"),
        ("tokens", f"{prefix}{by(c.grid)} patches of {by(c.patch_pixels)} pixels"),
        ("positions", c.position),
        ("pool", c.pool),
        ("picture", "; ".join(spec.describe())),
    ]
    tail = [Section("The model", facts=facts)]
    if missing:
        tail.append(
            Section("What does not fit this model", points=[f"{n}: {why}" for n, why in missing.items()])
        )
    if ask.corrupt.names:
        lines = [f"{file}: {why}" for file, why in ask.corrupt.names.items()]
        tail.append(Section("Pictures that could not be read", points=lines))
    return Page(f"Seeing through {printable(name)}", lead=lead, sections=[*sections, *tail], command=command)
