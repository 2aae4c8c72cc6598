"""A model on disk: one weight file, or a folder of weight files and their settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import FileError, InputError, printable
from vitrail.base.safe_files import parse_json, read_limited
from vitrail.weights.readers.files import Entry, WeightFile, open_weights
from vitrail.weights.text.tokenizer import MAX_BYTES, TOKENIZER_FILES

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SETTINGS = ("config.json", "preprocessor_config.json", "open_clip_config.json")
TEXT_PREFIX = "text/"  # of the files of a text tower in a vitrail file
TEXT_FILES = ("config.json", "open_clip_config.json", *TOKENIZER_FILES)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # if both exist, the one without code
CARD = "README.md"
HEADER_KEY = "vitrail"  # in the metadata of a vitrail file: the JSON that describes its model
INDEX_KEY = "vitrail.index"  # in the metadata of an index of vitrail embed, which is no model
BEST = "best.safetensors"  # of a training run
_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin")
_MAX_JSON = 10_000_000  # bytes


class ModelFiles(AbstractContextManager["ModelFiles"]):
    """The weight files of one model as if they were one, and its settings by file name.

    Attributes:
        entries: dtype and shape of each tensor, by name.
        card: the license in a folder's README.md; of a model on the hub, also where it comes from.
    """

    def __init__(
        self, path: Path, files: list[WeightFile], settings: dict[str, dict[str, Any]], alone: bool = True
    ) -> None:
        self.path, self.files, self.settings, self.alone = path, files, settings, alone
        self.card = dict[str, Any]()
        self.metadata = files[0].metadata if len(files) == 1 else {}
        self.own = HEADER_KEY in self.metadata  # a vitrail file
        self.wrapper, self.kind, self.notes = files[0].wrapper, files[0].kind, list[str]()
        if files[0].others:
            held = ", ".join([self.wrapper, *files[0].others])
            self.notes.append(
                f"The file holds weights under {held}; {self.wrapper} was read. Give checkpoint_key for "
                "another."
            )
        self.entries, self._file_of = dict[str, Entry](), dict[str, WeightFile]()
        for file in files:
            if not self.entries.keys().isdisjoint(file.entries):
                self.close()
                raise FileError(f"{printable(path)} holds a tensor in two of its files; save it again.")
            self.entries |= file.entries
            self._file_of |= dict.fromkeys(file.entries, file)

    @cached_property
    def text_files(self) -> dict[str, bytes]:
        """The settings and the tokenizer of a text tower, by file name; a vitrail file holds them itself."""
        if not self.path.is_dir():
            names = [name for name in self._file_of if name.startswith(TEXT_PREFIX)]
            return {name.removeprefix(TEXT_PREFIX): self.tensor(name).numpy().tobytes() for name in names}
        paths = {name: self.path / name for name in TEXT_FILES if (self.path / name).is_file()}
        return {name: read_limited(path, MAX_BYTES, "a tokenizer") for name, path in paths.items()}

    def settings_beside(self, notes: list[str]) -> dict[str, dict[str, Any]]:
        """The settings in the folder of a single file, which tell its preprocessing.

        They are those of a file with a usual name, or of the only one in the folder. Settings that cannot be
        read are skipped, with a note: the file alone was asked for.
        """
        name = self.path.name
        try:
            if self.alone or (name not in WEIGHTS and _list_weights(self.path.parent) != [name]):
                return {}
        except OSError:  # a folder that may not be listed
            return {}
        found = {}
        for path in (self.path.parent / name for name in SETTINGS):
            try:
                if path.exists():
                    found[path.name] = _read_object(path)
            except FileError as error:
                notes.append(f"{path.name} beside the file was not used: {error}")
        return found

    def tensor(self, name: str) -> Tensor:
        return self._file_of[name].tensor(name)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        return self._file_of[name].chunks(name)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether this is the name of a model on the hub, "hf:owner/name", and not a path."""
    return os.fspath(path).startswith("hf:")


