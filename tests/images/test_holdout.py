"""The validation set of data that has none: chosen by content, whatever the seed, the names and the others."""

import hashlib
import os
import shutil
import time

import numpy as np
import pytest

from tests.support.shared_data import shared
from tests.support.tiny_runs import RecordingCallback, rows, train, write_arrays, write_folder
from vitrail.base.errors import ConfigError, InputError
from vitrail.images import content
from vitrail.images.content import content_keys
from vitrail.images.formats.sources import Split, open_dataset
from vitrail.images.holdout import choose_held_out

SMALL = dict(epochs=1, batch=16, model=dict(width=16, depth=1, heads=2, patch=4, size=8))
FIFTH = 0.2 * 2**64


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def photos(folder, **counts):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (folder / name / f"{i}.jpg").write_text(f"{name} {i}")
    return folder


def held_out(folder, **options):
    return set(open_dataset(folder, **options).val.names)


def key(data):
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


# ---- keys ---------------------------------------------------------------------------------------


def test_the_key_is_the_first_64_bits_of_sha256(tmp_path):
    photos(tmp_path, a=3, b=3)
    data = open_dataset(tmp_path)
    for split in (data.train, data.val):
        expected = [key(path.read_bytes()) for path in split.paths]
        assert split.keys.tolist() == content_keys(split).tolist() == expected
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    keys = content_keys(Split(np.zeros(2, np.int64), ["a", "b"], images=images))
    assert keys.tolist() == [key(b"(4, 5, 3)" + image.tobytes()) for image in images]


def test_files_without_content_are_told_apart_by_name(tmp_path):
    """They are reported when the images are read; here they only must not stop anything."""
    folder = photos(tmp_path / "set", a=6, b=6)
    for name in ("a/0.jpg", "a/1.jpg", "b/2.jpg"):
        (folder / name).write_bytes(b"")
    table = [f"set/{c}/{i}.jpg,{c}" for c in "ab" for i in range(7)]  # number 6 does not exist
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *table]))
    data = open_dataset(tmp_path / "t.csv")
    keys = [*data.train.keys.tolist(), *data.val.keys.tolist()]
    assert len(set(keys)) == 14
    assert key(b"set/a/6.jpg") in keys
    odd = Split(np.zeros(2, np.int64), ["a\0b", "\ud800"], [tmp_path / "a\0b", tmp_path / "\ud800"])
    assert len(set(content_keys(odd).tolist())) == 2


def test_keys_are_cached(tmp_path, monkeypatch):
    folder, cache = photos(tmp_path / "set", a=100, b=100), tmp_path / "cache"
    monkeypatch.setenv("VITRAIL_CACHE", str(cache))
    monkeypatch.setattr(content, "_SLOW", -1.0)
    monkeypatch.setattr(content, "_FRESH", -1.0)
    read = []
    original = content.file_key
    monkeypatch.setattr(content, "file_key", lambda path: (read.append(path.name), original(path))[1])
    first = held_out(folder)
    assert len(read) == 200
    assert held_out(folder) == first
    assert len(read) == 200
    (folder / "a" / "7.jpg").write_text("b 7")  # the same size
    (folder / "b" / "new.jpg").write_text("more")
    held_out(folder)
    assert sorted(read[200:]) == ["7.jpg", "new.jpg"]
    [file] = (cache / "keys").iterdir()
    assert file.stat().st_size < 201 * 16 + 200
    for damaged in (b"", b"\x93NUMPY\1\0v\0{'descr'", np.zeros(9).tobytes()):
        file.write_bytes(damaged)
        held_out(folder)
    assert len(read) == 202 + 3 * 201
    shutil.rmtree(cache)
    cache.write_text("not a folder")
    assert held_out(folder) == held_out(folder)


def test_a_file_that_has_just_been_written_is_not_cached(tmp_path, monkeypatch):
    """It could be written again within one tick of the clock."""
    monkeypatch.setattr(content, "_SLOW", -1.0)
    folder = photos(tmp_path, a=5, b=5)
    before = held_out(folder)
    times = os.stat(folder / "a" / "0.jpg")
    (folder / "a" / "0.jpg").write_text("A 0")
    os.utime(folder / "a" / "0.jpg", ns=(times.st_atime_ns, times.st_mtime_ns))
    data = open_dataset(folder)
    assert key(b"A 0") in [*data.train.keys.tolist(), *data.val.keys.tolist()]
    assert before


# ---- the choice ---------------------------------------------------------------------------------


def test_an_image_is_held_out_by_its_key_alone(tmp_path):
    photos(tmp_path, a=200, b=100)
    data = open_dataset(tmp_path)
    assert all(k < FIFTH for k in data.val.keys.tolist())
    assert all(k >= FIFTH for k in data.train.keys.tolist())
    assert 40 < len(data.val) < 80
    assert data.notes == [
        f"{len(data.val)} of 300 images are held out for validation, chosen by their content (val_fraction 0.2)."
    ]
    half = held_out(tmp_path, val_fraction=0.5)
    assert set(data.val.names) < half
    assert 120 < len(half) < 180
    other = held_out(tmp_path, split_seed=1)
    assert 40 < len(other) < 80
    assert len(other & set(data.val.names)) < 30
    assert other == held_out(tmp_path, split_seed=1)


def test_adding_removing_and_renaming_photos_moves_no_other(tmp_path):
    """The issue: one added photo moved 32 of 80 images between the sets."""
    photos(tmp_path, ant=200, bee=200)
    before = held_out(tmp_path)
    (tmp_path / "ant" / "new.jpg").write_text("new")
    assert held_out(tmp_path) - {"ant/new.jpg"} == before
    (tmp_path / "ant" / "3.jpg").unlink()
    assert held_out(tmp_path) - {"ant/new.jpg"} == before - {"ant/3.jpg"}
    (tmp_path / "bee").rename(tmp_path / "wasp")
    renamed = {name.replace("bee", "wasp") for name in before}
    assert held_out(tmp_path) - {"ant/new.jpg"} == renamed - {"ant/3.jpg"}


