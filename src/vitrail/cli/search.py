"""`vitrail search`: the images of an index that are most like an image, or like some words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from vitrail.base.errors import InputError, printable
from vitrail.cli.options import ModelOptions
from vitrail.cli.outputs import check_new_files, this_command

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.predict import Predictor


def search(
    index: Path = Argument(..., help="An index of vitrail embed."),
    query: str = Argument(..., metavar="IMAGE|WORDS", help="An image file, or words in quotes."),
    top: int = Option(20, min=1, max=100_000, help="Images to list."),
    html_file: Path | None = Option(
        None, "--html", help="Save a page with the images to this new HTML file."
    ),
    as_json: bool = Option(False, "--json", help="Print the images as JSON."),
    model: str | None = Option(
        None, "--model", metavar="MODEL", help="The model of the index.", show_default="the path in the index"
    ),
    *,
    opening: ModelOptions,
) -> None:
    """Find the images of an index that are like an image, or like words.

    The score is the cosine of the embeddings, at most 1. All images are compared. Words need a CLIP or SigLIP
    model; their cosines with images are small numbers even for good matches, so only their order counts.

    The model is the one that made the index, with the --size, --family, --keys and --set that it had then.
    """
    check_new_files({"--html": html_file})

    from vitrail.images.formats.folders import SUFFIXES
    from vitrail.predict import Predictor
    from vitrail.predict.index import read_index
    from vitrail.weights.readers.folder import is_hub_name

    is_image = Path(query).exists() or Path(query).suffix.lower() in SUFFIXES
    opened = read_index(index)
    name = model or opened.model_path()
    if not name:
        raise InputError(f"{printable(index)} does not say which model made it; give --model.")
    if model is None and not is_hub_name(name) and not Path(name).exists():
        raise InputError(
            f"The model that made the index, {printable(name)}, does not exist any more; give its path "
            "with --model."
        )
    predictor = Predictor(
        name, workers=0, native=opened.native, **{**opened.arguments, **opening.arguments()}
    )
    opening.print_notes(predictor)
    opened.check_model(predictor)
    hits = opened.search(_embed_query(predictor, query, is_image), top)
    if as_json:
        print(json.dumps([{"file": hit.name, "score": hit.score} for hit in hits], indent=2))
    else:
        print(f"{'score':6}  file")
        for hit in hits:
            print(f"{hit.score:6.4f}  {printable(hit.name)}")
    if html_file is not None:
        from vitrail.views.html_page import write_page
        from vitrail.views.search_page import search_page

        found = [(opened.path(hit.name), hit.score) for hit in hits]
        write_page(
            html_file, search_page(found, len(opened.names), query, is_image=is_image, command=this_command())
        )
        if not opening.quiet and not as_json:
            print(f"page: {printable(html_file)}")


def _embed_query(predictor: Predictor, query: str, is_image: bool) -> NDArray[np.float32]:
    """The vector of an image file, or of words."""
    from vitrail.predict.index import build_index, unit

    if not is_image:
        if predictor.bundle is None or not predictor.bundle.has_text:
            raise InputError(
                f"{printable(query)!r} is not a file, and the model of the index has no text tower to search "
                "by words; name an image, or make the index with a CLIP or SigLIP model."
            )
        return unit(predictor.bundle.text([query]).cpu().numpy())[0]
    found = build_index(predictor, [query])
    if len(found.names) != 1:
        reason = printable(next(iter(found.errors.values()), "")).removesuffix(".")
        reason = "it is a folder" if Path(query).is_dir() else reason
        raise InputError(
            f"{printable(query)} cannot be searched for: {reason}. Name an image file, or words in quotes."
        )
    return found.embeddings[0]