def open_model(
    path: str | os.PathLike[str], checkpoint_key: str | None = None, *, offline: bool = False
) -> ModelFiles:
    """Open a model and read its headers. Of a run directory, these are the best weights.

    Args:
        path: a file, a folder, or a model on the hub, which is downloaded.
        checkpoint_key: the key of a torch.save file that holds the weights, if not the usual one.
        offline: download nothing; a model on the hub must be in the cache.
    """
    if not is_hub_name(path):
        files = _open_path(Path(path), checkpoint_key)
        if Path(path).is_dir():
            files.card = license_of(Path(path) / CARD)
        return files
    from vitrail.weights.readers.hub import fetch_model

    local, card = fetch_model(Path(path).as_posix(), offline=offline)
    files = _open_path(local, checkpoint_key, alone=True)
    files.card = card
    return files


def license_of(card: Path) -> dict[str, str]:
    """The license, from the lines between --- at the top of a model card."""
    text = card.read_text("utf-8-sig", "replace") if card.is_file() else ""
    top = re.match(r"---\s*\n(.*?)^---", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"""^(license|license_name): *["']?(\w[\w.+ -]*)""", top[1] if top else "", re.M)
    fields = {key: value.strip()[:100] for key, value in lines}
    named = fields.get("license_name") if fields.get("license") == "other" else None
    return {"license": named or fields["license"]} if "license" in fields else {}


def _open_path(path: Path, checkpoint_key: str | None, *, alone: bool = False) -> ModelFiles:
    """Open a file or folder. In the cache of the hub, a file is alone: its neighbors are not its settings."""
    if (path / BEST).is_file() and (path / "metrics.jsonl").is_file():
        path = path / BEST  # a run directory; its config.json is not the model's
    if not path.is_dir():
        return ModelFiles(path, [open_weights(path, checkpoint_key)], {}, alone)
    settings = {name: _read_object(path / name) for name in SETTINGS if (path / name).exists()}
    files: list[WeightFile] = []
    try:
        index, names = _find_weights(path)
        for name in names:
            files.append(open_weights(path / name, checkpoint_key))
        if index is not None:
            _check_index(index, files)
        return ModelFiles(path, files, settings)
    except BaseException:
        for file in files:
            file.close()
        raise


def _find_weights(folder: Path) -> tuple[Path | None, list[str]]:
    """The index of a folder, if it has one, and its weight files.

    They are those the index lists, the one with a usual name, or the only one.
    """
    for name in WEIGHTS:
        if (index := folder / f"{name}.index.json").exists():
            return index, list_shards(index)
        if (folder / name).exists():
            return None, [name]
    files = _list_weights(folder)
    if len(files) == 1:
        return None, files
    raise FileError(
        f"{printable(folder)} holds {len(files)} weight files, and neither {' nor '.join(WEIGHTS)}; "
        + ("pass the file itself." if files else "check the path.")
    )


def _list_weights(folder: Path) -> list[str]:
    """The names of all weight files in a folder."""
    return sorted(entry.name for entry in folder.iterdir() if entry.suffix in _SUFFIXES)


def _check_index(index: Path, files: list[WeightFile]) -> None:
    """Check that an index and its shards agree on the tensors and their files."""
    listed: dict[str, str] = _read_object(index)["weight_map"]
    held = {(name, file.path.name) for file in files for name in file.entries}
    for name, file in listed.items():
        if (name, file) not in held:
            raise FileError(
                f"{printable(index)} lists {printable(name)} in {printable(file)}, which holds no such "
                "tensor; download the folder again."
            )
    for name, file in sorted(held):
        if name not in listed:
            raise FileError(
                f"{printable(file)} holds {printable(name)}, which {printable(index)} does not list; "
                "download the folder again."
            )


def list_shards(index: Path) -> list[str]:
    """The file names in an index. Only files of the same folder are allowed."""
    listed = _read_object(index).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else []
    files = sorted(set(names)) if all(isinstance(name, str) for name in names) else []
    plain = [name for name in files if name not in ("", ".", "..") and not set(name) & set("/\\\0")]
    if not files or plain != files:
        raise FileError(
            f"{printable(index)} must list weight files of its own folder, but lists "
            f"{printable(files[:3])}; download the folder again."
        )
    return files


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise FileError(f"{printable(path)} must be a JSON object, not {type(value).__name__}; correct it.")
    return value


def read_json(path: Path) -> Any:
    """JSON from a regular file of at most 10 MB, without duplicate keys."""
    try:
        return parse_json(read_limited(path, _MAX_JSON, "a JSON file"), str(path), allow_nan=True)
    except OSError as error:
        raise FileError(f"{printable(path)} cannot be read: {error.strerror or error}.") from error
    except InputError as error:
        raise FileError(str(error)) from error
