"""Images in arrays: .npz files, IDX files (the format of MNIST), and scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import FileError, InputError, printable, require_extra
from vitrail.base.safe_files import open_regular
from vitrail.images.classes import MAX_CLASSES, listed, rename_classes
from vitrail.images.formats.sources import Dataset, Split, build_dataset, too_many_classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_BYTES = 64 << 30
_MAX_TEXT = 100_000_000
CLASSES = "classes"  # the array of an npz with the names of its classes
_IDX_SPLITS = {"train": "train", "t10k": "test", "test": "test", "val": "val"}  # by the start of the name
_NPZ_NAMES = {  # (images, labels) of each split
    "train": (("x_train", "y_train"), ("train_images", "train_labels"), ("images", "labels"), ("x", "y")),
    "val": (("x_val", "y_val"), ("val_images", "val_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
}


def read_digits() -> Dataset:
    """The 1,797 handwritten digits of 8 x 8 pixels inside the scikit-learn package; a fixed fifth of them
    is the validation set."""
    with require_extra("train"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    flat, labels = load_digits(return_X_y=True)
    images = np.rint(flat.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    digits = Split(labels.astype(np.int64), [f"digit {i}" for i in range(len(labels))], None, images)
    classes = [str(digit) for digit in range(10)]
    return Dataset("digits", classes, digits.take(np.array(train)), val=digits.take(np.array(test)))


# ---- npz ------------------------------------------------------------------------------------


def read_npz(file: Path) -> Dataset:
    """An .npz file with x_train, y_train, x_test, ...; or train_images, train_labels, val_images, ...; or
    images and labels."""
    arrays = _load_arrays(file)
    pairs: dict[str, tuple[str, str]] = {}
    for split, candidates in _NPZ_NAMES.items():
        for pair in candidates:
            if set(pair) <= set(arrays):
                pairs.setdefault(split, pair)
    if not pairs:
        raise InputError(
            f"{printable(file)} must hold x_train and y_train, or train_images and train_labels, but holds: "
            f"{printable(', '.join(arrays)) or 'nothing'}. Rename the arrays."
        )
    splits = {
        split: build_split(arrays[pixels], arrays[labels], f"{printable(file)}, {pixels}", split)
        for split, (pixels, labels) in pairs.items()
    }
    used = {name for pair in pairs.values() for name in pair}
    other = [name for name in arrays if name not in used and name != CLASSES]
    notes = [f"Arrays of {printable(file.name)} that are not read: {listed(other)}."] if other else []
    data = numbered_classes(file.stem, splits, notes)
    if CLASSES not in arrays:
        return data
    return rename_classes(data, [str(name) for name in arrays[CLASSES].tolist()])


def _load_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """All arrays of the file; the headers are checked before memory is allocated."""
    from vitrail.weights.readers.files import open_weights

    try:
        opened = open_weights(file, skip=(CLASSES,))
    except FileError as error:
        reason = error.__cause__.args[0] if error.__cause__ and error.__cause__.args else error
        raise InputError(
            f"{printable(file)} cannot be read as an npz file: {printable(reason)}. Images and labels must "
            "be arrays of integers, saved with numpy.savez."
        ) from error
    with opened as stored:
        if stored.kind != "npz":
            raise InputError(f"{printable(file)} is a {stored.kind} file, not an npz file; check its name.")
        if sum(entry.bytes for entry in stored.entries.values()) > _MAX_BYTES:
            raise InputError(
                f"The arrays of {printable(file)} must fit in {_MAX_BYTES >> 30} GiB; use a folder of images."
            )
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if CLASSES in arrays.files:
                _check_text(arrays.zip, file)
            return {name: arrays[name] for name in arrays.files}
    except InputError:
        raise
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{printable(file)} is not a complete npz file ({printable(error)}); save it again."
        ) from error


def _check_text(archive: zipfile.ZipFile, file: Path) -> None:
    """Check that `classes` is a row of texts of a sensible length, before memory is allocated."""
    with archive.open(f"{CLASSES}.npy") as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0
        shape, _, dtype = (np.lib.format.read_array_header_2_0 if version[0] > 1 else read_header)(member)
    if dtype.kind != "U" or len(shape) != 1 or math.prod(shape) * dtype.itemsize > _MAX_TEXT:
        raise InputError(
            f"The array classes of {printable(file)} must hold one name for each class, as text; it is "
            f"{dtype} of shape {shape}. Save it as numpy.array(names), or leave it out."
        )


# ---- IDX ------------------------------------------------------------------------------------


def idx_files(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The image and label files of each split: train-images-idx3-ubyte, t10k-labels-idx1-ubyte.gz, ..."""
    files = {}
    for start, split in _IDX_SPLITS.items():
        pair = [sorted(folder.glob(f"{start}*{kind}*idx[1-4]-ubyte*")) for kind in ("images", "labels")]
        if all(pair):
            files[split] = (pair[0][0], pair[1][0])
    return files


