"""Images in arrays: .npz files, IDX files (MNIST and its kin), and scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.classes import listed
from vitrail.data.decode import open_regular
from vitrail.data.sources import MOST_CLASSES, Dataset, Split, too_many
from vitrail.errors import FileError, InputError, needs, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = 64 << 30
IDX = {"train": "train", "t10k": "test", "test": "test", "val": "val"}  # how the files' names begin
SPELLINGS = {  # of an npz: (images, labels) of each split
    "train": (("x_train", "y_train"), ("train_images", "train_labels"), ("images", "labels"), ("x", "y")),
    "val": (("x_val", "y_val"), ("val_images", "val_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}


def read_digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, inside the scikit-learn package; a fifth is held out,
    the same every time."""
    with needs("train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    flat, labels = load_digits(return_X_y=True)
    images = np.rint(flat.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    whole = Split(labels.astype(np.int64), [f"digit {i}" for i in range(len(labels))], None, images)
    classes = [str(digit) for digit in range(10)]
    return Dataset("digits", classes, whole.take(np.array(train)), val=whole.take(np.array(test)))


# ---- npz ------------------------------------------------------------------------------------


def read_npz(file: Path) -> Dataset:
    """x_train, y_train, x_test...; or train_images, train_labels, val_images...; or images, labels."""
    arrays = load_arrays(file)
    found: dict[str, tuple[str, str]] = {}
    for split, pairs in SPELLINGS.items():
        for pair in pairs:
            if set(pair) <= set(arrays):
                found.setdefault(split, pair)
    if "train" not in found:
        raise InputError(
            f"{printable(file)} must hold x_train and y_train, or train_images and train_labels, but holds: "
            f"{printable(', '.join(arrays)) or 'nothing'}. Rename the arrays."
        )
    splits = {
        split: as_split(arrays[pixels], arrays[labels], f"{printable(file)}, {pixels}", split)
        for split, (pixels, labels) in found.items()
    }
    used = {name for pair in found.values() for name in pair}
    other = [name for name in arrays if name not in used]
    notes = [f"Arrays of {printable(file.name)} that are not read: {listed(other)}."] if other else []
    return named(file.stem, splits, notes)


def load_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Every array of the file; its headers are checked before anything is taken into memory."""
    from vitrail.weights.files import open_weights

    try:
        opened = open_weights(file)
    except FileError as error:
        reason = error.__cause__.args[0] if error.__cause__ and error.__cause__.args else error
        raise InputError(
            f"{printable(file)} cannot be read as an npz file: {printable(reason)}. Images and labels must "
            "be arrays of whole numbers, saved with numpy.savez."
        ) from error
    with opened as stored:
        if stored.kind != "npz":
            raise InputError(f"{printable(file)} is not an npz file but {stored.kind}; check its name.")
        if sum(entry.bytes for entry in stored.entries.values()) > MOST_BYTES:
            raise InputError(
                f"The arrays of {printable(file)} must fit in {MOST_BYTES >> 30} GiB; use a folder of images."
            )
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{printable(file)} is not a whole npz file ({printable(error)}); save it again."
        ) from error


# ---- IDX ------------------------------------------------------------------------------------


def has_idx(folder: Path) -> bool:
    return bool(idx_files(folder))


def idx_files(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Images and labels of each split: train-images-idx3-ubyte, t10k-labels-idx1-ubyte.gz and kin."""
    found = {}
    for start, split in IDX.items():
        pair = [sorted(folder.glob(f"{start}*{kind}*idx[1-4]-ubyte*")) for kind in ("images", "labels")]
        if all(pair):
            found[split] = (pair[0][0], pair[1][0])
    return found


def read_idx(folder: Path) -> Dataset:
    files = idx_files(folder)
    if "train" not in files:
        raise InputError(
            f"The IDX files in {printable(folder)} must include train-images and train-labels; add them."
        )
    splits = {
        split: as_split(idx_array(pixels), idx_array(labels), printable(pixels), split)
        for split, (pixels, labels) in files.items()
    }
    return named(folder.resolve().name, splits, [])


def idx_array(file: Path) -> NDArray[np.uint8]:
    """An IDX file of bytes, gzipped or not: two zeros, the type 8, how many axes, their lengths, the data."""
    try:
        with open_regular(file) as plain, gzip.open(plain) if file.suffix == ".gz" else plain as opened:
            zeros, kind, axes = struct.unpack(">HBB", opened.read(4))
            if zeros or kind != 8 or not 1 <= axes <= 4:
                raise ValueError("its first bytes are not those of an IDX file of bytes")
            shape = struct.unpack(f">{axes}I", opened.read(4 * axes))
            count = math.prod(shape)
            if count > MOST_BYTES:
                raise ValueError("it says it holds more than fits in memory")
            data = read_upto(opened, count + 1)
            if len(data) != count:
                raise ValueError(f"it holds {len(data):,} bytes where it says {count:,}")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise InputError(
            f"{printable(file)} is not a whole IDX file: {printable(error)}. Download it again."
        ) from error
    return np.frombuffer(bytearray(data), dtype=np.uint8).reshape(shape)  # bytes cannot be written to


def read_upto(file: Any, count: int) -> bytes:
    """At most so many bytes, in pieces: a file may say that it holds far more than it does."""
    pieces, left = [], count
    while left and (piece := file.read(min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


# ---- arrays as splits -----------------------------------------------------------------------


def as_split(images: NDArray[Any], labels: NDArray[Any], name: str, split: str) -> Split:
    levels = as_levels(images, name)
    numbers = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if numbers.dtype.kind not in "iub" or numbers.ndim not in (1, 2):
        raise InputError(
            f"The labels of {name} must be whole numbers, one for each image, or a row of 0 and 1 for each; "
            f"they are {labels.dtype} of shape {labels.shape}. Number the classes from 0."
        )
    if len(numbers) != len(levels):
        raise InputError(f"{name} has {len(levels):,} images and {len(numbers):,} labels; give one for each.")
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    if low < 0 or (numbers.ndim == 2 and high > 1):
        rows = ", and those in rows must be 0 or 1" if numbers.ndim == 2 else ""
        raise InputError(
            f"Labels must count from 0{rows}; those of {name} go from {low:,} to {high:,}. Number them anew."
        )
    if numbers.ndim == 1 and high >= MOST_CLASSES:  # before whole numbers of 64 bits become others
        raise InputError(
            f"The highest label of {name} is {high:,}, and at most {MOST_CLASSES:,} classes are possible. "
            "Number the classes without gaps: labels = numpy.unique(labels, return_inverse=True)[1]."
        )
    return Split(numbers.astype(np.int64), [f"{split} {i}" for i in range(len(levels))], None, levels)


def as_levels(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """(N, H, W), (N, H, W, C) or (N, C, H, W) of 8 or 16 bits as (N, H, W, C) of 8."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or 0 in images.shape:
        raise InputError(
            f"Images must be an array (N, H, W) or (N, H, W, C), and {name} has the shape {images.shape}."
        )
    if images.shape[1] in (1, 3, 4) and images.shape[3] not in (1, 3, 4):
        images = images.transpose(0, 2, 3, 1)
    if images.dtype == np.uint16:
        return np.rint(images / 257).astype(np.uint8)
    if images.dtype != np.uint8:
        raise InputError(
            f"Images must be uint8 or uint16, and {name} is {images.dtype}; scale it to 0 to 255, as uint8."
        )
    return np.ascontiguousarray(images)


def named(name: str, splits: dict[str, Split], notes: list[str]) -> Dataset:
    """A data set whose classes are called by their numbers."""
    labels = [split.labels for split in splits.values()]
    several = labels[0].ndim == 2
    if len({some.shape[1:] for some in labels}) > 1:
        raise InputError(
            f"The splits of {printable(name)} must have labels alike, and theirs have the shapes "
            f"{', '.join(str(some.shape) for some in labels)}. Number the classes alike, or give every split "
            "as many columns."
        )
    count = labels[0].shape[1] if several else int(max(some.max(initial=0) for some in labels)) + 1
    if count > MOST_CLASSES:
        raise too_many(count, printable(name))
    if several and count > 1 and all((some.sum(axis=1) == 1).all() for some in labels):
        notes.append(
            "The labels are one-hot and are trained as multi-label; labels.argmax(1) has one class each."
        )
    classes = [str(number) for number in range(count)]
    return Dataset(name, classes, splits["train"], splits.get("val"), splits.get("test"), notes)
