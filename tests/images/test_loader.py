"""Batches: the same images for any number of workers, and files that cannot be read."""

import hashlib
import json
import time
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    file_hashes,
    fingerprints,
    one_thread,
    rows,
    train,
    write_arrays,
    write_folder,
)
from vitrail.base.errors import InputError
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import Split, open_dataset
from vitrail.images.loader import CorruptFiles, Reader, batch_indices, epoch_order, steps_in_epoch
from vitrail.images.preprocess import Preprocess

__all__ = ["one_thread"]

SPEC = Preprocess(size=8, mean=(0.5,) * 3, std=(0.5,) * 3, resize="shortest", resize_to=10)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images")


def all_of(reader, batches, epoch=0):
    try:
        return list(reader.batches((epoch, indices) for indices in batches))
    finally:
        reader.close()


# ---- order -------------------------------------------------------------------------------------


def test_an_epoch_has_every_image_once_in_its_own_order(tmp_path):
    split = open_dataset(write_arrays(tmp_path / "a.npz")).train
    first, again, next_one, other = (
        epoch_order(split, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first.sort().values.tolist() == list(range(80))
    assert torch.equal(first, again)
    assert not torch.equal(first, next_one)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("count", "batch", "steps"), [(80, 16, 5), (81, 16, 5), (15, 16, 1), (16, 16, 1), (1, 1, 1)]
)
def test_the_batches_of_an_epoch(count, batch, steps):
    assert steps_in_epoch(count, batch) == steps
    order = torch.randperm(count)
    seen = torch.cat([batch_indices(order, step, batch) for step in range(steps)])
    assert len(seen) == steps * batch
    assert torch.equal(seen[:count], order[: len(seen)])
    if count < batch:
        assert torch.equal(seen[count:], order[: batch - count])  # it is repeated


# ---- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [None, Augment(), Augment(crop=0.3)])
def test_workers_do_not_change_the_batches(folder, augment):
    split = open_dataset(folder).train
    batches = torch.randperm(len(split)).split(7)
    found = [all_of(Reader(split, SPEC, augment=augment, workers=n), batches, epoch=3) for n in (0, 1, 4)]
    for one, two, four in zip(*found, strict=True):
        assert torch.equal(one.images, two.images)
        assert torch.equal(one.images, four.images)
        assert torch.equal(one.indices, four.indices)
    assert [len(batch.indices) for batch in found[0]] == [len(b) for b in batches]
    if augment is None:
        first = found[0][0]
        for image, index in zip(first.images, first.indices, strict=True):
            opened = Image.open(split.paths[index])
            assert (image.permute(1, 2, 0).numpy() == SPEC.pixels(opened)).all()


def test_crops_depend_on_seed_and_epoch(folder):
    split, batch = open_dataset(folder).train, [torch.arange(6)]
    read = {
        (seed, epoch): all_of(Reader(split, SPEC, augment=Augment(crop=0.3), seed=seed), batch, epoch)[
            0
        ].images
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    }
    again = all_of(Reader(split, SPEC, augment=Augment(crop=0.3)), batch, 0)[0].images
    assert torch.equal(read[0, 0], again)
    assert not torch.equal(read[0, 0], read[0, 1])
    assert not torch.equal(read[0, 0], read[1, 0])


def test_crops_of_files_have_the_configured_areas_and_ratios(tmp_path):
    """In an image whose pixel values are the coordinates, the range of a crop is its size."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            down, across = np.mgrid[:200, :200]
            third = 0 * down + 3 * i + (name == "b")  # equal images would all be in one set
            Image.fromarray(np.stack([down, across, third], -1).astype(np.uint8)).save(
                tmp_path / name / f"{i}.png"
            )
    split = open_dataset(tmp_path).train
    for least in (0.3, 1.0):
        reader = Reader(split, SPEC, augment=Augment(crop=least, crop_ratio=1.5))
        images = torch.cat(
            [all_of(reader, [torch.arange(len(split))], epoch)[0].images for epoch in range(60)]
        ).float()
        spread = (images.amax((2, 3)) - images.amin((2, 3)))[:, :2] * 8 / 7 / 200  # of 8 samples, 7 steps
        area = spread.prod(1)
        assert area.min() > 0.9 * least * (0.8 if least == 1.0 else 1)
        if least < 1:
            assert area.min() < 0.4 < 0.85 < area.max()
            ratio = spread[:, 0] / spread[:, 1]
            assert 0.6 < ratio.min() < 0.75
            assert 1.35 < ratio.max() < 1.65


def test_arrays_are_returned_unchanged(tmp_path):
    split = open_dataset(write_arrays(tmp_path / "a.npz")).train
    batch = all_of(Reader(split, SPEC, workers=2), [torch.tensor([5, 3, 5])])[0]
    assert (batch.images[1, 0].numpy() == split.images[3, ..., 0]).all()
    assert torch.equal(batch.images[0], batch.images[2])
    assert batch.valid.tolist() == [1, 1, 1]


# ---- files that cannot be read -----------------------------------------------------------------


def break_some(folder):
    """Five kinds of broken files among the good ones."""
    complete = (folder / "ant" / "00.jpg").read_bytes()
    (folder / "ant" / "02.jpg").write_bytes(complete[: len(complete) // 2])
    (folder / "bee" / "03.png").write_text("no image")
    (folder / "bee" / "04.jpg").write_bytes(b"")
    (folder / "cat" / "05.png").unlink()
    (folder / "cat" / "05.png").symlink_to(folder / "cat" / "07.png")
    Image.fromarray(np.full((9, 9), 7.5, np.float32)).save(folder / "cat" / "08.tif")  # pixel values above 1
    return ["ant/02.jpg", "bee/03.png", "bee/04.jpg", "cat/08.tif"]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_file(folder, workers):
    for name in break_some(folder):
        split = open_dataset(folder).train
        if name not in split.names:
            continue
        reader = Reader(split, SPEC, workers=workers, corrupt=CorruptFiles("error"))
        with pytest.raises(InputError, match=rf"{name} .* corrupt='skip'"):
            all_of(reader, [torch.tensor([split.names.index(name)])])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_unreadable_files_do_not_change_the_others(folder, workers, policy):
    split = open_dataset(folder, val_fraction=0.05).train
    order = list(torch.randperm(len(split)).split(9))
    before = all_of(Reader(split, SPEC, workers=workers), order * 2)
    broken = [name for name in break_some(folder) if name in split.names]
    assert len(broken) >= 2
    files = file_hashes(folder)
    corrupt = CorruptFiles(policy)
    after = all_of(Reader(split, SPEC, workers=workers, corrupt=corrupt), order * 2)
    assert set(corrupt.reasons) == set(broken)
    where = {name: torch.cat(order).tolist().index(split.names.index(name)) for name in broken}
    assert list(corrupt.reasons) == sorted(
        broken, key=where.get
    )  # in the order of the run, not of the threads
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one.indices, two.indices)
        for i, index in enumerate(one.indices.tolist()):
            if split.names[index] in broken:
                assert two.valid[i] == 0
                assert (two.images[i] == 128).all()
            elif split.names[index] != "cat/05.png":
                assert two.valid[i] == 1
                assert torch.equal(one.images[i], two.images[i])
    assert file_hashes(folder) == files


def test_training_with_broken_files(folder, tmp_path):
    """Reported once, counted, the same for any number of workers and across an interruption; no file changes."""
    from tests.support.tiny_runs import stopped_and_resumed

    broken = break_some(folder)
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.*")}
    settings = {**SETTINGS, "corrupt": "warn", "epochs": 6}
    with pytest.raises(InputError, match="To skip unreadable files"):
        train(folder, out=tmp_path / "stops", **{**settings, "corrupt": "error"})
    listener = RecordingCallback()
    train(folder, out=tmp_path / "run", workers=2, callback=listener, **settings)
    named = [note.split(" could not be read: ")[0] for note in listener.notes if "could not be read" in note]
    assert sorted(named) == sorted(broken)
    data = open_dataset(folder)
    train_broken = sum(name in data.train.names for name in broken)
    found = rows(tmp_path / "run")
    assert found[-1]["corrupt_files"] == train_broken
    assert {row["val_images"] for row in found} == {len(data.val) - (len(broken) - train_broken)}
    assert all(np.isfinite(row["loss"]) for row in found)
    stopped_and_resumed(folder, tmp_path / "other", 7, workers=0, **settings)
    assert fingerprints(tmp_path / "other") == fingerprints(tmp_path / "run")
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.*")} == files


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_in_the_incomplete_last_batch_is_found(folder, tmp_path, workers):
    """No step uses it: it is reported once all the same, and ends a run that has no use for broken files."""
    data = open_dataset(folder)
    batch = len(data.train) // 2 + 1  # one step; the others are the incomplete batch
    settings = {**SETTINGS, "batch": batch - batch % 2, "accumulate": 1, "epochs": 1, "workers": workers}
    rest = epoch_order(data.train, seed=0, epoch=0)[settings["batch"] :].tolist()
    victims = [data.train.paths[index] for index in (rest[0], rest[-1])]
    for victim in victims:
        victim.write_bytes(b"")
    listener = RecordingCallback()
    train(data, out=tmp_path / "warn", corrupt="warn", callback=listener, **settings)
    notes = [note for note in listener.notes if "could not be read" in note]
    assert len(notes) == 2
    assert all(any(victim.name in note for note in notes) for victim in victims)
    assert [row["corrupt_files"] for row in rows(tmp_path / "warn")] == [2]
    with pytest.raises(InputError, match="To skip unreadable files, use corrupt='skip'"):
        train(data, out=tmp_path / "error", **settings)


def test_a_broken_image_does_not_count(folder, tmp_path):
    """The loss of the epoch is the mean over the others: no mixing, and a learning rate near 0."""
    settings = dict(
        batch=2, epochs=1, lr=1e-12, ema=None, model={**SETTINGS["model"], "dropout": 0.0, "drop_path": 0.0}
    )
    settings |= dict(mixing=dict(mixup=0.0), corrupt="skip", smoothing=0.0, seed=0)
    data = open_dataset(folder)
    train(data, out=tmp_path / "complete", **settings)
    victim = data.train.paths[0]
    victim.write_bytes(b"")
    train(data, out=tmp_path / "less", **settings)
    (complete,), (less,) = rows(tmp_path / "complete"), rows(tmp_path / "less")
    assert (complete["corrupt_files"], less["corrupt_files"]) == (0, 1)
    # A fresh head is all zero: every image has the loss log 3, and so has the mean over fewer.
    assert complete["loss"] == pytest.approx(np.log(3), rel=1e-5)
    assert less["loss"] == pytest.approx(np.log(3), rel=1e-5)


def test_a_run_without_readable_images_is_an_error(folder, tmp_path):
    for path in folder.rglob("*.*"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"none of the training images could be read; [abc]\w+/\d+"):
        train(folder, out=tmp_path / "run", **SETTINGS, corrupt="skip")


def test_names_that_no_file_can_have(folder, tmp_path):
    lines = [dict(path=f"images/ant/{i:02d}.jpg", label=i % 3) for i in range(0, 22, 2)]
    lines += [dict(path=name, label=0) for name in ("x" * 5000 + ".png", "y" * 300 + ".png")]
    (folder.parent / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = open_dataset(folder.parent / "t.jsonl", val_fraction=0.1)
    odd = ["a\0b.png", "\ud800.png"]  # refused in a table, but possible in a Split made in Python
    split = Split(
        np.append(data.train.labels, [0, 0]),
        [*data.train.names, *odd],
        [*data.train.paths, *(folder / name for name in odd)],
    )
    corrupt = CorruptFiles("skip")
    (batch,) = all_of(Reader(split, SPEC, corrupt=corrupt), [torch.arange(len(split))])
    assert batch.valid.sum() == sum(name.startswith("images") for name in split.names)
    assert len(corrupt.reasons) == len(split) - batch.valid.sum() >= 3
    train(folder.parent / "t.jsonl", out=tmp_path / "run", **{**SETTINGS, "batch": 4, "corrupt": "skip"})


def test_pillows_warnings_are_not_errors(tmp_path):
    """Odd metadata, which Pillow reads when it applies the orientation."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(4):
            exif = b"Exif\0\0II*\0\x08\0\0\0\x09\0\x12\1\3\0"
            Image.new("RGB", (9, 9), (50 * i, 0, 0)).save(tmp_path / name / f"{i}.jpg", exif=exif)
    split = open_dataset(tmp_path).train
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            SPEC.pixels(Image.open(split.paths[0]))
        (batch,) = all_of(Reader(split, SPEC, workers=2), [torch.arange(len(split))])
    assert batch.valid.all()


def test_closing_a_reader_does_not_wait(folder):
    """Images that are no longer needed are not decoded."""
    split = open_dataset(folder).train
    reader = Reader(split, SPEC, workers=2)
    many = reader.batches((0, torch.arange(len(split))) for _ in range(1000))
    next(many)
    start = time.perf_counter()
    reader.close()
    assert time.perf_counter() - start < 0.5
