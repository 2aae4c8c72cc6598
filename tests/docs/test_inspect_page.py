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
