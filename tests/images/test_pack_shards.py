"""`vitrail pack --to shards`: the same data set, resumed after a kill, in a layout that other tools read."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import SETTINGS, fingerprints, one_thread, train, write_folder
from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.images.content import content_keys
from vitrail.images.formats import pack_shards as module
from vitrail.images.formats.pack_shards import RESUME, member_key, pack_shards
from vitrail.images.formats.sources import open_dataset, read_data
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.preprocess import Preprocess

__all__ = ["one_thread"]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images", each=9)


@pytest.fixture
def small(monkeypatch):
    """Shards of a few files; a megabyte would be one shard."""
    ranges = module._ranges
    monkeypatch.setattr(module, "_ranges", lambda sizes, most: ranges(sizes, 8_000))


def invoke(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, str(done.exception or "") + done.output


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith(".index")}


def test_several_labels_of_an_image_come_back(folder, tmp_path, small):
    """From the index, and from the shards themselves; the run on them has the bits of the table's."""
    files = sorted(folder.rglob("*.*"))
    rows = [
        {"path": str(file.relative_to(tmp_path)), "label": [file.parent.name, "odd"][: 1 + number % 2]}
        for number, file in enumerate(files)
    ]
    table, out = tmp_path / "photos.jsonl", tmp_path / "packed" / "photos"
    table.write_text("\n".join(map(json.dumps, rows)))
    assert pack_shards(read_data(table), out).shards > 2
    assert not (out / "classes.json").exists()
    train(table, recipe="small", out=tmp_path / "a", workers=0, **{**SETTINGS, "epochs": 1})
    for again in (False, True):
        for index in out.glob("*.index") if again else ():
            index.unlink()
        source, found = read_data(table), read_data(out)
        assert found.multilabel
        assert found.classes == source.classes
        assert (found.train.labels == source.train.labels).all()
    train(out, recipe="small", out=tmp_path / "b", workers=0, **{**SETTINGS, "epochs": 1})
    one, other = fingerprints(tmp_path / "a"), fingerprints(tmp_path / "b")
    assert one["metrics.jsonl"] == other["metrics.jsonl"]


def test_shards_train_to_the_bits_of_the_folder(folder, tmp_path, small):
    out = tmp_path / "packed" / "images"
    result = pack_shards(read_data(folder), out)
    assert result.shards > 2
    assert result.images == 27
    source, found = open_dataset(folder), open_dataset(out)
    for name in ("train", "val"):
        one, other = getattr(source, name), getattr(found, name)
        assert list(other.names) == list(one.names)
        assert (content_keys(other) == content_keys(one)).all()
    for name, data in (("a", folder), ("b", out)):
        train(data, recipe="small", out=tmp_path / name, workers=0, **{**SETTINGS, "epochs": 1})
    assert fingerprints(tmp_path / "a") == fingerprints(tmp_path / "b")
    digests = [json.loads((tmp_path / name / "config.json").read_text())["data"] for name in "ab"]
    assert digests[0] == digests[1]  # a run on the folder can be resumed on the shards


def test_without_their_indexes_they_are_still_the_same_data(folder, tmp_path, small):
    pack_shards(read_data(folder), tmp_path / "out")
    before = read_data(tmp_path / "out")
    for file in (tmp_path / "out").glob("*.index"):
        file.unlink()
    after = read_data(tmp_path / "out")
    assert after.classes == before.classes == ["ant", "bee", "cat"]
    assert list(after.train.names) == list(before.train.names)
    assert (after.train.labels == before.train.labels).all()
    assert (after.train.keys == before.train.keys).all()


def test_classes_whose_names_are_numbers_keep_them(tmp_path):
    folder = write_folder(tmp_path / "images", each=2)
    for old, new in (("ant", "1"), ("bee", "10"), ("cat", "2")):
        os.rename(folder / old, folder / new)
    pack_shards(read_data(folder), tmp_path / "out")
    found = read_data(tmp_path / "out")
    assert found.classes == read_data(folder).classes == ["1", "10", "2"]
    (tmp_path / "out" / "train-000000.tar.index").unlink()
    again = read_data(tmp_path / "out")
    names = [again.classes[label] for label in again.train.labels]
    assert names == ["1", "1", "10", "10", "2", "2"]


