"""What a vitrail file says of its model, in one JSON object: read without torch, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import FileError, printable
from vitrail.base.fields import as_tuples
from vitrail.base.safe_files import parse_json
from vitrail.images.fingerprint import Fingerprint, read_fingerprint
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.bundle import FORMAT, Card, Source, check_labels, check_preprocess
from vitrail.weights.bundle.scores import parse_scores
from vitrail.weights.readers.folder import ModelFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PARTS = (
    *("format", "config", "preprocess", "labels", "scores", "card", "source", "notes", "fingerprint"),
    "native",
)


def read_header(file: ModelFiles) -> dict[str, Any] | None:
    """The JSON object of a vitrail file, checked; None for other files."""
    if "vitrail" not in file.metadata:
        return None
    header = parse_json(file.metadata["vitrail"], f"the description in {file.path}", allow_nan=True)
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise _damaged(file, "it has no format version")
    if header["format"] > FORMAT:
        raise FileError(
            f"{printable(file.path)} has format {header['format']}, but this vitrail reads formats up to "
            f"{FORMAT}; install a newer vitrail."
        )
    unknown = [key for key in header if key not in _PARTS]
    if unknown or not isinstance(header.get("config"), dict):
        raise _damaged(file, f"it has unknown keys {unknown}" if unknown else "it has no config")
    return header


def stored_fingerprint(file: ModelFiles) -> Fingerprint | None:
    """Which images the model of a vitrail file was trained on; None if it does not say so. No torch."""
    import numpy as np

    header = read_header(file)
    if header is None:
        return None
    entries = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}

    def read(name: str) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype=entries[name][0]), *file.chunks(name)])

    try:
        return read_fingerprint(header.get("fingerprint"), entries, read)
    except ValueError as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: ModelFiles, reason: str) -> FileError:
    return FileError(
        f"The description of the model in {printable(file.path)} is damaged: {printable(reason)}. "
        "Save it again."
    )


def parse_header(file: ModelFiles, header: Mapping[str, Any]) -> dict[str, Any]:
    """Config, preprocessing, labels, scores, card, source and notes of a vitrail file, each checked."""
    try:
        config = ViTConfig(**as_tuples(header["config"]))
        spec = header.get("preprocess")
        preprocess = None if spec is None else Preprocess(**as_tuples(spec))
        labels = header.get("labels")
        source = header.get("source")
        parts = {
            "config": config,
            "preprocess": preprocess,
            "labels": None if labels is None else check_labels(labels, config.classes),
            "scores": parse_scores(header.get("scores"), config.classes),
            "card": Card(**_current_names(header.get("card", {}))),
            "source": None if source is None else Source(**{**source, "tensors": _read_tensors(source)}),
            "notes": [str(note) for note in header.get("notes", [])],
            "native": None if header.get("native") is None else dict(header["native"]),
        }
        check_preprocess(preprocess, config)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _damaged(file, str(error).removesuffix(".")) from error
    return parts


def _current_names(card: Mapping[str, Any]) -> dict[str, Any]:
    """A card's fields as they are called now; version 0.1 wrote "licence"."""
    return {{"licence": "license"}.get(name, name): value for name, value in card.items()}


def _read_tensors(source: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        str(n): (str(dtype), tuple(int(s) for s in shape)) for n, (dtype, shape) in source["tensors"].items()
    }
