"""A folder of pictures: a folder for each class, or train/, val/ and test/ with those in them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError, printable

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
MOST_FILES = 50_000_000


def read_folder(folder: Path) -> Dataset:
    """Names of classes are the names of their folders, in order of the alphabet."""
    inside = subfolders(folder)
    found = {SPLITS[name]: folder / name for name in inside if name in SPLITS}
    if "train" not in found:
        found = {"train": folder}
    classes = subfolders(found["train"])
    if not classes:
        raise InputError(
            "A folder of pictures must hold a folder for each class.",
            f"{printable(folder)} with {'pictures alone' if any_pictures(folder) else 'no folders'}",
            "Such as photos/cat/1.jpg and photos/dog/2.jpg.",
        )
    notes: list[str] = []
    splits = {name: read_split(place, classes, folder, notes) for name, place in found.items()}
    name = folder.resolve().name
    return Dataset(name, classes, splits["train"], splits.get("val"), splits.get("test"), notes)


def read_split(place: Path, classes: list[str], root: Path, notes: list[str]) -> Split:
    """The pictures of one split; a class that only it has is an error."""
    strange = [name for name in subfolders(place) if name not in classes]
    if strange:
        raise InputError(
            "Every split must have the classes of train.",
            f"{printable(place)} with {printable(', '.join(strange[:3]))} besides",
            "Rename the folder, or add pictures of that class to train.",
        )
    paths: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        there = pictures(place / name) if (place / name).is_dir() else []
        if not there:
            notes.append(f"{printable(place.name)} has no pictures of {printable(name)}.")
        paths += there
        labels += [number] * len(there)
    return Split(np.array(labels, dtype=np.int64), [os.fspath(p.relative_to(root)) for p in paths], paths)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders inside, but for hidden ones and links that lead back here."""
    here = folder.resolve()
    with os.scandir(folder) as entries:
        seen = [Path(e.path) for e in entries if not e.name.startswith((".", "__"))]
    return sorted(p.name for p in seen if p.is_dir() and not here.is_relative_to(p.resolve()))


def pictures(folder: Path) -> list[Path]:
    """Every picture file below a folder, in order; links to folders are not followed, hidden files not seen.

    A folder that cannot be read is an error: a run would go on without its pictures.
    """

    def fail(error: OSError) -> None:
        raise error

    found = []
    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place) / name
            if path.suffix.lower() in SUFFIXES and not name.startswith(".") and path.is_file():
                found.append(path)
        if len(found) > MOST_FILES:
            raise InputError(f"A class may have {MOST_FILES:,} files.", printable(folder), "Split it.")
    return found


def any_pictures(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(Path(e.name).suffix.lower() in SUFFIXES for e in entries)