def test_other_tools_read_the_layout(folder, tmp_path):
    pack_shards(read_data(folder), tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    assert members["bee/03.png"] == (folder / "bee" / "03.png").read_bytes()
    assert members["bee/03.cls"] == b"1"
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == {"0": "ant", "1": "bee", "2": "cat"}


def test_splits_dotted_names_and_missing_files(tmp_path):
    folder = write_folder(tmp_path / "images", each=2)
    os.rename(folder / "ant" / "00.jpg", folder / "ant" / "a.b.jpg")
    rows = ["path,label,split", "images/ant/a.b.jpg,x,train", "images/ant/01.png,y,val", "no.png,x,train"]
    rows += [f"{folder}/bee/00.jpg,y,train", "images/ant/../bee/01.png,x,test"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    result = pack_shards(read_data(tmp_path / "t.csv"), tmp_path / "out")
    assert result.unreadable == ["no.png"]
    found = read_data(tmp_path / "out")
    assert list(found.train.names) == ["images/ant/a.b.jpg", "no.png", f"{folder}/bee/00.jpg"]
    corrupt = CorruptFiles("skip")
    import torch

    reader = Reader(found.train, Preprocess(size=8), corrupt=corrupt)
    next(iter(reader.batches([(0, torch.arange(3))])))
    assert list(corrupt.reasons) == ["no.png"]
    assert "empty" in corrupt.reasons["no.png"]
    for index in (tmp_path / "out").glob("*.index"):
        index.unlink()
    assert len(read_data(tmp_path / "out").train) == 3  # every member has a name that is allowed


def test_keys_are_relative_and_occur_once():
    taken = set()
    assert member_key("a/b.c.JPG", taken, 0) == ("a/b_c", ".jpg")
    assert member_key("a/b_c.png", taken, 1) == ("a/b_c-1", ".png")
    assert member_key("/../x/./y.dat", taken, 2) == ("x/y", ".jpg")


def test_a_killed_pack_resumes(folder, tmp_path, small):
    code = (
        "import sys, time; from pathlib import Path; from vitrail.images.formats import pack_shards as m\n"
        "from vitrail.images.formats.sources import read_data\n"
        "ranges, read = m._ranges, m._read_source\n"
        "m._ranges = lambda sizes, most: ranges(sizes, 8_000)\n"
        "m._read_source = lambda path: (time.sleep(0.05), read(path))[1]\n"
        "m.pack_shards(read_data(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", code, str(folder), str(out)])
    while child.poll() is None and not (out.is_dir() and list(out.glob("*.tar.index"))):
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert (out / RESUME).exists()
    result = pack_shards(read_data(folder), out)
    assert 1 <= result.resumed < result.shards
    pack_shards(read_data(folder), tmp_path / "fresh")
    assert files_of(out) == files_of(tmp_path / "fresh")  # as if it had never been interrupted
    assert not (out / RESUME).exists()


def test_the_command_and_its_errors(folder, tmp_path):
    out = tmp_path / "out"
    code, text = invoke("pack", folder, out, "--to", "shards", "--shard-size", "1")
    assert (code, "Packed 27 images into 1 shard in" in text) == (0, True)
    assert "already exists" in invoke("pack", folder, out, "--to", "shards")[1]
    new = tmp_path / "new"
    for words, message in (
        (["--to", "shard"], "unknown format 'shard' for --to. Did you mean 'shards'"),
        (["--to", "shards", "--size", "64"], "--size is not for shards"),
        (["--to", "shards", "--check"], "--check is not for shards"),
        (["--shard-size", "3"], "--shard-size is for --to shards"),
    ):
        assert message in invoke("pack", folder, new, *words)[1]
    assert "packed already" in invoke("pack", out, new, "--to", "shards")[1]
    assert "is an array" in invoke("pack", "digits", new, "--to", "shards")[1]
    assert not new.exists()
    new.mkdir()
    (new / RESUME).write_text("other")
    with pytest.raises(InputError, match="a part of another pack"):
        pack_shards(read_data(folder), new)
