"""The registry of figures."""

import pytest
from matplotlib.figure import Figure

from vitrail.views import figures
from vitrail.views.figure import FigureSpec, InspectionRequest
from vitrail.views.inspection_page import write_inspection
from vitrail.views.sample import sample_model


@pytest.fixture
def blank_figure(monkeypatch):
    spec = FigureSpec(
        "blank",
        "A blank figure",
        lambda request: (request.model.config.depth, Figure()),
        caption=lambda depth: f"The model has {depth} blocks.",
        table=lambda depth: (["depth"], [[depth]]),
        needs_images=False,
    )
    monkeypatch.setitem(figures.FIGURES, spec.name, spec)


def test_a_new_figure_needs_its_declaration_and_one_list_entry(blank_figure, tmp_path):
    """By default it is computed, saved, and shown on the page with its title and caption."""
    assert write_inspection(InspectionRequest(sample_model()), tmp_path / "out") == {}
    assert {"blank.png", "blank.svg", "blank.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}
    page = (tmp_path / "out" / "index.html").read_text()
    depth = sample_model().model.config.depth
    assert "A blank figure" in page
    assert f"The model has {depth} blocks." in page


def test_every_module_with_a_figure_is_registered():
    files = {path.stem for path in figures.Path(figures.__file__).parent.glob("*.py")}
    declared = {
        name
        for name in files
        if "FIGURE = FigureSpec(" in (figures.Path(figures.__file__).parent / f"{name}.py").read_text()
    }
    files_of = {name: {"attention": "attention_maps"}.get(name, name) for name in figures.FIGURES}
    assert declared == set(files_of.values())
