"""Tar shards: the same data set as the folder, indexed once, and everything odd in a tar refused by its name."""

import json
import os
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.shard_files import shard_folder, write_tar
from tests.support.tiny_runs import SETTINGS, fingerprints, one_thread, train, write_folder
from vitrail.base.errors import FileError, InputError
from vitrail.images.augment.pipeline import Augment
from vitrail.images.content import content_keys
from vitrail.images.decode import open_image, read_size
from vitrail.images.formats import shards
from vitrail.images.formats.lazy import Selection
from vitrail.images.formats.shard_images import HEADER
from vitrail.images.formats.shard_index import build_index, index_paths, open_index
from vitrail.images.formats.sources import open_dataset, open_labeled, read_data
from vitrail.images.limits import BrokenImage
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess

__all__ = ["one_thread"]

SPEC = Preprocess(size=8, resize="shortest", resize_to=10)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images", each=9)


@pytest.fixture
def tars(folder, tmp_path):
    return shard_folder(folder, tmp_path / "tars" / "images")  # the name is in the card of a model


def pixels_of(split, augment=None):
    reader = Reader(split, SPEC, augment=augment, seed=3)
    return torch.cat([batch.images for batch in reader.batches([(2, torch.arange(len(split)))])])


# ---- the same data ----------------------------------------------------------------------------


def test_shards_are_the_same_data_set_as_the_folder(folder, tars):
    source, found = open_dataset(folder), open_dataset(tars)
    assert found.classes == source.classes
    for name in ("train", "val"):
        one, other = getattr(source, name), getattr(found, name)
        assert list(other.names) == list(one.names)  # the same images are held out
        assert (other.labels == one.labels).all()
        assert (content_keys(other) == content_keys(one)).all()
        for augment in (None, Augment(crop=0.3)):
            assert torch.equal(pixels_of(one, augment), pixels_of(other, augment))
    assert [read_size(path) for path in found.train.paths] == [read_size(path) for path in source.train.paths]


def test_a_run_on_shards_is_bit_equal_to_one_on_the_folder(folder, tars, tmp_path):
    for name, data in (("folder", folder), ("tars", tars)):
        train(data, recipe="small", out=tmp_path / f"run-{name}", workers=0, **{**SETTINGS, "epochs": 1})
    assert fingerprints(tmp_path / "run-tars") == fingerprints(tmp_path / "run-folder")


