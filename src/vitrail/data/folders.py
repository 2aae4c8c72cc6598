"""A folder of images: a folder for each class, or train/, val/ and test/ with those in them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError, printable

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
UNSUPPORTED = {  # images that their owner expects to be read
    *(".heic", ".heif", ".avif", ".jfif", ".jp2", ".jxl", ".ppm", ".pgm", ".tga", ".psd", ".svg"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw", ".dcm", ".exr"),
}
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
MOST_FILES = 50_000_000

FAULTS = {  # what is not read and its owner may miss, by kind
    "stray": "images outside the class folders",
    "folders": "folders beside train/",
    "unsupported": "images in formats that are not read",
    "broken_links": "links that lead nowhere",
    "folder_links": "links to folders, which are not followed",
    "special": "pipes, sockets or devices",
}
HARMLESS = {"other": "files that are not images by name", "hidden": "hidden files and folders"}

Skipped = dict[str, list[str]]
"""Names of what is not read, relative to the data's folder, by kind: the keys of FAULTS and HARMLESS."""


def read_folder(root: Path) -> Dataset:
    """Names of classes are the names of their folders, in order of the alphabet."""
    skipped: Skipped = {}
    splits = find_splits(root)
    if splits:
        beside = class_folders(root, "", skipped)
        skip(skipped, "folders", [name for name in beside if name not in splits.values()])
    else:
        splits = {"train": ""}
    classes = class_folders(root, splits["train"], skipped)
    if not classes:
        alone = "images and no folders" if skipped.get("stray") else "no folders"
        raise InputError(
            f"{printable(root)} must hold a folder for each class, such as cat/1.jpg and dog/2.jpg, and "
            f"holds {alone}."
        )
    found = {name: read_split(root, place, classes, skipped) for name, place in splits.items()}
    name = root.resolve().name
    return Dataset(name, classes, found["train"], found.get("val"), found.get("test"), skipped=skipped)


def find_splits(root: Path) -> dict[str, str]:
    """The folders of train, val and test by split; none where the folders are classes."""
    inside = class_folders(root, "", {})
    found: dict[str, str] = {}
    for name in inside:
        split = SPLITS.get(name.lower())
        if split in found:
            raise InputError(
                f"{printable(root)} has two folders for {split}: {printable(found[split])} and "
                f"{printable(name)}; merge them, or rename one."
            )
        if split is not None:
            found[split] = name
    if found and "train" not in found and len(found) == len(inside):
        raise InputError(
            f"{printable(root)} holds {' and '.join(map(printable, inside))} and no train; "
            "add a folder train with a folder for each class."
        )
    return found if "train" in found else {}


def read_split(root: Path, place: str, classes: list[str], skipped: Skipped) -> Split:
    """The images of one split; a class that only it has is an error."""
    train = not place or SPLITS[place.lower()] == "train"  # what lies beside its classes is known by now
    known = set(classes)
    strange = [name for name in class_folders(root, place, {} if train else skipped) if name not in known]
    if strange:
        raise InputError(
            f"{printable(root / place)} has classes that train does not have: "
            f"{printable(', '.join(strange[:3]))}. Rename the folders, or add images of them to train."
        )
    names: list[str] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        below = os.path.join(place, name)
        there = walk(root, below, skipped) if (root / below).is_dir() else []
        names += there
        labels += [number] * len(there)
    return Split(np.array(labels, dtype=np.int64), names, [root / name for name in names])


# ---- what lies in a folder ------------------------------------------------------------------


def kind_of(entry: os.DirEntry[str]) -> str:
    """image, folder, or why it is not read."""
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_symlink():  # os.path, because an entry raises an error where links go round
        if os.path.isdir(entry.path):
            return "folder_links"
        if not os.path.exists(entry.path):
            return "broken_links"
        regular = os.path.isfile(entry.path)
    elif entry.is_dir():
        return "folder"
    else:
        regular = entry.is_file()
    if not regular:
        return "special"
    suffix = os.path.splitext(entry.name)[1].lower()
    return "image" if suffix in SUFFIXES else "unsupported" if suffix in UNSUPPORTED else "other"


def scan(root: Path, below: str, skipped: Skipped) -> tuple[list[str], list[str]]:
    """The names of images and of folders in a folder, in order; all else is noted as skipped.

    A folder that cannot be read is an error: a run would go on without its images.
    """
    found: dict[str, list[str]] = {"image": [], "folder": []}
    with os.scandir(os.path.join(root, below)) as entries:
        for entry in entries:
            found.setdefault(kind_of(entry), []).append(os.path.join(below, entry.name))
    images, folders = sorted(found.pop("image")), sorted(found.pop("folder"))
    for kind, names in found.items():
        skip(skipped, kind, sorted(names))
    return images, folders


def skip(skipped: Skipped, kind: str, names: list[str]) -> None:
    if names:
        skipped.setdefault(kind, []).extend(names)


def class_folders(root: Path, below: str, skipped: Skipped) -> list[str]:
    """Names of the folders in a folder. A link to a folder is one of them, unless it leads back here."""
    odd: Skipped = {}
    images, folders = scan(root, below, odd)
    here = (root / below).resolve()
    links = odd.pop("folder_links", [])
    back = {link for link in links if here.is_relative_to((root / link).resolve())}
    hidden = [name for name in folders if os.path.basename(name).startswith("__")]
    skip(skipped, "stray", images)
    skip(skipped, "folder_links", sorted(back))
    skip(skipped, "hidden", hidden)
    for kind, names in odd.items():
        skip(skipped, kind, names)
    return sorted(os.path.basename(name) for name in {*folders, *links} - back - set(hidden))


def walk(root: Path, below: str, skipped: Skipped) -> list[str]:
    """Names, relative to the root, of every image file below a folder, in order."""
    found: list[str] = []
    waiting = [below]
    while waiting:
        images, folders = scan(root, waiting.pop(), skipped)
        found += images
        waiting += reversed(folders)
        if len(found) > MOST_FILES:
            raise InputError(f"{printable(root / below)} holds more than {MOST_FILES:,} files; split it.")
    return found


def pictures(folder: Path) -> list[Path]:
    """Every image file below a folder, in order; links to folders are not followed, hidden files not seen."""
    return [folder / name for name in walk(folder, "", {})]
