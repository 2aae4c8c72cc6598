"""Every kind of data set, hold-out splits, and errors."""

import gzip
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from vitrail.base.errors import InputError
from vitrail.images.formats.sources import Dataset, open_dataset

RNG = np.random.default_rng(0)


def make_image(path, red=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), (red, 0, 0)).save(path)
    return path


def photos(folder, **counts):
    """Files of different content; nothing here decodes them."""
    for name, count in counts.items():
        for i in range(count):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / f"{i}.png").write_text(f"{name} {i}")
    return folder


def names(split):
    return list(split.names)


# ---- folders -----------------------------------------------------------------------------------


def test_a_folder_with_a_folder_for_each_class(tmp_path):
    data = open_dataset(photos(tmp_path / "pets", dog=5, cat=10, emu=5))
    assert (data.name, data.classes) == ("pets", ["cat", "dog", "emu"])
    assert (len(data.train), len(data.val), data.test) == (17, 3, None)
    assert set(data.val.labels.tolist()) == {0, 1, 2}
    for split in (data.train, data.val):
        for name, label, path in zip(split.names, split.labels, split.paths, strict=True):
            assert path == tmp_path / "pets" / name
            assert name.split(os.sep)[0] == data.classes[label]
    [note] = data.notes
    assert note.startswith("3 of 20 images are held out for validation, chosen by their content")


def test_nested_folders_and_suffixes_of_any_case(tmp_path):
    photos(tmp_path, a=1, b=1)
    for name in ("a/deep/er/1.PNG", "a/2.JPeG", "b/3.webp", "b/4.tif", "b/5.bmp", "b/6.gif"):
        make_image(tmp_path / name)
    (tmp_path / "b" / "list.txt").write_text("no image")
    data = open_dataset(tmp_path)
    found = sorted([*names(data.train), *names(data.val)])
    assert found == [
        "a/0.png",
        "a/2.JPeG",
        "a/deep/er/1.PNG",
        "b/0.png",
        "b/3.webp",
        "b/4.tif",
        "b/5.bmp",
        "b/6.gif",
    ]


@pytest.mark.parametrize("word", ["val", "valid", "validation"])
def test_existing_splits_are_used(word, tmp_path):
    photos(tmp_path / "train", a=3, b=2)
    photos(tmp_path / word, a=1, b=1)
    photos(tmp_path / "test", b=2)
    data = open_dataset(tmp_path)
    assert [len(data.train), len(data.val), len(data.test)] == [5, 2, 2]
    assert data.test.labels.tolist() == [1, 1]
    assert names(data.val) == [f"{word}/a/0.png", f"{word}/b/0.png"]
    assert data.notes == ["One class has no image in test: a."]
    assert data.eval_split is data.val


def test_a_test_split_alone_is_used_for_evaluation(tmp_path):
    photos(tmp_path / "train", a=3, b=2)
    photos(tmp_path / "test", a=1, b=1)
    data = open_dataset(tmp_path)
    assert (len(data.train), data.val, len(data.eval_split)) == (5, None, 2)


def test_an_empty_val_is_replaced_by_a_hold_out_split(tmp_path):
    photos(tmp_path / "train", a=5, b=5)
    (tmp_path / "val" / "a").mkdir(parents=True)
    data = open_dataset(tmp_path)
    assert len(data.train) + len(data.val) == 10
    assert set(data.val.labels.tolist()) == {0, 1}


def test_a_class_that_only_val_has(tmp_path):
    photos(tmp_path / "train", a=3, b=2)
    photos(tmp_path / "val", a=1, z=1)
    with pytest.raises(InputError, match=r"val has classes that train does not have: z"):
        open_dataset(tmp_path)


