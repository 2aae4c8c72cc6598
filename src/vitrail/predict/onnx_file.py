"""Check an ONNX file before ONNX Runtime opens it: written by us, complete and self-contained.

An ONNX file may refer to other files, use custom operators, or loop for ever. Ours do none of this, and a
file that does is refused. The file is a protobuf message; walking its fields takes only numbers and
lengths, so the package `onnx` is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitrail.base.errors import ConfigError, FileError, printable
from vitrail.base.safe_files import parse_json, read_limited
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.bundle import Card
from vitrail.weights.bundle.bundle_header import parse_header, read_header
from vitrail.weights.bundle.feature_statistics import FeatureStatistics, parse_statistics
from vitrail.weights.bundle.scores import Scores

if TYPE_CHECKING:
    from vitrail.weights.readers.folder import ModelFiles

MODEL_KEY, EXPORT_KEY, FEATURES_KEY = "vitrail", "vitrail.export", "vitrail.features"  # keys of the metadata
MAX_BYTES = 2**31 - 1  # the largest protobuf message
_MAX_NESTING = 4  # graphs inside graphs

# Field numbers in onnx.proto.
GRAPH, OPSET, METADATA, TRAINING, FUNCTIONS = 7, 8, 14, 20, 25  # of a model
NODE, INITIALIZER, SPARSE = 1, 5, 15  # of a graph
KIND, ATTRIBUTE, DOMAIN = 4, 5, 7  # of a node
TENSOR, SUBGRAPH, TENSORS, SUBGRAPHS, SPARSE_TENSOR, SPARSE_TENSORS = 5, 6, 10, 11, 22, 23  # of an attribute
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # of a tensor


@dataclass(frozen=True, kw_only=True)
class OnnxDescription:
    """A checked ONNX file and the metadata in it."""

    data: bytes
    config: ViTConfig
    preprocess: Preprocess
    labels: list[str] | None
    scores: Scores
    statistics: FeatureStatistics | None
    card: Card
    resizes: bool
    """Whether the graph takes images of any size and resizes them itself."""


@dataclass(frozen=True)
class _Metadata:
    """The part of `ModelFiles` that `weights.bundle` needs."""

    path: Path
    metadata: dict[str, str]


def read_onnx(path: Path) -> OnnxDescription:
    """Read and check a file without running any of it."""
    try:
        data = read_limited(path, MAX_BYTES, "an ONNX file")
        metadata = _check_model(memoryview(data))
        export = parse_json(metadata.get(EXPORT_KEY, "null"), "its export", allow_nan=True)
        if MODEL_KEY not in metadata or not isinstance(export, dict):
            raise ValueError("its metadata does not describe a vitrail model")
    except FileNotFoundError as error:
        raise FileError(f"{printable(path)}: {error.strerror}; check the path.") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise bad_onnx(path, reason) from error
    stored = cast("ModelFiles", _Metadata(path, metadata))
    parts = parse_header(stored, read_header(stored) or {})
    if parts["preprocess"] is None:
        raise bad_onnx(path, "it has no preprocessing")
    if not isinstance(parts["card"].metrics, dict):
        raise bad_onnx(path, "its card has no table of metrics")
    statistics = _read_statistics(path, metadata.get(FEATURES_KEY), parts["config"])
    fields = {name: parts[name] for name in ("config", "preprocess", "labels", "scores", "card")}
    resizes = export.get("takes") == "raw_images"
    return OnnxDescription(data=data, resizes=resizes, statistics=statistics, **fields)


def _read_statistics(path: Path, text: str | None, config: ViTConfig) -> FeatureStatistics | None:
    """The feature statistics in the metadata; None if there are none."""
    if text is None:
        return None
    try:
        statistics = parse_statistics(parse_json(text, "its statistics", allow_nan=True))
        statistics.check_width(config.pooled_width)
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise bad_onnx(path, f"its feature statistics are damaged ({error})") from error
    return statistics


def bad_onnx(path: Path, reason: str) -> FileError:
    """The error for a file that cannot be used."""
    return FileError(
        f"{printable(path)} is not a complete ONNX file written by vitrail export: "
        f"{printable(reason, 300).rstrip('.')}. Export it again: vitrail export MODEL --to onnx --out x.onnx."
    )


# ---- protobuf ----------------------------------------------------------------------------------


def _check_model(data: memoryview) -> dict[str, str]:
    """Check that a model is self-contained; return its metadata."""
    metadata: dict[str, str] = {}
    graphs = 0
    for field, value in _fields(data):
        if field == GRAPH:
            graphs += 1
            _check_graph(_bytes(value))
        elif field == OPSET:
            _check_domain(_text(_bytes(value), 1))
        elif field in (TRAINING, FUNCTIONS):
            raise ValueError("it contains custom functions or training steps")
        elif field == METADATA:
            key = _text(_bytes(value), 1)
            if key in metadata:
                raise ValueError(f"its metadata contains {key!r} twice")
            metadata[key] = _text(_bytes(value), 2)
    if graphs != 1:
        raise ValueError(f"it contains {graphs} graphs" if data else "it is empty")
    return metadata


def _check_graph(data: memoryview, depth: int = 1) -> None:
    if depth > _MAX_NESTING:
        raise ValueError("its graphs are nested too deeply")
    for field, value in _fields(data):
        if field == NODE:
            _check_node(_bytes(value), depth)
        elif field == INITIALIZER:
            _check_tensor(_bytes(value))
        elif field == SPARSE:
            raise ValueError("it contains sparse tensors")


def _check_node(data: memoryview, depth: int) -> None:
    kind = _text(data, KIND)
    _check_domain(_text(data, DOMAIN))
    for field, value in _fields(data):
        for inner, attribute in _fields(_bytes(value)) if field == ATTRIBUTE else ():
            if inner in (TENSOR, TENSORS):
                _check_tensor(_bytes(attribute))
            elif inner in (SUBGRAPH, SUBGRAPHS):
                if kind != "If":
                    raise ValueError(f"its operator {kind!r} may run for ever")
                _check_graph(_bytes(attribute), depth + 1)
            elif inner in (SPARSE_TENSOR, SPARSE_TENSORS):
                raise ValueError("it contains sparse tensors")


def _check_tensor(data: memoryview) -> None:
    for field, value in _fields(data):
        if field == EXTERNAL_DATA or (field == DATA_LOCATION and value != 0):
            raise ValueError("its weights are in another file")


def _check_domain(domain: str) -> None:
    if domain not in ("", "ai.onnx"):
        raise ValueError(f"it uses custom operators ({domain!r})")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the field numbers and values of a protobuf message: integers, or slices of bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        length: int | None = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if tag & 7 == 2:
            length, position = _varint(data, position)
        if length is None or position + length > len(data):
            raise ValueError("it is truncated, or not an ONNX file")
        yield tag >> 3, data[position : position + length]
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Decode a varint; return it and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte, position = data[position], position + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, position
    raise ValueError("it is truncated, or not an ONNX file")


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is truncated, or not an ONNX file")
    return value


def _text(data: memoryview, number: int) -> str:
    """The text of a field; the last one, as protobuf has it, if the field is repeated."""
    text: Any = b""
    for field, value in _fields(data):
        text = _bytes(value) if field == number else text
    return bytes(text).decode()
