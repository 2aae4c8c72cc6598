"""A folder of images: a folder for each class, or train/, val/ and test/ with such folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.images.formats.lazy import RelativePaths
from vitrail.images.formats.sources import Dataset, Split, build_dataset

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
_UNSUPPORTED = {  # image formats that a user may expect to be read
    *(".heic", ".heif", ".avif", ".jfif", ".jp2", ".jxl", ".ppm", ".pgm", ".tga", ".psd", ".svg"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw", ".dcm", ".exr"),
}
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_MAX_FILES = 50_000_000

FAULTS = {  # what is skipped and the user may miss, by kind
    "stray": "images outside the class folders",
    "folders": "folders beside train/",
    "unsupported": "images in unsupported formats",
    "broken_links": "broken links",
    "folder_links": "links to folders (not followed)",
    "special": "pipes, sockets or devices",
    "unreadable": "folders that cannot be read",
}
HARMLESS = {"other": "files without an image suffix", "hidden": "hidden files and folders"}

Skipped = dict[str, list[str]]
"""The names of skipped files and folders, relative to the root, by kind: a key of FAULTS or HARMLESS."""


def read_folder(root: Path, *, own_classes: bool = False) -> Dataset:
    """A data set in a folder. Classes are named by their folders, in alphabetical order.

    Args:
        own_classes: val and test may have classes that train does not have.
    """
    skipped: Skipped = {}
    splits = _find_splits(root)
    if splits:
        folders = _class_folders(root, "", skipped)
        _skip(skipped, "folders", [name for name in folders if name not in splits.values()])
    else:
        splits = {"train": ""}
    if "train" in splits and (len(splits) == 1 or not own_classes):
        classes = _class_folders(root, splits["train"], skipped)
    else:
        classes = sorted({name for below in splits.values() for name in _class_folders(root, below, {})})
    if not classes:
        content = "images and no folders" if skipped.get("stray") else "no folders"
        raise InputError(
            f"{printable(root)} must hold a folder for each class, such as cat/1.jpg and dog/2.jpg, but "
            f"holds {content}."
        )
    data = {name: _read_split(root, folder, classes, skipped) for name, folder in splits.items()}
    name = root.resolve().name
    return build_dataset(name, classes, data, skipped=skipped)


def _find_splits(root: Path) -> dict[str, str]:
    """The folders of train, val and test by split; empty if the folders are classes."""
    names = _class_folders(root, "", {})
    splits: dict[str, str] = {}
    for name in names:
        split = SPLITS.get(name.lower())
        if split in splits:
            raise InputError(
                f"{printable(root)} has two folders for {split}: {printable(splits[split])} and "
                f"{printable(name)}; merge them, or rename one."
            )
        if split is not None:
            splits[split] = name
    return splits if "train" in splits or len(splits) == len(names) else {}


def _read_split(root: Path, folder: str, classes: list[str], skipped: Skipped) -> Split:
    """The images of one split; a class that train does not have is an error."""
    train = not folder or SPLITS[folder.lower()] == "train"  # whose skipped files are recorded already
    known = set(classes)
    names = _class_folders(root, folder, {} if train else skipped)
    if unknown := [name for name in names if name not in known]:
        raise InputError(
            f"{printable(root / folder)} has classes that train does not have: "
            f"{printable(', '.join(unknown[:3]))}. Rename the folders, or add images of them to train."
        )
    files: list[str] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        below = os.path.join(folder, name)
        images = _walk(root, below, skipped) if (root / below).is_dir() else []
        files += images
        labels += [number] * len(images)
    return Split(np.array(labels, dtype=np.int64), files, RelativePaths(root, files))


# ---- the contents of a folder ---------------------------------------------------------------


def _entry_kind(entry: os.DirEntry[str]) -> str:
    """image, folder, or the kind of a skipped entry."""
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_symlink():  # os.path, because an entry raises an error for circular links
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
    return "image" if suffix in SUFFIXES else "unsupported" if suffix in _UNSUPPORTED else "other"


def _scan(root: Path, below: str, skipped: Skipped) -> tuple[list[str], list[str]]:
    """The sorted names of the images and of the folders in a folder; all others are added to `skipped`."""
    entries_of: dict[str, list[str]] = {"image": [], "folder": []}
    with os.scandir(os.path.join(root, below)) as entries:
        for entry in entries:
            entries_of.setdefault(_entry_kind(entry), []).append(os.path.join(below, entry.name))
    images, folders = sorted(entries_of.pop("image")), sorted(entries_of.pop("folder"))
    for kind, names in entries_of.items():
        _skip(skipped, kind, sorted(names))
    return images, folders


def _skip(skipped: Skipped, kind: str, names: list[str]) -> None:
    if names:
        skipped.setdefault(kind, []).extend(names)


def _class_folders(root: Path, below: str, skipped: Skipped) -> list[str]:
    """The names of the folders in a folder, with links to folders that do not lead back here."""
    other: Skipped = {}
    images, folders = _scan(root, below, other)
    here = (root / below).resolve()
    links = other.pop("folder_links", [])
    back = {link for link in links if here.is_relative_to((root / link).resolve())}
    hidden = [name for name in folders if os.path.basename(name).startswith("__")]
    _skip(skipped, "stray", images)
    _skip(skipped, "folder_links", sorted(back))
    _skip(skipped, "hidden", hidden)
    for kind, names in other.items():
        _skip(skipped, kind, names)
    return sorted(os.path.basename(name) for name in {*folders, *links} - back - set(hidden))


def _walk(root: Path, below: str, skipped: Skipped) -> list[str]:
    """The names, relative to the root, of all image files below a folder, in order.

    A folder that cannot be read is added to `skipped` with the reason; see `check_readable`.
    """
    files: list[str] = []
    waiting = [below]
    while waiting:
        folder = waiting.pop()
        try:
            images, folders = _scan(root, folder, skipped)
        except OSError as error:
            _skip(skipped, "unreadable", [f"{printable(folder)}: {error.strerror or error}"])
            continue
        files += images
        waiting += reversed(folders)
        if len(files) > _MAX_FILES:
            raise InputError(f"{printable(root / below)} holds more than {_MAX_FILES:,} files; split it.")
    return files


def check_readable(root: str | Path, skipped: Mapping[str, list[str]]) -> None:
    """Refuse folders that cannot be read: their images would be missed."""
    if names := skipped.get("unreadable"):
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        raise InputError(
            f"{printable(root)} has folders that cannot be read, and their images would be missed: "
            f"{names[0]}{more}. Shorten their paths or change their permissions; vitrail doctor lists them."
        )


def expand_folders(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, and every image below a folder."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"{printable(path)} does not exist; check the path of the image.")
        found = list_images(path) if path.is_dir() else [path]
        if not found:
            raise InputError(f"{printable(path)} has no images; name a folder with images.")
        files += found
    return files


def list_images(folder: Path) -> list[Path]:
    """All image files below a folder, in order. Links to folders and hidden files are skipped."""
    skipped: Skipped = {}
    names = _walk(folder, "", skipped)
    check_readable(folder, skipped)
    return [folder / name for name in names]
