"""`vitrail doctor` reports every fault and nothing else, and changes no file."""

import contextlib
import hashlib
import json
import os
import socket

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.images import content
from vitrail.images import problems as doctor
from vitrail.images.formats.sources import open_dataset
from vitrail.images.problems import check_images, open_for_check


def make_image(number, side=40):
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Twelve good images of each class in train, three in val."""
    number = 0
    for split, count in (("train", 12), ("val", 3)):
        for kind in ("ant", "bee"):
            directory = tmp_path / "data" / split / kind
            directory.mkdir(parents=True)
            for index in range(count):
                number += 1
                make_image(number).save(directory / f"{index}.png")
    return tmp_path / "data"


def fingerprint(folder):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def test_a_data_set_without_faults(folder):
    found = check_images(open_dataset(folder))
    assert not found.has_faults
    assert found.images == {"train": 24, "val": 6}
    assert found.modes == {"RGB": 30}
    assert [found.duplicates, found.small_classes, found.small_images] == [[], {}, []]


def test_all_faults_are_found(folder):
    train, val = folder / "train", folder / "val"
    (train / "ant" / "broken.jpg").write_bytes(b"no image")
    complete = (train / "ant" / "0.png").read_bytes()
    (train / "bee" / "cut.png").write_bytes(complete[: len(complete) // 2])
    Image.open(train / "ant" / "1.png").save(val / "ant" / "same.bmp")  # leaked, in another format
    Image.open(train / "ant" / "2.png").save(train / "bee" / "other.png")  # under another label
    Image.open(train / "bee" / "3.png").save(train / "bee" / "again.tiff")  # twice
    make_image(99, side=8).save(train / "ant" / "small.png")
    make_image(98).convert("L").save(train / "ant" / "gray.png")
    (train / "cow").mkdir()
    make_image(97).save(train / "cow" / "one.png")
    before = fingerprint(folder)
    found = check_images(open_dataset(folder), workers=3)
    assert fingerprint(folder) == before
    assert found.has_faults
    assert sorted(found.corrupt) == ["train/ant/broken.jpg", "train/bee/cut.png"]
    assert found.leaked == [["train: train/ant/1.png", "val: val/ant/same.bmp"]]
    assert found.conflicting_labels == [["train: train/ant/2.png (ant)", "train: train/bee/other.png (bee)"]]
    assert found.duplicates == [["train: train/bee/3.png", "train: train/bee/again.tiff"]]
    assert found.small_classes == {"cow": 1}
    assert found.small_images == ["train/ant/small.png"]
    assert found.modes["L"] == 1


def test_the_command(folder):
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 0
    assert "24 in train, 6 in val" in done.stdout
    assert "Nothing must be repaired." in done.stdout
    (folder / "train" / "ant" / "broken.jpg").write_bytes(b"no image")
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 1
    assert "cannot be read (1):" in done.stdout
    assert "train/ant/broken.jpg" in done.stdout
    found = json.loads(CliRunner().invoke(app, ["doctor", str(folder), "--json"]).stdout)
    assert list(found["corrupt"]) == ["train/ant/broken.jpg"]


def test_arrays_are_examined_too():
    found = check_images(open_dataset("digits"))
    assert found.images == {"train": 1437, "val": 360}
    assert not found.corrupt
    assert not found.leaked
    assert found.modes == {"1 channels": 1797}


# ---- skipped files -----------------------------------------------------------------------------


def run_doctor(path, *more):
    done = CliRunner().invoke(app, ["doctor", str(path), *more])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):  # such names must be short
        made.bind(path.name)


ENTRIES = {  # path relative to train, how it is made, the title of the section, the name in it, the exit code
    "an empty class": ("emu", lambda p: p.mkdir(), "classes without a training image (1)", "emu", 1),
    "a pipe": ("ant/p.png", os.mkfifo, "pipes, sockets or devices (1)", "train/ant/p.png", 1),
    "a pipe of another name": ("ant/pipe", os.mkfifo, "pipes, sockets or devices (1)", "train/ant/pipe", 1),
    "a socket": ("ant/s.png", make_socket, "pipes, sockets or devices (1)", "train/ant/s.png", 1),
    "a link to a device": ("ant/n.png", lambda p: p.symlink_to("/dev/null"), "pipes, sockets or devices (1)", "n.png", 1),
    "a dangling link": ("ant/l.png", lambda p: p.symlink_to("no"), "broken links (1)", "train/ant/l.png", 1),
    "a dangling class": ("emu", lambda p: p.symlink_to("no"), "broken links (1)", "train/emu", 1),
    "a link to itself": ("ant/l.png", lambda p: p.symlink_to("l.png"), "broken links (1)", "train/ant/l.png", 1),
    "a circular folder": ("ant/r", lambda p: p.symlink_to("."), "links to folders", "train/ant/r", 1),
    "a circular class": ("up", lambda p: p.symlink_to(".."), "links to folders", "train/up", 1),
    "a folder elsewhere": ("ant/e", lambda p: p.symlink_to("../bee"), "links to folders", "train/ant/e", 1),
    "an image beside the classes": ("x.png", lambda p: make_image(999).save(p), "images outside the class folders (1)", "train/x.png", 1),
    "an image beside the splits": ("../x.JPG", lambda p: make_image(999).save(p), "images outside the class folders (1)", "x.JPG", 1),
    "a folder beside the splits": ("../more", lambda p: p.mkdir(), "folders beside train/ (1)", "more", 1),
    "an image beside the classes of val": ("../val/x.png", lambda p: make_image(999).save(p), "images outside the class folders (1)", "val/x.png", 1),
    "a format that is not read": ("ant/x.HEIC", lambda p: p.write_bytes(b"heic"), "images in unsupported formats (1)", "train/ant/x.HEIC", 1),
    "an empty file": ("ant/x.png", lambda p: p.write_bytes(b""), "The file is empty (0 bytes)", "train/ant/x.png", 1),
    "text in a class": ("ant/x.txt", lambda p: p.write_text("x"), "files without an image suffix (1)", "train/ant/x.txt", 0),
    "text beside the classes": ("list.csv", lambda p: p.write_text("x"), "files without an image suffix (1)", "train/list.csv", 0),
    "no suffix": ("ant/x", lambda p: p.write_text("x"), "files without an image suffix (1)", "train/ant/x", 0),
    "a hidden file": ("ant/.x.png", lambda p: p.write_text("x"), "hidden files and folders (1)", "train/ant/.x.png", 0),
    "a hidden folder": ("__pycache__", lambda p: p.mkdir(), "hidden files and folders (1)", "train/__pycache__", 0),
    "an empty class in val": ("../val/ant/none", lambda p: [one.unlink() for one in p.parent.glob("*")], "classes without an image in val (1)", "ant", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
def test_every_skipped_entry_is_reported(case, folder):
    name, make, title, shown, expected = ENTRIES[case]
    make(folder / "train" / name)
    code, output = run_doctor(folder)
    assert (code, title in output) == (expected, True), output
    assert shown in output[output.index(title) :], output
    assert ("MUST BE REPAIRED" in output, "WORTH KNOWING" in output) == (expected == 1, expected == 0), output
    if "not read" in output:
        notes = open_dataset(folder).notes
        assert any("Not read: 1 " in note for note in notes) == (expected == 1), notes


def test_a_class_may_be_a_link_to_a_folder(folder):
    (folder / "train" / "ant").rename(folder.parent / "ants")
    (folder / "train" / "ant").symlink_to(folder.parent / "ants")
    assert run_doctor(folder)[0] == 0


def test_lists_are_short_and_80_columns_wide(folder):
    ants = folder / "train" / "ant"
    for i in range(40):
        (
            ants / f"a name that is much too long for one line of a terminal, number {i:02} of all 40.txt"
        ).touch()
        (ants / f"{i:02} broken and with a long name, so that two of them are no line.png").write_bytes(b"no")
        make_image(700 + i % 4).save(ants / f"one of 10 copies that are all the same image, number {i}.png")
    (ants / "\x1b[31mred.png").write_bytes(b"")
    code, output = run_doctor(folder)
    assert code == 1
    assert max(map(len, output.splitlines())) <= 80
    assert len(output.splitlines()) < 50
    assert "and 35 more" in output
    assert "\x1b" not in output
    found = json.loads(run_doctor(folder, "--json")[1])
    assert len(found["corrupt"]) == 41
    assert [len(names) for names in found["skipped"].values()] == [40]
    assert [len(names) for names in found["duplicates"]] == [10] * 4


@pytest.mark.parametrize("name", ["Train", "TRAIN"])
def test_splits_in_capitals_are_splits(name, folder):
    (folder / "train").rename(folder / name)
    (folder / "val").rename(folder / "Valid")
    data = open_dataset(folder)
    assert (data.classes, len(data.train), len(data.val)) == (["ant", "bee"], 24, 6)


def test_folders_that_could_be_two_things(folder):
    (folder / "valid").mkdir()
    with pytest.raises(InputError, match=r"two folders for val: val and valid"):
        open_dataset(folder)
    (folder / "valid").rename(folder / "test")
    (folder / "train").rename(folder.parent / "train")
    with pytest.raises(InputError, match=r"has images of val but none of train"):
        open_dataset(folder)


# ---- data that training refuses ----------------------------------------------------------------


def test_one_class(tmp_path):
    (tmp_path / "ant").mkdir()
    for number in range(12):
        make_image(number).save(tmp_path / "ant" / f"{number}.png")
    code, output = run_doctor(tmp_path)
    assert code == 1
    assert "needs at least two classes" in output.replace("\n  ", " ")


def test_one_image_of_each_class(tmp_path):
    for number, name in enumerate(["ant", "bee", "cow"]):
        (tmp_path / name).mkdir()
        make_image(number).save(tmp_path / name / "1.png")
    code, output = run_doctor(tmp_path)
    assert code == 1
    assert "too few images for a validation set" in output.replace("\n  ", " ")
    assert "classes with few training images (3):\n  ant: 1, bee: 1, cow: 1" in output


def test_no_images_but_others(tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.heic").touch()
    code, output = run_doctor(tmp_path)
    assert code == 1
    assert "has no training images" in output.replace("\n  ", " ")
    assert "unsupported formats (2):" in output


def test_the_same_image_under_two_labels_in_a_table(tmp_path):
    for number in range(24):
        make_image(number).save(tmp_path / f"{number}.png")
    rows = [f"{number}.png,{'ab'[number % 2]},train" for number in range(24)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *rows, "0.png,b,train", "3.png,b,val"]))
    code, output = run_doctor(tmp_path / "t.csv")
    assert code == 1
    assert "train: 0.png (a) = train: 0.png (b)" in output
    assert "train: 3.png = val: 3.png" in output


def test_files_of_a_table_that_cannot_be_opened(tmp_path):
    for number in range(24):
        make_image(number).save(tmp_path / f"{number}.png")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    names = ["gone.png", "folder.png", "pipe.png", "x" * 300 + ".png"]
    rows = [f"{number}.png,{'ab'[number % 2]}" for number in range(24)] + [f"{name},a" for name in names]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    code, output = run_doctor(tmp_path / "t.csv")
    assert code == 1
    assert "cannot be read (4):" in output
    assert "No such file" in output
    (tmp_path / "t.csv").write_text("path,label\n1\0.png,a\n")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "t.csv")])
    assert isinstance(done.exception, InputError)  # which the command line prints, and exits with 2
    assert "line 2" in str(done.exception)


def test_order_and_progress_do_not_depend_on_the_threads(folder):
    (folder / "train" / "bee" / "x.png").write_bytes(b"no")
    (folder / "train" / "ant" / "y.png").write_bytes(b"no")
    done: list[tuple[str, int, int]] = []
    one, many = (
        check_images(open_dataset(folder), workers=1, progress=lambda *call: done.append(call)),
        check_images(open_dataset(folder), workers=7),
    )
    assert one == many
    assert list(one.corrupt) == ["train/ant/y.png", "train/bee/x.png"]
    assert done == [("decoding images", 32, 32)]


def test_a_file_in_many_rows_of_a_table_is_decoded_and_hashed_once(folder, monkeypatch):
    """The report has every row, as if each were decoded."""
    files = ["train/ant/0.png", "train/bee/1.png", "train/ant/2.png", "train/bee/3.png"]
    rows = [(file, file.split("/")[1], "train") for _ in range(50) for file in files]
    rows += [("train/ant/0.png", "ant", "val"), ("train/ant/4.png", "ant", "val"), ("none.png", "bee", "val")]
    rows += [("none.png", "bee", "val")]
    text = "path,label,split\n" + "".join(f"{path},{label},{split}\n" for path, label, split in rows)
    (folder / "table.csv").write_text(text)
    decoded, hashed = [], []
    decode, key = doctor.decode_image, content.file_key
    monkeypatch.setattr(doctor, "decode_image", lambda *args: decoded.append(1) or decode(*args))
    monkeypatch.setattr(content, "file_key", lambda path: hashed.append(path) or key(path))
    data = open_dataset(folder / "table.csv")
    found = check_images(data, workers=0)
    assert len(decoded) == 5
    assert found.images == {"train": 200, "val": 4}
    assert found.modes == {"RGB": 202}
    assert found.corrupt.keys() == {"none.png"}
    assert [len(group) for group in found.leaked] == [51]
    assert [len(group) for group in found.duplicates] == [50, 50, 50]
    keys = content.content_keys(data.train)
    assert len(hashed) == 4
    assert keys.tolist() == [key(path) for path in data.train.paths]


def test_progress_of_a_large_table(folder):
    (folder / "table.csv").write_text("path,label\n" + "train/ant/0.png,a\ntrain/bee/1.png,b\n" * 10_000)
    calls = []
    open_for_check(folder / "table.csv", lambda *call: calls.append(call))
    assert calls[:2] == [("reading rows", 10_000, None), ("reading rows", 20_000, None)]
    assert calls[2:] == [("reading files", 2, 2)]


def test_paths_that_are_too_long_are_reported(folder, monkeypatch):
    """A folder that no path leads to, and an image of a table: doctor goes on, as predict does."""
    monkeypatch.chdir(folder / "train" / "ant")
    for _ in range(21):  # each step is short, and the path of the last folder is longer than 4,096 bytes
        os.mkdir("x" * 200)
        os.chdir("x" * 200)
    make_image(96).save("deep.png")
    os.chdir(folder)
    done = CliRunner().invoke(app, ["doctor", "."])
    assert done.exit_code == 1
    assert "24 in train, 6 in val" in done.stdout
    assert "not read: folders that cannot be read (1):" in done.stdout
    assert "File name too long" in done.stdout
    with pytest.raises(
        InputError, match=r"folders that cannot be read.* train/ant/xxx.*: File name too long"
    ):
        open_dataset(folder)
    rows = [f"train/{kind}/{number}.png,{kind}" for kind in ("ant", "bee") for number in range(12)]
    (folder / "table.csv").write_text("\n".join(["path,label", *rows, "y" * 5000 + ".png,ant"]))
    done = CliRunner().invoke(app, ["doctor", "table.csv"])
    assert "cannot be read (1):\n  1: File name too long" in done.stdout
