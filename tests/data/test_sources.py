"""Every kind of data, what is held out, and what is said of data that is none."""

import gzip
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from vitrail.data.sources import Dataset, Split, hold_out, open_data
from vitrail.errors import InputError

CHANCE = np.random.default_rng(0)


def picture(path, level=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), (level, 0, 0)).save(path)
    return path


def photos(folder, **counts):
    for name, count in counts.items():
        for i in range(count):
            picture(folder / name / f"{i}.png")
    return folder


def names(split):
    return list(split.names)


# ---- folders -----------------------------------------------------------------------------------


def test_a_folder_with_a_folder_for_each_class(tmp_path):
    data = open_data(photos(tmp_path / "pets", dog=5, cat=10, emu=5))
    assert (data.name, data.classes) == ("pets", ["cat", "dog", "emu"])
    assert (len(data.train), len(data.val), data.test) == (16, 4, None)
    assert data.val.labels.tolist() == [0, 0, 1, 2]
    for split in (data.train, data.val):
        for name, label, path in zip(split.names, split.labels, split.paths, strict=True):
            assert path == tmp_path / "pets" / name
            assert name.split(os.sep)[0] == data.classes[label]
    assert data.notes == ["4 of 20 images are held out for validation (seed 0)."]


def test_names_in_folders_below_and_of_any_case(tmp_path):
    photos(tmp_path, a=1, b=1)
    for name in ("a/deep/er/1.PNG", "a/2.JPeG", "b/3.webp", "b/4.tif", "b/5.bmp", "b/6.gif"):
        picture(tmp_path / name)
    (tmp_path / "b" / "list.txt").write_text("no picture")
    data = open_data(tmp_path)
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
def test_splits_stay_as_they_are(word, tmp_path):
    photos(tmp_path / "train", a=3, b=2)
    photos(tmp_path / word, a=1, b=1)
    photos(tmp_path / "test", b=2)
    data = open_data(tmp_path)
    assert [len(data.train), len(data.val), len(data.test)] == [5, 2, 2]
    assert data.test.labels.tolist() == [1, 1]
    assert names(data.val) == [f"{word}/a/0.png", f"{word}/b/0.png"]
    assert data.notes == ["One class has no image in test: a."]
    assert data.held_out is data.val


def test_with_a_test_split_alone_that_judges(tmp_path):
    photos(tmp_path / "train", a=3, b=2)
    photos(tmp_path / "test", a=1, b=1)
    data = open_data(tmp_path)
    assert (len(data.train), data.val, len(data.held_out)) == (5, None, 2)


def test_an_empty_val_is_none(tmp_path):
    photos(tmp_path / "train", a=5, b=5)
    (tmp_path / "val" / "a").mkdir(parents=True)
    data = open_data(tmp_path)
    assert (len(data.train), len(data.val)) == (8, 2)


def test_a_class_that_only_val_has(tmp_path):
    photos(tmp_path / "train", a=3, b=2)
    photos(tmp_path / "val", a=1, z=1)
    with pytest.raises(InputError, match=r"val has classes that train does not have: z"):
        open_data(tmp_path)


def test_hostile_folders(tmp_path):
    """Links that go round, pipes, hidden files and folders, an empty class, a picture that is text."""
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
    picture(folder / "a" / ".hidden.png")
    (folder / "a" / "._0.png").write_bytes(b"a Mac wrote this")
    picture(folder / "a" / ".cache" / "1.png")
    picture(folder / ".git" / "1.png")
    picture(folder / "__pycache__" / "1.png")
    (folder / "b" / "text.png").write_text("hello")
    (folder / "b" / "new\nline \x1b[31m.png").write_bytes(b"")
    start = time.perf_counter()
    data = open_data(folder)
    assert time.perf_counter() - start < 1
    assert data.classes == ["a", "b", "empty"]
    assert "One class has no training image: empty." in data.notes[1]
    for words in ("3 links to folders", "3 links that lead nowhere", "1 pipes", "vitrail doctor names them"):
        assert words in data.notes[0]
    found = sorted([*names(data.train), *names(data.val)])
    assert found == [
        *[f"a/{i}.png" for i in range(4)],
        *[f"b/{i}.png" for i in range(4)],
        "b/new\nline \x1b[31m.png",
        "b/text.png",
    ]


