"""A text as a sequence of token ids, one per character: the data of the lab `characters`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from vitrail.base.errors import FileError, InputError, printable

_TRAIN_FRACTION = 0.9  # the first part of a text; the rest is held out
_MIN_LENGTH, _MAX_LENGTH, _MAX_VOCABULARY = 1_000, 2_000_000, 5_000
_MODULES = (
    *("argparse", "difflib", "doctest", "inspect", "optparse"),
    *("statistics", "tarfile", "textwrap", "typing"),
)
_TINYSHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # sha256


@dataclass(frozen=True, eq=False)
class CharacterText:
    """A text as token ids."""

    name: str
    vocabulary: list[str]
    """The characters, sorted; an id is an index into them."""
    ids: Tensor
    """(n,)"""
    is_tinyshakespeare: bool
    """Whether it is the text of the slides."""

    @property
    def train(self) -> Tensor:
        return self.ids[: int(_TRAIN_FRACTION * len(self.ids))]

    @property
    def eval_split(self) -> Tensor:
        return self.ids[int(_TRAIN_FRACTION * len(self.ids)) :]

    def decode(self, ids: Tensor) -> str:
        return "".join(self.vocabulary[number] for number in ids.tolist())


def read_text(data: str | Path | None) -> CharacterText:
    """The text of a file; by default the source code of some modules of Python's standard library."""
    if data is None:
        return encode_text(_python_source(), f"The source of {len(_MODULES)} modules of Python's library")
    try:
        with open(data, encoding="utf-8") as file:
            text = file.read(_MAX_LENGTH)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"This lab reads a text file in UTF-8, but {printable(data)} cannot be read as one "
            f"({type(error).__name__}); pass --data another file, or remove it."
        ) from error
    name = printable(Path(data).name)
    return encode_text(text, name if len(text) < _MAX_LENGTH else f"{name}, the first part")


def _python_source() -> str:
    """The source of the modules, concatenated: a text that is part of every Python."""
    origins = [spec.origin or "" for name in _MODULES if (spec := find_spec(name))]
    try:
        return "".join(Path(origin).read_text(encoding="utf-8") for origin in origins)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "Without --data, this lab reads the source of Python's standard library, which this Python does "
            f"not include ({type(error).__name__}); pass --data a text file."
        ) from error


def encode_text(text: str, name: str) -> CharacterText:
    vocabulary = sorted(set(text))
    if len(text) < _MIN_LENGTH or not 2 <= len(vocabulary) <= _MAX_VOCABULARY:
        raise InputError(
            f"A text must have at least {_MIN_LENGTH:,} characters, with 2 to {_MAX_VOCABULARY:,} different "
            f"ones; {name} has {len(text):,} characters, {len(vocabulary):,} different. Pass --data another "
            "file, or remove it."
        )
    id_of = {character: n for n, character in enumerate(vocabulary)}
    ids = torch.tensor([id_of[character] for character in text])
    is_tinyshakespeare = hashlib.sha256(text.encode()).hexdigest() == _TINYSHAKESPEARE
    return CharacterText(name, vocabulary, ids, is_tinyshakespeare)


def next_character_batch(ids: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T): a target is the character after its input."""
    sequences = ids[starts[:, None] + torch.arange(length + 1)]
    return sequences[:, :-1], sequences[:, 1:]