def test_hostile_folders(tmp_path):
    """Circular links, pipes, hidden files and folders, an empty class, a text file with an image suffix."""
    folder = photos(tmp_path / "set", a=4, b=4)
    (folder / "empty").mkdir()
    (folder / "up").symlink_to(folder, target_is_directory=True)
    (folder / "out").symlink_to(tmp_path, target_is_directory=True)
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    (folder / "a" / "round").symlink_to(folder / "a", target_is_directory=True)
    (folder / "a" / "gone.png").symlink_to(folder / "nowhere.png")
    os.mkfifo(folder / "a" / "pipe.png")
    (folder / "a" / "folder.png").mkdir()
    make_image(folder / "a" / ".hidden.png")
    (folder / "a" / "._0.png").write_bytes(b"a Mac wrote this")
    make_image(folder / "a" / ".cache" / "1.png")
    make_image(folder / ".git" / "1.png")
    make_image(folder / "__pycache__" / "1.png")
    (folder / "b" / "text.png").write_text("hello")
    (folder / "b" / "new\nline \x1b[31m.png").write_bytes(b"")
    start = time.perf_counter()
    data = open_dataset(folder)
    assert time.perf_counter() - start < 1
    assert data.classes == ["a", "b", "empty"]
    assert "One class has no training image: empty." in data.notes[1]
    for text in ("3 links to folders", "3 broken links", "1 pipes", "vitrail doctor lists them"):
        assert text in data.notes[0]
    found = sorted([*names(data.train), *names(data.val)])
    assert found == [
        *[f"a/{i}.png" for i in range(4)],
        *[f"b/{i}.png" for i in range(4)],
        "b/new\nline \x1b[31m.png",
        "b/text.png",
    ]


def test_a_class_may_be_a_link(tmp_path):
    """Links to other folders are common; only those that lead back are refused."""
    photos(tmp_path / "elsewhere", b=4)
    photos(tmp_path / "set", a=4)
    (tmp_path / "set" / "b").symlink_to(tmp_path / "elsewhere" / "b")
    assert open_dataset(tmp_path / "set").classes == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda f: f.mkdir(),
            r"set must hold a folder for each class, .* but holds no folders",
        ),
        (lambda f: make_image(f / "1.jpg"), "holds images and no folders"),
        (
            lambda f: photos(f, a=3),
            r"set has 1 class; training needs at least two classes",
        ),
        (
            lambda f: [(f / n).mkdir(parents=True) for n in "ab"],
            r"set has no training images",
        ),
        (lambda f: photos(f, a=1, b=1), r"too few images for a validation set: 2 in 2 classes"),
        (
            lambda f: f.write_text("x"),
            r"set cannot be read as data; .* a .csv, .jsonl, .npz, .parquet or packed file, tar shards, or the word digits",
        ),
        (lambda f: None, r"set does not exist"),
    ],
)
def test_invalid_folders(make, words, tmp_path):
    make(tmp_path / "set")
    with pytest.raises(InputError, match=words):
        open_dataset(tmp_path / "set")


# ---- arrays ------------------------------------------------------------------------------------


def random_pixels(*shape, dtype=np.uint8):
    return RNG.integers(0, 255, shape).astype(dtype)


def test_the_array_names_of_an_npz(tmp_path):
    x, y = random_pixels(10, 6, 5), np.arange(10) % 2
    np.savez(tmp_path / "keras.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    np.savez_compressed(
        tmp_path / "medmnist.npz",
        train_images=x, train_labels=y[:, None], val_images=x[:2], val_labels=y[:2, None],
        test_images=x[:3], test_labels=y[:3, None],
    )  # fmt: skip
    np.savez(tmp_path / "plain.npz", images=x, labels=y)
    keras, med, plain = (open_dataset(tmp_path / f"{name}.npz") for name in ("keras", "medmnist", "plain"))
    assert (len(keras.train), keras.val, len(keras.test)) == (10, None, 3)
    assert (len(med.train), len(med.val), len(med.test)) == (10, 2, 3)
    assert len(plain.train) + len(plain.val) == 10
    for data in (keras, med):
        assert (data.classes, data.channels) == (["0", "1"], 1)
        assert (data.train.images[..., 0] == x).all()
        assert (data.train.labels == y).all()
        assert data.train.names[3] == "train 3"


