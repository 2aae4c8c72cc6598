"""The report of `vitrail inspect`: all figures that apply to a model, with captions.

The folder holds index.html, which is self-contained, and NAME.png, NAME.svg and NAME.csv for each figure. It
is written under a temporary name and renamed at the end, so it is complete or does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.base.errors import printable
from vitrail.base.safe_files import atomic_folder
from vitrail.model.config import format_sides
from vitrail.views.figure import InspectionRequest
from vitrail.views.figures import Inspection, MadeFigure, inspect_model
from vitrail.views.html_page import Figure, Page, Section, check_extras, write_page


def write_inspection(
    request: InspectionRequest,
    out: Path,
    *,
    only: Sequence[str] = (),
    every: bool = False,
    command: str = "",
) -> dict[str, str]:
    """Write the folder `out`; returns the skipped figures with the reasons.

    Args:
        only: names of figures; by default all that apply, or without images those of the weights.
        every: whether figures that take long are drawn, too.
    """
    check_extras()
    with atomic_folder(out) as folder:
        inspection = inspect_model(request, folder, only, every)
        write_page(folder / "index.html", _page(request, inspection, command))
    return inspection.skipped


def _section(made: MadeFigure) -> Section:
    spec = made.spec
    image = made.svg.read_text(encoding="utf-8")
    figure = Figure(image, f"{spec.title}: {made.caption}", wide=True)
    files = f"Files: {spec.name}.png, {spec.name}.svg, {spec.name}.csv ({made.rows:,} rows)."
    return Section(spec.title, figures=[figure], how_to_read=made.caption, text=[files])


def _page(request: InspectionRequest, inspection: Inspection, command: str) -> Page:
    """Build the page: the figures, the model, and what was skipped."""
    config, name = request.model.config, request.bundle.card.name or "a model"
    count = len(request.paths)
    images = f" and {count:,} image{'s' * (count != 1)}" if count else ""
    prefix = f"{config.prefix} + " if config.prefix else ""
    tokens = f"{prefix}{format_sides(config.grid)} patches of {format_sides(config.patch_pixels)} pixels"
    facts: list[tuple[str, object]] = [
        ("parameters", f"{sum(p.numel() for p in request.model.parameters()):,}"),
        ("blocks and heads", f"{config.depth} blocks of {config.heads} heads, width {config.width}"),
        ("tokens", tokens),
        ("positions", config.position),
        ("pool", config.pool),
        *([("scores", request.bundle.scores.summary())] if config.classes else []),
        ("preprocessing", "; ".join(request.preprocess.describe())),
    ]
    sections = [*map(_section, inspection.figures), Section("The model", facts=facts)]
    for title, reasons in (
        ("Figures that were not drawn", inspection.skipped),
        ("Images that could not be read", request.corrupt.reasons),
    ):
        if reasons:
            sections.append(Section(title, points=[f"{name}: {reason}" for name, reason in reasons.items()]))
    lead = [f"Figures of {name}, computed from its weights{images}.", *filter(None, [request.trained_on()])]
    return Page(f"Inspection of {printable(name)}", lead=lead, sections=sections, command=command)
