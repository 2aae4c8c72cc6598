"""Draw the figures of docs/inspect.md and write their captions into it: python -m docs.inspect"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from vitrail.views.figures import FIGURES, make_figure
from vitrail.views.sample import sample_request

PAGE = Path(__file__).parent / "inspect.md"
IMAGES = Path(__file__).parent / "images" / "inspect"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def written(captions: dict[str, str]) -> str:
    """One section per figure: title, image and caption."""
    parts = []
    for name, caption in captions.items():
        title = FIGURES[name].title
        parts.append(
            f"### {name}: {title[0].lower()}{title[1:]}\n\n![{title}](images/inspect/{name}.png)\n\n{caption}"
        )
    return "\n\n".join(parts)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    captions = {}
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "digits").mkdir()
        request = sample_request(folder / "digits")
        for name in FIGURES:
            captions[name] = make_figure(FIGURES[name], request, folder).caption
            image = Image.open(folder / f"{name}.png")
            reduced = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
            reduced.save(IMAGES / f"{name}.png", optimize=True)  # a third of the size
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{written(captions)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