def test_a_class_may_be_a_link(tmp_path):
    """Folders put together from elsewhere are usual; only those that lead back are not."""
    photos(tmp_path / "elsewhere", b=4)
    photos(tmp_path / "set", a=4)
    (tmp_path / "set" / "b").symlink_to(tmp_path / "elsewhere" / "b")
    assert open_data(tmp_path / "set").classes == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda f: f.mkdir(),
            r"set must hold a folder for each class, .* and holds no folders",
        ),
        (lambda f: picture(f / "1.jpg"), "holds images and no folders"),
        (
            lambda f: photos(f, a=3),
            r"set has 1 class; training needs at least two classes",
        ),
        (
            lambda f: [(f / n).mkdir(parents=True) for n in "ab"],
            r"set holds no images to train on",
        ),
        (lambda f: photos(f, a=1, b=1), r"too few images to hold some out for validation: 2 in 2 classes"),
        (
            lambda f: f.write_text("x"),
            r"set cannot be read as data; .* a .csv, .jsonl or .npz file, or the word digits",
        ),
        (lambda f: None, r"set does not exist"),
    ],
)
def test_what_is_said_of_a_folder_that_will_not_do(make, words, tmp_path):
    make(tmp_path / "set")
    with pytest.raises(InputError, match=words):
        open_data(tmp_path / "set")


# ---- holding out -------------------------------------------------------------------------------


def test_the_same_seed_holds_out_the_same(tmp_path):
    photos(tmp_path, a=20, b=10, c=1)
    first, again, other = (open_data(tmp_path, seed=seed) for seed in (3, 3, 4))
    assert names(first.val) == names(again.val)
    assert names(first.val) != names(other.val)
    for data in (first, other):
        assert (
            data.val.labels.tolist() == [0] * 4 + [1] * 2
        )  # a fifth of each, and the only c is to learn from
        assert not set(names(data.val)) & set(names(data.train))
        assert len(data.train) + len(data.val) == 31


def test_another_share(tmp_path):
    photos(tmp_path, a=10, b=20)
    assert open_data(tmp_path, val_share=0.5).val.labels.tolist() == [0] * 5 + [1] * 10
    for share in (0, 1, -1):
        with pytest.raises(InputError, match="val_share must lie between 0 and 1"):
            open_data(tmp_path, val_share=share)


def test_many_classes_are_held_out_quickly():
    """Not every class against every image: 100,000 of them would take minutes."""
    labels = np.arange(300_000) % 100_000
    data = Dataset("many", list(map(str, range(100_000))), Split(labels, range(300_000), labels))
    start = time.perf_counter()
    val = hold_out(data, 0.2, 0).val
    assert time.perf_counter() - start < 5
    assert (np.bincount(val.labels) == 1).all()


# ---- arrays ------------------------------------------------------------------------------------


def levels(*shape, dtype=np.uint8):
    return CHANCE.integers(0, 255, shape).astype(dtype)


def test_an_npz_spelled_either_way(tmp_path):
    x, y = levels(10, 6, 5), np.arange(10) % 2
    np.savez(tmp_path / "keras.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    np.savez_compressed(
        tmp_path / "medmnist.npz",
        train_images=x, train_labels=y[:, None], val_images=x[:2], val_labels=y[:2, None],
        test_images=x[:3], test_labels=y[:3, None],
    )  # fmt: skip
    np.savez(tmp_path / "plain.npz", images=x, labels=y)
    keras, med, plain = (open_data(tmp_path / f"{name}.npz") for name in ("keras", "medmnist", "plain"))
    assert (len(keras.train), keras.val, len(keras.test)) == (10, None, 3)
    assert (len(med.train), len(med.val), len(med.test)) == (10, 2, 3)
    assert (len(plain.train), len(plain.val)) == (8, 2)
    for data in (keras, med):
        assert (data.classes, data.channels) == (["0", "1"], 1)
        assert (data.train.images[..., 0] == x).all()
        assert (data.train.labels == y).all()
        assert data.train.names[3] == "train 3"