def test_arrays_of_every_layout_and_bit_depth(tmp_path):
    y = np.arange(6) % 3
    last, first = random_pixels(6, 8, 7, 3), random_pixels(6, 3, 8, 7)
    deep = RNG.integers(0, 65536, (6, 8, 7)).astype(np.uint16)
    deep[0, 0, :3] = 0, 257, 65535
    for name, x in (("last", last), ("first", first), ("deep", deep)):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    data = {name: open_dataset(tmp_path / f"{name}.npz").train.images for name in ("last", "first", "deep")}
    assert (data["last"] == last).all()
    assert (data["first"] == first.transpose(0, 2, 3, 1)).all()
    assert data["deep"].dtype == np.uint8
    assert data["deep"][0, 0, :3, 0].tolist() == [0, 1, 255]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (dict(a=random_pixels(4, 8, 8)), r"must hold x_train and y_train, .* but holds: a\."),
        (dict(x=np.zeros((4, 8, 8)), y=np.arange(4)), r"must be uint8 or uint16, and .*, x is float64"),
        (dict(x=random_pixels(4, 8), y=np.arange(4)), r"an array \(N, H, W\) or \(N, H, W, C\), .* the shape \(4, 8\)"),
        (dict(x=random_pixels(4, 0, 8), y=np.arange(4)), r"the shape \(4, 0, 8, 1\)"),
        (dict(x=random_pixels(4, 8, 8), y=np.arange(3)), r"t.npz, x has 4 images and 3 labels"),
        (dict(x=random_pixels(4, 8, 8), y=np.arange(4.0)), r"must be integers.* float64"),
        (dict(x=random_pixels(4, 8, 8), y=np.arange(4) / 2), r"decimal fractions .* regression"),
        (dict(x=random_pixels(4, 8, 8), y=np.array(3)), r"must be integers, one for each"),
        (dict(x=random_pixels(4, 8, 8), y=np.arange(4) - 1), r"must count from 0; .* from -1 to 2"),
        (dict(x=random_pixels(4, 8, 8), y=np.full((4, 3), 2)), r"must be 0 or 1; .* from 2 to 2"),
        (dict(x=random_pixels(4, 8, 8), y=np.array([0, 1, 2, 2**40])), r"highest label of .* is 1,099,511,627,776, and the limit is 100,000 classes"),
        (dict(x=random_pixels(4, 8, 8), y=np.zeros(4, int)), r"at least two classes"),
        (
            dict(x=random_pixels(4, 8, 8), y=np.eye(4, dtype=int), x_val=random_pixels(4, 8, 8), y_val=np.eye(4, 3, dtype=int)),
            r"labels of the same kind.* \(4, 4\), \(4, 3\)",
        ),
        (
            dict(x=random_pixels(4, 8, 8), y=np.arange(4), x_val=random_pixels(4, 8, 8), y_val=np.eye(4, dtype=int)),
            r"labels of the same kind",
        ),
    ],
)  # fmt: skip
def test_invalid_arrays(arrays, words, tmp_path):
    np.savez(tmp_path / "t.npz", **arrays)
    start = time.perf_counter()
    with pytest.raises(InputError, match=words):
        open_dataset(tmp_path / "t.npz")
    assert time.perf_counter() - start < 1


def test_broken_npz_files(tmp_path):
    from vitrail.base.errors import VitrailError

    complete = tmp_path / "complete.npz"
    np.savez_compressed(complete, x=random_pixels(40, 8, 8), y=np.arange(40) % 2)
    data = bytearray(complete.read_bytes())
    data[200] ^= 255
    for text in (b"", b"hello", complete.read_bytes()[:300], bytes(data)):
        (tmp_path / "t.npz").write_bytes(text)
        with pytest.raises(VitrailError, match=r"t\.npz"):
            open_dataset(tmp_path / "t.npz")
    np.savez(tmp_path / "object.npz", x=np.array([{"a": 1}], dtype=object), y=np.arange(1))
    with pytest.raises(VitrailError):
        open_dataset(tmp_path / "object.npz")


# ---- IDX ---------------------------------------------------------------------------------------