def test_equal_content_lands_in_one_set(tmp_path):
    photos(tmp_path, a=60, b=60)
    before = held_out(tmp_path)
    for i in range(60):
        shutil.copy(tmp_path / "a" / f"{i}.jpg", tmp_path / "a" / f"copy-{i}.jpg")
        shutil.copy(tmp_path / "a" / f"{i}.jpg", tmp_path / "b" / f"wrong-{i}.jpg")
    data = open_dataset(tmp_path)
    assert not set(data.train.keys.tolist()) & set(data.val.keys.tolist())
    assert len(data.train) + len(data.val) == 240
    assert before <= set(data.val.names)


def choose(numbers, labels, fraction=0.2):
    numbers = (np.array(numbers) * 2.0**64).astype(np.uint64)
    return choose_held_out(numbers, np.array(labels), fraction).tolist()


def test_small_classes():
    # a single image trains; of two or more without validation the lowest is held out
    assert choose([0.1, 0.3, 0.9, 0.5], [0, 1, 1, 2]) == [False, True, False, False]
    # of two or more without training the highest trains
    assert choose([0.1, 0.05, 0.15, 0.7, 0.1], [0, 0, 0, 1, 1]) == [True, True, False, False, True]
    # two equal images are one image, which trains, under both of its labels
    assert choose([0.1, 0.1, 0.1, 0.8, 0.9], [0, 0, 1, 1, 1]) == [False, False, False, True, False]
    assert choose([0.1, 0.1, 0.4, 0.8, 0.9], [0, 0, 1, 1, 1]) == [False, False, True, False, False]


def test_multi_label_classes_each_have_validation_images():
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert choose([0.5, 0.6, 0.7, 0.1, 0.05], labels) == [True, True, False, False, True]  # 3: the only one


def test_many_classes_are_fast():
    """Comparing each of 100,000 classes with each image would take minutes."""
    labels = np.arange(300_000) % 100_000
    numbers = np.random.default_rng(0).integers(0, 2**64, 300_000, dtype=np.uint64)
    start = time.perf_counter()
    out = choose_held_out(numbers, labels, 0.2)
    assert time.perf_counter() - start < 5
    counts = np.bincount(labels[out], minlength=100_000)
    assert (counts.min(), counts.max()) == (1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(val_fraction=0), "val_fraction must be between 0 and 1, such as 0.2, not 0"),
        (dict(val_fraction=1), "val_fraction must be between 0 and 1"),
        (dict(val_fraction="a"), "val_fraction must be between 0 and 1"),
        (dict(split_seed=-1), "split_seed must be an integer from 0"),
    ],
)
def test_invalid_options(options, message, tmp_path):
    with pytest.raises((InputError, ConfigError), match=message):
        open_dataset(photos(tmp_path, a=4, b=4), **options)


def test_equal_images_are_too_few(tmp_path):
    for i in range(4):
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{i}.jpg").write_text(name)
    with pytest.raises(
        InputError, match=r"too few images .*: 8 \(2 different\) in 2 classes. Some class must"
    ):
        open_dataset(tmp_path)


# ---- training -----------------------------------------------------------------------------------


def test_the_seed_of_a_run_does_not_change_the_split(tmp_path):
    folder, notes = write_folder(tmp_path / "images"), {}
    for name, settings in {
        "0": {},
        "1": {"seed": 1},
        "2": {"split_seed": 1},
        "3": {"val_fraction": 0.5},
    }.items():
        notes[name] = RecordingCallback()
        train(folder, out=tmp_path / name, callback=notes[name], **SMALL, **settings)
    counts = {name: rows(tmp_path / name)[-1]["val_images"] for name in notes}
    assert counts["0"] == counts["1"] < counts["3"]
    said = {name: next(note for note in one.notes if "held out" in note) for name, one in notes.items()}
    assert said["0"] == said["1"]
    assert said["2"].endswith("(val_fraction 0.2, split_seed 1).")
    train(folder, out=tmp_path / "1", resume=True, **SMALL, seed=1)
    with pytest.raises(ConfigError, match=r"train.split_seed is 1, but 0 in the run"):
        train(folder, out=tmp_path / "1", resume=True, **SMALL, seed=1, split_seed=1)


def test_options_without_effect_are_noted(tmp_path):
    notes = RecordingCallback()
    train(write_arrays(tmp_path / "a.npz"), out=tmp_path / "run", callback=notes, **SMALL, val_fraction=0.5)
    assert "Not used, since the data has its own validation or test set: val_fraction." in notes.notes


def test_long_reading_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.training.open_data._REPORT_SECONDS", -1.0)
    notes = RecordingCallback()
    train(write_folder(tmp_path / "images"), out=tmp_path / "run", callback=notes, **SMALL)
    assert "Read 66 of 66 files to choose the validation set." in notes.notes


def test_the_flowers_have_the_same_split_on_every_machine(tmp_path):
    """6,552 real photographs: which are held out is a property of the files."""
    archive = shared("data/flowers102_64.zip")
    shutil.unpack_archive(archive, tmp_path)
    [folder] = tmp_path.rglob("train")
    data = open_dataset(folder)
    assert len(data.train) + len(data.val) == 6552
    assert set(data.val.labels.tolist()) == set(range(102))
    assert len(data.val) == 1307
