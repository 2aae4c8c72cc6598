"""The files of a part: CSV, JSON lines, Parquet, or NumPy arrays with a list of names beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, printable, require_extra, suggest
from vitrail.base.safe_files import atomic_file, write_array, write_text
from vitrail.predict.index import Embedder
from vitrail.predict.output_rows import cells, columns, format_rows
from vitrail.predict.prediction import Prediction
from vitrail.predict.predictor import Predictor

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = {"predict": ("csv", "jsonl", "parquet", "npy"), "embed": ("parquet", "npy")}


def check_format(form: str, content: str) -> None:
    """Refuse an unknown format, and one whose package is not installed."""
    if form not in FORMATS[content]:
        raise InputError(f"unknown format {form!r} for parts. {suggest(form, FORMATS[content])}")
    if form == "parquet":
        with require_extra("parquet"):
            import pyarrow.parquet  # noqa: F401


def is_complete(path: Path) -> bool:
    """Whether a part is there: no file of a part is empty, and names are written before their array."""
    files = [path, path.with_suffix(".json")] if path.suffix == ".npy" else [path]
    for file in files:
        if os.path.lexists(file) and not file.is_file():
            raise InputError(
                f"{printable(file)} must be a file with a part of the results, and is none; move it away and "
                "run the same command again."
            )
    return all(file.exists() and file.stat().st_size > 0 for file in files)


def write_errors(path: Path, predictions: Sequence[Prediction]) -> None:
    """List the images that have no prediction in part-000000.errors, before the part itself is there.

    The list of an earlier run, whose images may have been repaired since, is replaced or removed.
    """
    lines = [
        json.dumps({"file": one.name, "error": one.error}) for one in predictions if one.error is not None
    ]
    errors = path.with_suffix(".errors")
    if lines:
        write_text(errors, "".join(f"{line}\n" for line in lines), overwrite=True)
    else:
        errors.unlink(missing_ok=True)


def write_part(
    path: Path, predictions: Sequence[Prediction], predictor: Predictor, content: str, top: int
) -> None:
    """Write a part aside and rename it."""
    ood = predictor.engine.statistics is not None
    classes = predictor.config.classes
    form = path.suffix.removeprefix(".")
    if form in ("csv", "jsonl"):
        header, line = format_rows(form, top, classes, ood)
        write_text(path, header + "".join(map(line, predictions)), overwrite=True)
    elif form == "npy":
        names = json.dumps([one.name for one in predictions])
        write_text(path.with_suffix(".json"), names + "\n", overwrite=True)
        values = _vectors(predictions, predictor) if content == "embed" else _scores(predictions, predictor)
        write_array(path, values, overwrite=True)
    else:
        _write_parquet(path, predictions, predictor, content, min(top, classes), ood)


def _scores(predictions: Sequence[Prediction], predictor: Predictor) -> NDArray[np.float32]:
    """(N, K) the score of each class; NaN where there is no prediction."""
    scores = np.full((len(predictions), predictor.config.classes), np.nan, np.float32)
    for row, one in zip(scores, predictions, strict=True):
        if one.logits is not None:
            row[:] = one.scale.compute(one.logits[None])[0]
    return scores


def _vectors(predictions: Sequence[Prediction], predictor: Predictor) -> NDArray[np.float32]:
    """(N, E) embeddings of length 1, as `vitrail embed` has them; NaN where there is none."""
    embed = Embedder(predictor)
    vectors = np.full((len(predictions), embed.golden().shape[1]), np.nan, np.float32)
    for row, one in zip(vectors, predictions, strict=True):
        if one.embedding is not None:
            row[:] = embed.of(one)
    return vectors


def _write_parquet(
    path: Path, predictions: Sequence[Prediction], predictor: Predictor, content: str, top: int, ood: bool
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def text(value: Any) -> str | None:
        return value.encode("utf-8", "backslashreplace").decode() if value else None

    if content == "embed":
        vectors = _vectors(predictions, predictor)
        flat = pa.array(vectors.reshape(-1), pa.float32())
        table = {
            "file": pa.array([text(one.name) for one in predictions], pa.string()),
            "embedding": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
            "error": pa.array([text(one.error) for one in predictions], pa.string()),
        }
    else:
        rows = [cells(one, top, ood) for one in predictions]
        table = {}
        for name, values in zip(columns(top, ood), zip(*rows, strict=True), strict=True):
            numeric = "score" in name
            kept = (
                [None if value == "" else value for value in values] if numeric else list(map(text, values))
            )
            table[name] = pa.array(kept, pa.float64() if numeric else pa.string())
    with atomic_file(path, overwrite=True) as partial:
        pq.write_table(pa.table(table), partial)