def test_arrays_of_every_shape_and_depth(tmp_path):
    y = np.arange(6) % 3
    last, first = levels(6, 8, 7, 3), levels(6, 3, 8, 7)
    deep = CHANCE.integers(0, 65536, (6, 8, 7)).astype(np.uint16)
    deep[0, 0, :3] = 0, 257, 65535
    for name, x in (("last", last), ("first", first), ("deep", deep)):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    data = {name: open_data(tmp_path / f"{name}.npz").train.images for name in ("last", "first", "deep")}
    assert (data["last"] == last).all()
    assert (data["first"] == first.transpose(0, 2, 3, 1)).all()
    assert data["deep"].dtype == np.uint8
    assert data["deep"][0, 0, :3, 0].tolist() == [0, 1, 255]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (dict(a=levels(4, 8, 8)), r"must hold x_train and y_train, .* but holds: a\."),
        (dict(x=np.zeros((4, 8, 8)), y=np.arange(4)), r"must be uint8 or uint16, and .*, x is float64"),
        (dict(x=levels(4, 8), y=np.arange(4)), r"an array \(N, H, W\) or \(N, H, W, C\), .* the shape \(4, 8\)"),
        (dict(x=levels(4, 0, 8), y=np.arange(4)), r"the shape \(4, 0, 8, 1\)"),
        (dict(x=levels(4, 8, 8), y=np.arange(3)), r"t.npz, x has 4 images and 3 labels"),
        (dict(x=levels(4, 8, 8), y=np.arange(4.0)), r"must be whole numbers.* float64"),
        (dict(x=levels(4, 8, 8), y=np.array(3)), r"must be whole numbers, one for each"),
        (dict(x=levels(4, 8, 8), y=np.arange(4) - 1), r"must count from 0; .* from -1 to 2"),
        (dict(x=levels(4, 8, 8), y=np.full((4, 3), 2)), r"must be 0 or 1; .* from 2 to 2"),
        (dict(x=levels(4, 8, 8), y=np.array([0, 1, 2, 2**40])), r"highest label of .* is 1,099,511,627,776, and at most 100,000 classes"),
        (dict(x=levels(4, 8, 8), y=np.zeros(4, int)), r"at least two classes"),
        (
            dict(x=levels(4, 8, 8), y=np.eye(4, dtype=int), x_val=levels(4, 8, 8), y_val=np.eye(4, 3, dtype=int)),
            r"labels alike.* \(4, 4\), \(4, 3\)",
        ),
        (
            dict(x=levels(4, 8, 8), y=np.arange(4), x_val=levels(4, 8, 8), y_val=np.eye(4, dtype=int)),
            r"labels alike",
        ),
    ],
)  # fmt: skip
def test_what_is_said_of_arrays_that_will_not_do(arrays, words, tmp_path):
    np.savez(tmp_path / "t.npz", **arrays)
    start = time.perf_counter()
    with pytest.raises(InputError, match=words):
        open_data(tmp_path / "t.npz")
    assert time.perf_counter() - start < 1


def test_an_npz_that_is_none(tmp_path):
    from vitrail.errors import VitrailError

    whole = tmp_path / "whole.npz"
    np.savez_compressed(whole, x=levels(40, 8, 8), y=np.arange(40) % 2)
    data = bytearray(whole.read_bytes())
    data[200] ^= 255
    for text in (b"", b"hello", whole.read_bytes()[:300], bytes(data)):
        (tmp_path / "t.npz").write_bytes(text)
        with pytest.raises(VitrailError, match=r"t\.npz"):
            open_data(tmp_path / "t.npz")
    np.savez(tmp_path / "object.npz", x=np.array([{"a": 1}], dtype=object), y=np.arange(1))
    with pytest.raises(VitrailError):
        open_data(tmp_path / "object.npz")


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
    x, y = levels(12, 7, 9), (np.arange(12) % 3).astype(np.uint8)
    data = open_data(mnist(tmp_path / "fashion", zipped, train=(x, y), t10k=(x[:4], y[:4])))
    assert (data.name, data.classes) == ("fashion", ["0", "1", "2"])
    assert (len(data.train), data.val, len(data.test)) == (12, None, 4)
    assert (data.train.images[..., 0] == x).all()
    assert (data.train.labels == y).all()


def test_idx_without_train(tmp_path):
    x, y = levels(4, 7, 9), np.zeros(4, np.uint8)
    with pytest.raises(InputError, match="must include train-images and train-labels"):
        open_data(mnist(tmp_path, False, t10k=(x, y)))


