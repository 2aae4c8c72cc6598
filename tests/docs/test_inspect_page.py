"""docs/inspect.md shows every figure there is."""

import pytest
from PIL import Image

from docs import inspect as page
from vitrail.views.figures import FIGURES


def test_every_figure_has_its_section_and_its_image():
    text = page.PAGE.read_text()
    _, figures = text.split(page.BEGIN)
    sections = figures.split(page.END)[0].split("\n### ")[1:]
    assert [section.split(":")[0] for section in sections] == list(FIGURES)
    for name, section in zip(FIGURES, sections, strict=True):
        assert f"(images/inspect/{name}.png)" in section
        assert len(section.split("\n\n")[-1].strip()) > 150  # its caption
        with Image.open(page.IMAGES / f"{name}.png") as image:
            assert image.size[0] >= 400
    assert {path.stem for path in page.IMAGES.iterdir()} == set(FIGURES)


def test_a_section_is_title_image_and_caption():
    title = FIGURES["lens"].title
    assert page.written({"lens": "Words."}) == (
        f"### lens: {title[0].lower()}{title[1:]}\n\n![{title}](images/inspect/lens.png)\n\nWords."
    )


@pytest.mark.parametrize(("section", "shown"), [("lecture", 3), ("small", 3)])
def test_the_figures_of_the_lecture_are_shown_trained_and_random(section, shown):
    """`python -m docs.lecture_figures MODEL PHOTOS` draws them."""
    from docs import lecture_figures

    text = page.PAGE.read_text().split(f"<!-- {section} -->")[1].split(f"<!-- end of {section} -->")[0]
    names = {f"{kind}-{figure}" for kind in ("trained", "random") for figure in lecture_figures.TITLES}
    assert {path.stem for path in (lecture_figures.IMAGES / section).iterdir()} == names
    assert all(f"(images/{section}/{name}.png)" in text for name in names)
    assert text.count("as in the ViT paper") == shown  # of the trained model
