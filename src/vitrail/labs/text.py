"""A text as numbers, one for each character: what `characters` learns from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import FileError, InputError, printable

TRAINED = 0.9  # the first part of a text; the rest is held out
LEAST, MOST, MOST_KINDS = 1_000, 2_000_000, 5_000  # characters of a text
MODULES = [
    "argparse",
    "difflib",
    "doctest",
    "inspect",
    "optparse",
    "statistics",
    "tarfile",
    "textwrap",
    "typing",
]
SHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # sha256


@dataclass(frozen=True, eq=False)
class Text:
    """A text as numbers, in the order of its characters' codes."""

    name: str
    kinds: list[str]
    numbers: Tensor
    """(n,)"""
    known: bool
    """Whether it is the slides'."""

    @property
    def train(self) -> Tensor:
        return self.numbers[: int(TRAINED * len(self.numbers))]

    @property
    def held_out(self) -> Tensor:
        return self.numbers[int(TRAINED * len(self.numbers)) :]

    def write(self, numbers: Tensor) -> str:
        return "".join(self.kinds[number] for number in numbers.tolist())


def read(data: str | Path | None) -> Text:
    """A file's text, or one that every Python comes with."""
    if data is None:
        return as_numbers(of_python(), f"The source of {len(MODULES)} modules of Python's library")
    try:
        with open(data, encoding="utf-8") as file:
            text = file.read(MOST)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            "This lab reads a text file in UTF-8.",
            f"{printable(data)} ({type(error).__name__})",
            "Give --data a text file, or leave it out.",
        ) from error
    return as_numbers(text, named(printable(Path(data).name), text))


def of_python() -> str:
    """MODULES one after the other: they stay as they are whatever becomes of us."""
    origins = [spec.origin or "" for name in MODULES if (spec := find_spec(name))]
    try:
        return "".join(Path(origin).read_text(encoding="utf-8") for origin in origins)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "Without --data, this lab reads the source of Python's library.",
            f"a Python without it ({type(error).__name__})",
            "Give --data a text file.",
        ) from error


def named(name: str, text: str) -> str:
    return name if len(text) < MOST else f"{name}, the first part"


def as_numbers(text: str, name: str) -> Text:
    kinds = sorted(set(text))
    if len(text) < LEAST or not 2 <= len(kinds) <= MOST_KINDS:
        raise InputError(
            f"A text must have {LEAST:,} characters or more, of 2 to {MOST_KINDS:,} kinds.",
            f"{len(text):,} of {len(kinds):,} kinds",
            "Give --data another file, or leave it out.",
        )
    number = {kind: n for n, kind in enumerate(kinds)}
    numbers = torch.tensor([number[character] for character in text])
    return Text(name, kinds, numbers, hashlib.sha256(text.encode()).hexdigest() == SHAKESPEARE)


def rows(numbers: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T): a target is the character after its input."""
    both = numbers[starts[:, None] + torch.arange(length + 1)]
    return both[:, :-1], both[:, 1:]
