"""Draw the three figures of the lecture, trained beside random, and write them into docs/inspect.md.

python -m docs.lecture_figures deit_tiny_imagenet1k.safetensors photos/
python -m docs.lecture_figures tiny.safetensors cifar10-test/ --section small --name "The small model"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from vitrail.model import ViT
from vitrail.views import distance, filters, positions
from vitrail.views.canvas import save_figure
from vitrail.views.figure_images import from_files
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.load import load

PAGE = Path(__file__).parent / "inspect.md"
IMAGES = Path(__file__).parent / "images"
COUNT = 64
TITLES = {
    "filters": "Filters of E (Fig. 7, left)",
    "positions": "Similarity of the positions (Fig. 7, center)",
    "distance": "How far the heads look (Fig. 7, right)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--section", default="lecture", help="of the page: lecture or small")
    parser.add_argument("--name", default="DeiT-Ti", help="what the captions call the model")
    options = parser.parse_args()
    bundle = load(options.model)
    assert bundle.preprocess is not None
    files = sorted(file for file in options.images.rglob("*") if file.suffix.lower() in (".jpg", ".png"))
    images = from_files(files[:: max(1, len(files) // COUNT)][:COUNT], bundle.preprocess).images
    torch.manual_seed(0)
    random = Bundle(model=ViT(bundle.model.config), preprocess=bundle.preprocess)
    captions = {
        name: draw_figures(IMAGES / options.section, name, one.model.eval(), images)
        for name, one in (("trained", bundle), ("random", random))
    }
    begin, end = f"<!-- {options.section} -->", f"<!-- end of {options.section} -->"
    before, rest = PAGE.read_text().split(begin)
    text = written(captions, options.section, options.name)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def draw_figures(out: Path, name: str, model: ViT, images: torch.Tensor) -> dict[str, str]:
    """Save the three figures of one model, and return their captions."""
    out.mkdir(parents=True, exist_ok=True)
    made: dict[str, tuple[Any, Any]] = {
        "filters": (filters, filters.compute(model)),
        "positions": (positions, positions.compute(model)),
        "distance": (distance, distance.compute(model, images)),
    }
    with TemporaryDirectory() as folder:
        for figure, (module, result) in made.items():
            save_figure(module.draw(result), Path(folder, figure))
            image = Image.open(Path(folder, f"{figure}.png"))
            reduced = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
            reduced.save(out / f"{name}-{figure}.png", optimize=True)
    return {figure: module.caption(result) for figure, (module, result) in made.items()}


def written(captions: dict[str, dict[str, str]], section: str, model: str) -> str:
    """For each figure, the trained and the random model with their captions."""
    parts = []
    for figure, title in TITLES.items():
        parts.append(f"### {title}")
        for name, words in (("trained", model), ("random", "The same model before training")):
            parts.append(f"![{title}, {name}](images/{section}/{name}-{figure}.png)")
            parts.append(f"*{words}.* {captions[name][figure]}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
