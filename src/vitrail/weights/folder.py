"""A model on disk: one weight file, or a folder with weights in one or more files and settings beside."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vitrail.errors import FileError, printable
from vitrail.weights.files import Entry, WeightFile, open_weights, twice

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SETTINGS = ("config.json", "preprocessor_config.json")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # where there are both, the one that holds no code
MOST_SETTINGS = 10_000_000  # bytes of a JSON file


class Stored:
    """The weight files of one model as if they were one, and its settings by file name."""

    def __init__(self, path: Path, files: list[WeightFile], settings: dict[str, dict[str, Any]]) -> None:
        self.path, self.files, self.settings = path, files, settings
        self.homes = {name: file for file in files for name in file.entries}
        self.metadata = files[0].metadata if len(files) == 1 else {}
        self.wrapper = files[0].wrapper
        self.kind = files[0].kind
        self.notes = [choice_note(files[0])] if files[0].others else []
        if len(self.homes) != sum(len(file.entries) for file in files):
            self.close()
            raise FileError(
                "A tensor must be in one file.", f"{printable(str(path))}, with one in two", "Save it again."
            )

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: file.entries[name] for name, file in self.homes.items()}

    def tensor(self, name: str) -> Tensor:
        return self.homes[name].tensor(name)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        return self.homes[name].chunks(name)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choice_note(file: WeightFile) -> str:
    """Which of several state dicts is read: a teacher or a student, a model or its average."""
    return (
        f"The file holds weights under {', '.join([file.wrapper, *file.others])}; {file.wrapper} was read. "
        "Give checkpoint_key for another."
    )


def open_model(path: str | os.PathLike[str], checkpoint_key: str | None = None) -> Stored:
    """Open the model at a path, reading headers alone.

    `checkpoint_key` is the key of a torch.save file under which the weights are, if not the usual one.
    """
    path = Path(path)
    if not path.is_dir():
        return Stored(path, [open_weights(path, checkpoint_key)], {})
    settings = {name: read_json(path / name) for name in SETTINGS if (path / name).exists()}
    files: list[WeightFile] = []
    try:
        index, names = weight_names(path)
        for name in names:
            files.append(open_weights(path / name, checkpoint_key))
        if index is not None:
            check_index(index, files)
        return Stored(path, files, settings)
    except BaseException:
        for file in files:
            file.close()
        raise


def weight_names(folder: Path) -> tuple[Path | None, list[str]]:
    """The index of a folder, if it has one, and its weight files.

    They are those the index lists, the one with a usual name, or the only one.
    """
    for name in WEIGHTS:
        if (index := folder / f"{name}.index.json").exists():
            return index, shards(index)
        if (folder / name).exists():
            return None, [name]
    there = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.suffix in (".safetensors", ".npz", ".pt", ".pth", ".bin")
    )
    if len(there) == 1:
        return None, there
    raise FileError(
        f"A model's folder must hold {' or '.join(WEIGHTS)}, or one weight file of another name.",
        f"{printable(str(folder))} with {len(there)} weight files",
        "Name the file itself." if there else "Check the path.",
    )


def check_index(index: Path, files: list[WeightFile]) -> None:
    """An index and its shards must agree: which tensors there are, and in which file each is."""
    listed: dict[str, str] = read_json(index)["weight_map"]
    there = {(name, file.path.name) for file in files for name in file.entries}
    for name, file in listed.items():
        if (name, file) not in there:
            raise FileError(
                f"{printable(str(index))} lists {printable(name)} in {printable(file)}, which holds no such "
                "tensor; download the folder again."
            )
    for name, file in sorted(there):
        if name not in listed:
            raise FileError(
                f"{printable(file)} holds {printable(name)}, which {printable(str(index))} does not list; "
                "download the folder again."
            )


def shards(index: Path) -> list[str]:
    """The file names in an index. They may name files of this folder and nothing else."""
    names = read_json(index).get("weight_map")
    files = sorted(set(names.values())) if isinstance(names, dict) and all_texts(names.values()) else []
    plain = [name for name in files if name not in ("", ".", "..") and not set(name) & set("/\\\0")]
    if not files or plain != files:
        raise FileError(
            "An index must name weight files of its own folder.",
            f"{printable(str(index))} with {printable(str(files[:3]))}",
            "Download the folder again.",
        )
    return files


def all_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    found = read_json_value(path)
    if not isinstance(found, dict):
        got = f"{printable(str(path))}: {type(found).__name__}"
        raise FileError("Settings must be a JSON object.", got, "Repair it.")
    return found


def read_json_value(path: Path) -> Any:
    """JSON from a file: regular, not large, no key twice."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("no regular file")
            text = file.read(MOST_SETTINGS + 1)
        if len(text) > MOST_SETTINGS:
            raise ValueError(f"more than {MOST_SETTINGS:,} bytes")
        return json.loads(text, object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        got = f"{printable(str(path))}: {printable(reason)}"
        raise FileError("Settings must be JSON.", got, "Repair it.") from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json: an object whose keys come once each."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError(f"the key {twice(pairs)!r} comes twice")
    return dict(pairs)
