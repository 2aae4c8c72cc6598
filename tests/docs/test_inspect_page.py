"""docs/inspect.md shows every figure there is."""

from PIL import Image

from docs import inspect as page
from vitrail.inspect.figures import FIGURES


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


def test_the_figures_of_the_lecture_are_shown_trained_and_random():
    """`python -m docs.lecture_figures MODEL PHOTOS` draws them."""
    from docs import lecture_figures

    text = page.PAGE.read_text().split(lecture_figures.BEGIN)[1].split(lecture_figures.END)[0]
    names = {f"{kind}-{figure}" for kind in ("trained", "random") for figure in lecture_figures.TITLES}
    assert {path.stem for path in lecture_figures.IMAGES.iterdir()} == names
    assert all(f"(images/lecture/{name}.png)" in text for name in names)
    assert text.count("as in the ViT paper") == 3  # of the trained model