def test_lists_of_labels_in_json_are_multi_label(folder, tmp_path, monkeypatch):
    """Some images have one label, some several, one none; a second shard has one label of each."""
    image = (folder / "ant" / "00.jpg").read_bytes()
    labels = [["x", 2], "x", [], [2, 2, 10]]
    pairs = [(f"{i}.json", json.dumps({"label": one}).encode()) for i, one in enumerate(labels)]
    tars = tmp_path / "both"
    tars.mkdir()
    write_tar(tars / "a.tar", [*pairs, *((f"{i}.jpg", image) for i in range(4))])
    write_tar(tars / "b.tar", [("5.jpg", image), ("5.cls", b"10"), ("6.jpg", image), ("6.cls", b"x")])
    found = read_data(tars)
    assert found.multilabel
    assert found.classes == ["2", "10", "x"]
    expected = [[1, 0, 1], [0, 0, 1], [0, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert found.train.labels.tolist() == expected
    monkeypatch.setattr(shards, "LARGE", 6)
    with pytest.raises(InputError, match="multi-label shards may hold up to 5 images, not 6"):
        read_data(tars)


def test_labels_are_numbers_with_names_beside_them_or_in_json(folder, tmp_path):
    numbered = shard_folder(folder, tmp_path / "numbered", label=int)
    assert read_data(numbered).classes == ["0", "1", "2"]
    (numbered / "classes.txt").write_text("ant\nbee\ncat\n")
    assert read_data(numbered).classes == ["ant", "bee", "cat"]
    assert read_data(f"{numbered}/pets-{{000..002}}.tar").classes == ["ant", "bee", "cat"]
    image = (folder / "ant" / "00.jpg").read_bytes()
    labels = [{"label": "x"}, {"cls": 3}, {"caption": "no label", "class": "12"}]
    pairs = [(f"{i}.json", json.dumps(one).encode()) for i, one in enumerate(labels)]
    write_tar(tmp_path / "a.tar", [*pairs, *((f"{i}.jpg", image) for i in range(3))])
    found = read_data(tmp_path / "a.tar")
    assert found.classes == ["3", "12", "x"]
    assert found.train.labels.tolist() == [2, 0, 1]


def test_shards_named_by_their_split_or_in_folders(folder, tmp_path):
    first = shard_folder(folder, tmp_path / "a")
    for number, name in enumerate(("imagenet-train-0", "imagenet-val-0", "test")):
        os.rename(first / f"pets-{number:03}.tar", first / f"{name}.tar")
    assert {name: len(split) for name, split in read_data(first).splits.items()} == dict(
        train=9, val=9, test=9
    )
    second = shard_folder(folder, tmp_path / "b")
    for number, name in enumerate(("train", "validation")):
        (second / name).mkdir()
        os.rename(second / f"pets-{number:03}.tar", second / name / "0.tar")
    os.unlink(second / "pets-002.tar")
    assert set(read_data(second).splits) == {"train", "val"}
    with pytest.raises(InputError, match="images of val but none of train"):
        open_dataset(f"{first}/imagenet-val-{{0..0}}.tar")
    assert len(open_labeled(first / "test.tar").train) == 9


def test_a_folder_of_classes_with_a_tar_in_it_stays_one(folder):
    write_tar(folder / "backup.tar", [])
    assert read_data(folder).classes == ["ant", "bee", "cat"]


# ---- the index --------------------------------------------------------------------------------


def test_a_shard_is_read_once_and_again_when_it_changes(tars, monkeypatch):
    calls = []
    build = shards.build_index
    monkeypatch.setattr(shards, "build_index", lambda tar: calls.append(tar.name) or build(tar))
    progress = []
    read_data(tars, progress=lambda done, total: progress.append((done, total)))
    assert sorted(calls) == [f"pets-{i:03}.tar" for i in range(3)]
    assert progress == [(1, 3), (2, 3), (3, 3)]
    read_data(tars)
    assert len(calls) == 3
    os.utime(tars / "pets-001.tar", (1, 1))
    read_data(tars)
    assert calls[3:] == ["pets-001.tar"]
    index = tars / "pets-002.tar.index"
    index.write_bytes(index.read_bytes()[:-3])  # cut off
    read_data(tars)
    assert calls[4:] == ["pets-002.tar"]
    assert not [name for name in os.listdir(tars) if name.endswith(".part")]


def test_two_processes_may_index_a_shard_at_the_same_time(tars):
    """The index that the second one writes is, to readers of the first, the one they opened."""
    tar = tars / "pets-000.tar"
    first = build_index(tar)
    again = build_index(tar)
    assert first.read("labels", 0, first.count).tolist() == again.read("labels", 0, again.count).tolist()


def test_where_nothing_can_be_written_the_index_is_in_the_cache(tars, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    tar = tars / "pets-000.tar"
    tar.with_name("pets-000.tar.index").mkdir()  # in the way, also of root
    assert len(read_data(tar).train) == 9
    assert os.path.isfile(list(index_paths(tar))[1])
    assert open_index(tar).count == 9
    monkeypatch.setenv("VITRAIL_CACHE", str(tar / "no"))
    with pytest.raises(FileError, match="neither beside it nor in the cache folder"):
        read_data(tar)


def test_a_forged_index_reads_nothing_outside_its_shard(tars):
    read_data(tars)
    path = tars / "pets-000.tar.index"
    start = open_index(tars / "pets-000.tar").starts["places"]
    data = bytearray(path.read_bytes())
    data[start + 8 : start + 12] = b"\xff" * 4
    data[HEADER.size - 8 : HEADER.size] = bytes(8)  # as if it had no hash of the places
    path.write_bytes(data)
    with pytest.raises(FileError, match="outside its shard"):
        open_image(read_data(tars).train.paths[0])


def test_a_shard_that_is_cut_off_in_use_is_a_sentence(tars):
    images = read_data(tars).train.paths
    open_image(images[25])
    for tar in tars.glob("*.tar"):
        os.truncate(tar, 1024)
    with pytest.raises(BrokenImage, match="was cut off while it was in use"):
        open_image(images[26])  # in a file that is open
    with pytest.raises(BrokenImage, match="was changed while it was in use"):
        open_image(images[0])


# ---- what is refused --------------------------------------------------------------------------

LINK = dict(type=tarfile.SYMTYPE, linkname="/etc/passwd")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x"), ("a.cls", b"1"), ("b.jpg", b"x")], "has no label for 'b.jpg'; add b.cls"),
        ([("a.jpg", b""), ("b.jpg", b""), ("c.jpg", b"")], "has no label for 'a.jpg' and 2 more images"),
        ([("a.jpg", b"", LINK)], "has a link, 'a.jpg' to '/etc/passwd'"),
        ([("a.jpg", b"", dict(type=tarfile.LNKTYPE, linkname="b"))], "has a link"),
        ([("a.jpg", b"", dict(type=tarfile.FIFOTYPE))], "no regular file, 'a.jpg'"),
        ([("/etc/a.jpg", b"x")], "named '/etc/a.jpg'; names must be relative"),
        ([("x/../../a.jpg", b"x")], r"named 'x/\.\./\.\./a.jpg'"),
        ([("a.jpg", b"x"), ("a.png", b"x")], "two images with one key, 'a.jpg' and 'a.png'"),
        ([("a.jpg", b"x"), ("./a.jpg", b"x")], "two images with one key"),
        ([("a.cls", b"1"), ("a.cls", b"2")], "two members 'a.cls'"),
        ([("a.cls", b" ")], "must hold a label"),
        ([("a.json", b"{")], "a.json is not valid JSON"),
        ([("a.json", b'{"label": 0.5}')], "must hold a label, a text or an integer, .* not 0.5"),
        ([("a.json", b'{"label": ["a", 0.5]}')], "must hold a label.* or a list of these.* not 0.5"),
        ([("a.jpg", b"x"), ("a.json", b'{"label": [1]}'), ("b.jpg", b"x")], "has no label for 'b.jpg'"),
        ([("a.txt", b"x")], "has no images"),
        ([("._a.jpg", b"x"), ("b/", b"", dict(type=tarfile.DIRTYPE))], "has no images"),
    ],
)
def test_what_is_refused_in_a_shard(tmp_path, members, message):
    tar = write_tar(tmp_path / "bad.tar", members)
    with pytest.raises((InputError, FileError), match=message) as error:
        read_data(tar)
    assert "bad.tar" in str(error.value)


@pytest.mark.parametrize("cut", [100, 600, 1024, -1024, -9000])
def test_a_truncated_tar_is_a_sentence(tmp_path, cut):
    tar = write_tar(tmp_path / "a.tar", [(f"{i}.jpg", b"x" * 700) for i in range(9)])
    data = tar.read_bytes()[: 9 * (512 + 1024) + 1024]  # without the padding of tarfile
    tar.write_bytes(data[:cut])
    with pytest.raises((FileError, InputError), match=r"cut off|not a tar file"):
        read_data(tar)


def test_other_files_named_tar(tmp_path):
    for name, data, message in (
        ("empty", b"", "not a tar file"),
        ("text", b"hello" * 1000, "not a tar file"),
        ("gz", b"\x1f\x8b" + bytes(600), "is compressed"),
    ):
        (tmp_path / f"{name}.tar").write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_data(tmp_path / f"{name}.tar")


def test_a_header_that_asks_for_gigabytes_is_refused(tmp_path):
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 2**33
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(info.tobuf(format=tarfile.GNU_FORMAT))
        file.truncate(2**33 + 4096)  # sparse
    with pytest.raises((InputError, FileError), match=r"a header of 8,589,934,592 bytes"):
        read_data(tmp_path / "a.tar")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("pets-{000..004}.tar", r"pets-003.tar does not exist \(2 of the 5 shards"),
        ("pets-{5..1}.tar", "from a lower to a higher number"),
        ("{0..999999}-{0..999999}.tar", "more than 1,000,000 shards"),
        ("pets-{a..b}.tar", "does not exist"),
        ("none.tar", "does not exist"),
    ],
)
def test_patterns_that_match_no_shards(tars, pattern, message):
    with pytest.raises(InputError, match=message):
        read_data(tars / pattern)


def test_braces():
    assert shards.expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert len(shards.expand_braces("{0..3}/{0..9}.tar")) == 40


# ---- lazy sequences ---------------------------------------------------------------------------


def test_lazy_sequences_are_sequences(tars):
    names = read_data(tars).train.names
    listed = list(names)
    assert len(names) == len(listed) == 27
    assert [names[i] for i in range(-27, 27)] == [listed[i] for i in range(-27, 27)]
    for cut in (slice(None, None, 5), slice(20, 3, -2), slice(-3, None), slice(40, 50)):
        assert list(names[cut]) == listed[cut]
    some = np.array([26, 0, 13, 13, 1])
    assert list(names.take(some)) == [listed[i] for i in some]
    assert list(names.take(some).take(np.array([4, 2]))) == [listed[1], listed[13]]
    with pytest.raises(IndexError):
        names[27]


@given(st.lists(st.booleans(), min_size=1, max_size=3000))
def test_a_selection_finds_the_chosen_rows(mask):
    mask = np.array(mask)
    chosen, rows = Selection(mask), np.flatnonzero(mask)
    assert len(chosen) == len(rows)
    assert (chosen[np.arange(len(rows))] == rows).all()
    assert (chosen.mask() == mask).all()