def read_idx(folder: Path, files: dict[str, tuple[Path, Path]]) -> Dataset:
    """A folder of IDX files, the format of MNIST: those of images and of labels of each split."""
    splits = {
        split: build_split(_read_idx_file(pixels), _read_idx_file(labels), printable(pixels), split)
        for split, (pixels, labels) in files.items()
    }
    return numbered_classes(folder.resolve().name, splits, [])


def _read_idx_file(file: Path) -> NDArray[np.uint8]:
    """An IDX file of uint8, gzipped or not: two zeros, the type 8, the number of axes, the shape, data."""
    try:
        with open_regular(file) as plain, gzip.open(plain) if file.suffix == ".gz" else plain as opened:
            zeros, kind, axes = struct.unpack(">HBB", opened.read(4))
            if zeros or kind != 8 or not 1 <= axes <= 4:
                raise ValueError("its header is not that of an IDX file of uint8")
            shape = struct.unpack(f">{axes}I", opened.read(4 * axes))
            count = math.prod(shape)
            if count > _MAX_BYTES:
                raise ValueError("its header declares more data than fits in memory")
            data = _read_up_to(opened, count + 1)
            if len(data) != count:
                raise ValueError(f"it holds {len(data):,} bytes, and its header declares {count:,}")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise InputError(
            f"{printable(file)} is not a complete IDX file: {printable(error)}. Download it again."
        ) from error
    return np.frombuffer(bytearray(data), dtype=np.uint8).reshape(shape)  # bytes are read-only


def _read_up_to(file: Any, count: int) -> bytes:
    """At most `count` bytes, in pieces: a header may declare far more than the file holds."""
    pieces, left = [], count
    while left and (piece := file.read(min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


# ---- splits ---------------------------------------------------------------------------------


def build_split(images: NDArray[Any], labels: NDArray[Any], name: str, split: str) -> Split:
    """A split of arrays, whose labels are class numbers or rows of 0 and 1."""
    pixels = _to_pixels(images, name)
    numbers = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if numbers.dtype.kind == "f" and (numbers % 1).any():
        raise InputError(
            f"The labels of {name} are decimal fractions ({labels.dtype}): that is regression, and Vitrail "
            "trains classifiers. Replace them by class numbers from 0, such as numpy.digitize(labels, edges)."
        )
    if numbers.dtype.kind not in "iub" or numbers.ndim not in (1, 2):
        raise InputError(
            f"The labels of {name} must be integers, one for each image, or a row of 0 and 1 for each; "
            f"they are {labels.dtype} of shape {labels.shape}. Number the classes from 0."
        )
    if len(numbers) != len(pixels):
        raise InputError(f"{name} has {len(pixels):,} images and {len(numbers):,} labels; give one for each.")
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    if low < 0 or (numbers.ndim == 2 and high > 1):
        rows = ", and those in rows must be 0 or 1" if numbers.ndim == 2 else ""
        raise InputError(
            f"Labels must count from 0{rows}; those of {name} go from {low:,} to {high:,}. Renumber them."
        )
    if numbers.ndim == 1 and high >= MAX_CLASSES:  # before uint64 overflows int64
        raise InputError(
            f"The highest label of {name} is {high:,}, and the limit is {MAX_CLASSES:,} classes. "
            "Number the classes without gaps: labels = numpy.unique(labels, return_inverse=True)[1]."
        )
    return Split(numbers.astype(np.int64), [f"{split} {i}" for i in range(len(pixels))], None, pixels)


def _to_pixels(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Images (N, H, W), (N, H, W, C) or (N, C, H, W) of 8 or 16 bits as uint8 (N, H, W, C)."""
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


def numbered_classes(name: str, splits: dict[str, Split], notes: list[str]) -> Dataset:
    """A data set whose classes are named by their numbers."""
    labels = [split.labels for split in splits.values()]
    multilabel = labels[0].ndim == 2
    if len({array.shape[1:] for array in labels}) > 1:
        raise InputError(
            f"The splits of {printable(name)} must have labels of the same kind, and theirs have the shapes "
            f"{', '.join(str(array.shape) for array in labels)}. Use class numbers in all of them, or "
            "the same number of columns."
        )
    count = labels[0].shape[1] if multilabel else int(max(array.max(initial=0) for array in labels)) + 1
    if count > MAX_CLASSES:
        raise too_many_classes(count, printable(name))
    if multilabel and count > 1 and all((array.sum(axis=1) == 1).all() for array in labels):
        notes.append(
            "The labels are one-hot and are trained as multi-label; labels.argmax(1) has one class each."
        )
    classes = [str(number) for number in range(count)]
    return build_dataset(name, classes, splits, notes)
