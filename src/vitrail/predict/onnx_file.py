"""An ONNX file looked through before ONNX Runtime sees it: is it ours, whole, and by itself?

A file may name others to be loaded, ask for operators that are code from elsewhere, or run in circles.
Ours do none of this, and what does is refused. The file is a protobuf message; reading its frame takes
only numbers and lengths, so the package `onnx` is not needed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitrail.config import ViTConfig
from vitrail.errors import FileError, printable
from vitrail.preprocess import Preprocess
from vitrail.weights.bundle import Card, parse, read_header
from vitrail.weights.folder import unique

if TYPE_CHECKING:
    from vitrail.weights.folder import Stored

ABOUT, TAKES = "vitrail", "vitrail.export"  # keys of the metadata
MOST_BYTES = 2**31 - 1  # of one protobuf message
DEEPEST = 4  # graphs in graphs

# Numbers of fields in onnx.proto.
GRAPH, OPSET, METADATA, TRAINING, FUNCTIONS = 7, 8, 14, 20, 25  # of a model
NODE, INITIALIZER, SPARSE = 1, 5, 15  # of a graph
KIND, ATTRIBUTE, DOMAIN = 4, 5, 7  # of a node
TENSOR, SUBGRAPH, TENSORS, SUBGRAPHS, SPARSE_TENSOR, SPARSE_TENSORS = 5, 6, 10, 11, 22, 23  # of an attribute
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # of a tensor


@dataclass(frozen=True, kw_only=True)
class Described:
    """What one of our ONNX files says about itself."""

    data: bytes
    config: ViTConfig
    preprocess: Preprocess
    labels: list[str] | None
    card: Card
    whole: bool
    """Whether the graph takes pictures as they are, and resizes them."""


@dataclass(frozen=True)
class Metadata:
    """As much of a stored file as `weights.bundle` wants to know."""

    path: Path
    metadata: dict[str, str]


def read_onnx(path: Path) -> Described:
    """Read and check a file; nothing of it is run."""
    try:
        data = contents(path)
        metadata = look_through(memoryview(data))
        takes = json.loads(metadata.get(TAKES, "null"), object_pairs_hook=unique)
        if ABOUT not in metadata or not isinstance(takes, dict):
            raise ValueError("it does not say which model it is")
    except FileNotFoundError as error:
        got = f"{printable(path)}: {error.strerror}"
        raise FileError("An ONNX file must be there.", got, "Check the path.") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise refused(path, reason) from error
    stored = cast("Stored", Metadata(path, metadata))
    parts = parse(stored, read_header(stored) or {})
    if parts["preprocess"] is None:
        raise refused(path, "it has no preprocessing")
    if not isinstance(parts["card"].metrics, dict):
        raise refused(path, "its card has no table of metrics")
    known = {name: parts[name] for name in ("config", "preprocess", "labels", "card")}
    return Described(data=data, whole=takes.get("takes") == "pictures", **known)


def refused(path: Path, reason: str) -> FileError:
    return FileError(
        "An ONNX file must be one that vitrail export has written, whole and by itself.",
        f"{printable(path)}: {printable(reason, 300)}".rstrip("."),
        "Export it again from the vitrail file: vitrail export MODEL --to onnx --out x.onnx.",
    )


def contents(path: Path) -> bytes:
    """The bytes of a regular file that is not too large."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is a pipe or a device, or a folder")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"it has {found.st_size:,} bytes, and no ONNX file has more than {MOST_BYTES:,}")
        return file.read()


# ---- the frame ----------------------------------------------------------------------------------


def look_through(data: memoryview) -> dict[str, str]:
    """The metadata of a model, none of whose parts needs anything from elsewhere."""
    metadata: dict[str, str] = {}
    graphs = 0
    for field, value in fields(data):
        if field == GRAPH:
            graphs += 1
            check_graph(part(value))
        elif field == OPSET:
            check_domain(text_in(part(value), 1))
        elif field in (TRAINING, FUNCTIONS):
            raise ValueError("it holds functions or training steps of its own")
        elif field == METADATA:
            key = text_in(part(value), 1)
            if key in metadata:
                raise ValueError(f"it has {key!r} twice in its metadata")
            metadata[key] = text_in(part(value), 2)
    if graphs != 1:
        raise ValueError(f"it holds {graphs} graphs" if data else "it is empty")
    return metadata


def check_graph(data: memoryview, depth: int = 1) -> None:
    if depth > DEEPEST:
        raise ValueError("it holds graphs in graphs in graphs")
    for field, value in fields(data):
        if field == NODE:
            check_node(part(value), depth)
        elif field == INITIALIZER:
            check_tensor(part(value))
        elif field == SPARSE:
            raise ValueError("it holds sparse tensors")


def check_node(data: memoryview, depth: int) -> None:
    kind = text_in(data, KIND)
    check_domain(text_in(data, DOMAIN))
    for field, value in fields(data):
        for inner, found in fields(part(value)) if field == ATTRIBUTE else ():
            if inner in (TENSOR, TENSORS):
                check_tensor(part(found))
            elif inner in (SUBGRAPH, SUBGRAPHS):
                if kind != "If":
                    raise ValueError(f"its operator {kind!r} may run without end")
                check_graph(part(found), depth + 1)
            elif inner in (SPARSE_TENSOR, SPARSE_TENSORS):
                raise ValueError("it holds sparse tensors")


def check_tensor(data: memoryview) -> None:
    for field, value in fields(data):
        if field == EXTERNAL_DATA or (field == DATA_LOCATION and value != 0):
            raise ValueError("its weights lie in another file")


def check_domain(domain: str) -> None:
    if domain not in ("", "ai.onnx"):
        raise ValueError(f"it asks for operators from elsewhere ({domain!r})")


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values of a protobuf message: whole numbers, or stretches of bytes."""
    place = 0
    while place < len(data):
        tag, place = whole_number(data, place)
        length: int | None = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0:
            value, place = whole_number(data, place)
            yield tag >> 3, value
            continue
        if tag & 7 == 2:
            length, place = whole_number(data, place)
        if length is None or place + length > len(data):
            raise ValueError("it is no ONNX file, or not all of one")
        yield tag >> 3, data[place : place + length]
        place += length


def whole_number(data: memoryview, place: int) -> tuple[int, int]:
    """A number in protobuf's spelling, and where it ends."""
    found = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte, place = data[place], place + 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, place
    raise ValueError("it is no ONNX file, or not all of one")


def part(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is no ONNX file, or not all of one")
    return value


def text_in(data: memoryview, wanted: int) -> str:
    """A text in a message; the last, where it comes twice."""
    found: Any = b""
    for field, value in fields(data):
        found = part(value) if field == wanted else found
    return bytes(found).decode()