def idx(array):
    return (
        struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


def mnist(folder, zipped, **splits):
    folder.mkdir(exist_ok=True)
    for start, (x, y) in splits.items():
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            file = folder / f"{start}-{kind}-ubyte{'.gz' if zipped else ''}"
            file.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(zipped, tmp_path):
    x, y = random_pixels(12, 7, 9), (np.arange(12) % 3).astype(np.uint8)
    data = open_dataset(mnist(tmp_path / "fashion", zipped, train=(x, y), t10k=(x[:4], y[:4])))
    assert (data.name, data.classes) == ("fashion", ["0", "1", "2"])
    assert (len(data.train), data.val, len(data.test)) == (12, None, 4)
    assert (data.train.images[..., 0] == x).all()
    assert (data.train.labels == y).all()


def test_idx_without_train(tmp_path):
    x, y = random_pixels(4, 7, 9), np.zeros(4, np.uint8)
    with pytest.raises(InputError, match="has images of test but none of train"):
        open_dataset(mnist(tmp_path, False, t10k=(x, y)))


Y = idx((np.arange(4) % 2).astype(np.uint8))
INVALID_IDX = {
    "huge": (struct.pack(">HBBIII", 0, 8, 3, 60_000, 1000, 1000) + b"x" * 100, r"it holds 100 bytes, and its header declares 60,000,000,000"),
    "vast": (struct.pack(">HBBIIII", 0, 8, 4, *[2**32 - 1] * 4), r"more data than fits in memory"),
    "short": (idx(random_pixels(4, 8, 8))[:-1], r"it holds 255 bytes, and its header declares 256"),
    "long": (idx(random_pixels(4, 8, 8)) + b"!", r"it holds 257 bytes, and its header declares 256"),
    "none": (b"", r"train-images-idx3-ubyte"),
    "head": (b"\0\0\x08\x03\0\0", r"train-images-idx3-ubyte"),
    "float": (b"\0\0\x0d\x03" + idx(random_pixels(4, 8, 8))[4:], r"not that of an IDX file of uint8"),
    "axes": (b"\0\0\x08\xff" + b"\0" * 2000, r"not that of an IDX file of uint8"),
    "zeros": (struct.pack(">HBBIII", 0, 8, 3, 4, 0, 8), r"the shape \(4, 0, 8, 1\)"),
    "text": (b"<html>404</html>", r"not that of an IDX file of uint8"),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("case", INVALID_IDX)
def test_invalid_idx_files(case, zipped, tmp_path):
    text, words = INVALID_IDX[case]
    end = ".gz" if zipped else ""
    (tmp_path / f"train-images-idx3-ubyte{end}").write_bytes(gzip.compress(text) if zipped else text)
    (tmp_path / f"train-labels-idx1-ubyte{end}").write_bytes(gzip.compress(Y) if zipped else Y)
    start = time.perf_counter()
    with pytest.raises(InputError, match=words):
        open_dataset(tmp_path)
    assert time.perf_counter() - start < 1


def test_broken_gzip_and_pipes(tmp_path):
    x, y = random_pixels(40, 8, 8), (np.arange(40) % 2).astype(np.uint8)
    mnist(tmp_path, True, train=(x, y))
    file = tmp_path / "train-images-idx3-ubyte.gz"
    complete = file.read_bytes()
    broken = bytearray(complete)
    broken[40] ^= 255
    for text in (bytes(broken), complete[:200], b"\x1f\x8b\x08\0" + b"\xff" * 50, complete[:-8] + b"\0" * 8):
        file.write_bytes(text)
        with pytest.raises(InputError, match=r"train-images-idx3-ubyte\.gz is not a complete IDX file"):
            open_dataset(tmp_path)
    file.unlink()
    os.mkfifo(file)
    start = time.perf_counter()
    with pytest.raises(InputError, match="a pipe or a device"):
        open_dataset(tmp_path)
    assert time.perf_counter() - start < 1


def test_invalid_idx_files_take_little_memory(tmp_path):
    """In a child process that may grow by 50 MB after its imports. One case is a gzip file of 400 MB whose
    header declares 1,000 bytes."""
    for case, (text, _) in INVALID_IDX.items():
        (tmp_path / case).mkdir()
        (tmp_path / case / "train-images-idx3-ubyte").write_bytes(text)
        (tmp_path / case / "train-labels-idx1-ubyte").write_bytes(Y)
    (tmp_path / "bomb").mkdir()
    with gzip.open(tmp_path / "bomb" / "train-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(struct.pack(">HBBIII", 0, 8, 3, 10, 10, 10))
        for _ in range(400):
            file.write(bytes(1 << 20))
    (tmp_path / "bomb" / "train-labels-idx1-ubyte").write_bytes(Y)
    program = """
import resource, sys
from pathlib import Path
from vitrail.images.formats.sources import open_dataset
from vitrail.images.formats import arrays
from vitrail.images import decode
from vitrail.base.errors import InputError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20),) * 2)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        open_dataset(folder)
    except InputError as error:
        print(folder.name, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == sorted([*INVALID_IDX, "bomb"])
    assert "it holds 1,001 bytes, and its header declares 1,000" in done.stdout


# ---- digits ------------------------------------------------------------------------------------


def test_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, again = open_dataset("digits"), open_dataset("digits", split_seed=5)
    assert isinstance(data, Dataset)
    assert (len(data.train), len(data.val), data.train.images.shape[1:]) == (1437, 360, (8, 8, 1))
    assert data.classes == list("0123456789")
    assert names(data.val) == names(again.val)
    assert np.bincount(data.val.labels).min() >= 33
    photos(tmp_path / "digits", one=5, two=5)  # a folder of that name is meant
    assert open_dataset("digits").classes == ["one", "two"]