Y = idx((np.arange(4) % 2).astype(np.uint8))
LIES = {
    "huge": (struct.pack(">HBBIII", 0, 8, 3, 60_000, 1000, 1000) + b"x" * 100, r"it holds 100 bytes where it says 60,000,000,000"),
    "vast": (struct.pack(">HBBIIII", 0, 8, 4, *[2**32 - 1] * 4), r"more than fits in memory"),
    "short": (idx(levels(4, 8, 8))[:-1], r"it holds 255 bytes where it says 256"),
    "long": (idx(levels(4, 8, 8)) + b"!", r"it holds 257 bytes where it says 256"),
    "none": (b"", r"train-images-idx3-ubyte"),
    "head": (b"\0\0\x08\x03\0\0", r"train-images-idx3-ubyte"),
    "float": (b"\0\0\x0d\x03" + idx(levels(4, 8, 8))[4:], r"not those of an IDX file of bytes"),
    "axes": (b"\0\0\x08\xff" + b"\0" * 2000, r"not those of an IDX file of bytes"),
    "zeros": (struct.pack(">HBBIII", 0, 8, 3, 4, 0, 8), r"the shape \(4, 0, 8, 1\)"),
    "text": (b"<html>404</html>", r"not those of an IDX file of bytes"),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_lying_idx_files(lie, zipped, tmp_path):
    text, words = LIES[lie]
    end = ".gz" if zipped else ""
    (tmp_path / f"train-images-idx3-ubyte{end}").write_bytes(gzip.compress(text) if zipped else text)
    (tmp_path / f"train-labels-idx1-ubyte{end}").write_bytes(gzip.compress(Y) if zipped else Y)
    start = time.perf_counter()
    with pytest.raises(InputError, match=words):
        open_data(tmp_path)
    assert time.perf_counter() - start < 1


def test_broken_gzip_and_pipes(tmp_path):
    x, y = levels(40, 8, 8), (np.arange(40) % 2).astype(np.uint8)
    mnist(tmp_path, True, train=(x, y))
    file = tmp_path / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    broken = bytearray(whole)
    broken[40] ^= 255
    for text in (bytes(broken), whole[:200], b"\x1f\x8b\x08\0" + b"\xff" * 50, whole[:-8] + b"\0" * 8):
        file.write_bytes(text)
        with pytest.raises(InputError, match=r"train-images-idx3-ubyte\.gz is not a whole IDX file"):
            open_data(tmp_path)
    file.unlink()
    os.mkfifo(file)
    start = time.perf_counter()
    with pytest.raises(InputError, match="a pipe or a device"):
        open_data(tmp_path)
    assert time.perf_counter() - start < 1


def test_lies_take_little_memory(tmp_path):
    """All of them in a child that may grow by 50 MB from where it has imported everything; the longest
    is a gzip file that would unfold to 400 MB and says it holds 1,000 bytes."""
    for lie, (text, _) in LIES.items():
        (tmp_path / lie).mkdir()
        (tmp_path / lie / "train-images-idx3-ubyte").write_bytes(text)
        (tmp_path / lie / "train-labels-idx1-ubyte").write_bytes(Y)
    (tmp_path / "bomb").mkdir()
    with gzip.open(tmp_path / "bomb" / "train-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(struct.pack(">HBBIII", 0, 8, 3, 10, 10, 10))
        for _ in range(400):
            file.write(bytes(1 << 20))
    (tmp_path / "bomb" / "train-labels-idx1-ubyte").write_bytes(Y)
    program = """
import resource, sys
from pathlib import Path
from vitrail.data.sources import open_data
from vitrail.data import arrays, decode
from vitrail.errors import InputError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20),) * 2)
for place in sorted(Path(sys.argv[1]).iterdir()):
    try:
        open_data(place)
    except InputError as error:
        print(place.name, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == sorted([*LIES, "bomb"])
    assert "it holds 1,001 bytes where it says 1,000" in done.stdout


# ---- digits ------------------------------------------------------------------------------------


def test_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, again = open_data("digits"), open_data("digits", seed=5)
    assert isinstance(data, Dataset)
    assert (len(data.train), len(data.val), data.train.images.shape[1:]) == (1437, 360, (8, 8, 1))
    assert data.classes == list("0123456789")
    assert names(data.val) == names(again.val)
    assert np.bincount(data.val.labels).min() >= 33
    photos(tmp_path / "digits", one=5, two=5)  # a folder of that name is meant
    assert open_data("digits").classes == ["one", "two"]
