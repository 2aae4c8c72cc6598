"""Names for numbered classes: given, in an npz, in a file with the data."""

import json
import zipfile

import numpy as np
import pytest
from PIL import Image

import vitrail as vt
from tests.support.command import run_command
from tests.support.shared_data import shared
from vitrail.images.classes import rename_classes
from vitrail.images.formats.sources import open_dataset


@pytest.fixture
def numbered(tmp_path):
    """Folders 1 ... 12, whose alphabetical order is not their order."""
    for number in range(1, 13):
        for index in range(2):
            folder = tmp_path / "data" / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number * 20, index * 100, 0)).save(folder / f"{index}.png")
    return tmp_path / "data"


NAMES = [f"flower {number}" for number in range(1, 13)]
EXPECTED = ["flower 1", "flower 10", "flower 11", "flower 12", "flower 2"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("n.txt", "\n".join(NAMES) + "\n\n"),
        ("n.txt", "\ufeff" + "\r\n".join(NAMES)),
        ("n.json", json.dumps(NAMES)),
        ("n.json", json.dumps({str(number): name for number, name in enumerate(NAMES, 1)})),
        ("n.json", json.dumps({f"{number:03}": name for number, name in enumerate(NAMES, 1)})),
        ("n.json", json.dumps({**{name: number for number, name in enumerate(NAMES, 1)}, "other": 99})),
    ],
)
def test_names_of_numbered_folders(numbered, tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    data = open_dataset(numbered)
    named = rename_classes(data, tmp_path / name)
    assert named.classes[:5] == EXPECTED
    assert (named.train.labels == data.train.labels).all()
    assert "1 is flower 1" in named.notes[-1]


@pytest.mark.parametrize("name", ["classes.json", "classes.txt"])
def test_a_file_in_the_folder_is_found(numbered, name):
    (numbered / name).write_text(json.dumps(NAMES) if name.endswith("json") else "\n".join(NAMES))
    assert open_dataset(numbered).classes[:5] == EXPECTED


def test_a_found_file_that_does_not_fit_is_a_note(numbered):
    (numbered / "classes.txt").write_text("a\nb\n")
    data = open_dataset(numbered)
    assert data.classes[:2] == ["1", "10"]
    assert any("classes.txt is not used" in note and "2 names" in note for note in data.notes)


def test_folders_with_names_keep_them(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "d" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / "d" / name / f"{index}.png")
    (tmp_path / "d" / "classes.txt").write_text("dog\ncat\n")
    data = open_dataset(tmp_path / "d")
    assert data.classes == ["cat", "dog"] == rename_classes(data, ["dog", "cat"]).classes
    assert rename_classes(data, {"cat": "Katze", "dog": "Hund"}).classes == ["Katze", "Hund"]
    with pytest.raises(vt.InputError, match=r"not numbered: cat, dog\. Give a JSON object"):
        rename_classes(data, ["Hund", "Katze"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NAMES[:-1], "classes has 11 names, but the data has 12 classes"),
        ([*NAMES, "x"], "13 names, but the data has 12"),
        ([*NAMES[:-1], NAMES[0]], "two classes the same name: flower 1"),
        ([*NAMES[:-1], ""], "not a name: ''"),
        ([*NAMES[:-1], 3], "not a name: 3"),
        ({"1": "a"}, "no name for 10, 11, 12, 2, 3 and 6 more: it names 1 classes, and the data has 12"),
        (7, "must hold a list of names"),
    ],
)
def test_wrong_names_are_refused(numbered, content, message):
    with pytest.raises(vt.InputError, match=message):
        rename_classes(open_dataset(numbered), content)


def test_unreadable_files_of_names(numbered, tmp_path):
    data = open_dataset(numbered)
    with pytest.raises(vt.InputError, match=r"missing\.txt cannot be read: No such file"):
        rename_classes(data, tmp_path / "missing.txt")
    (tmp_path / "latin.txt").write_bytes("Gänseblümchen".encode("latin1"))
    with pytest.raises(vt.InputError, match="UTF-8"):
        rename_classes(data, tmp_path / "latin.txt")
    (tmp_path / "n.json").write_text("{")
    with pytest.raises(vt.FileError, match="not valid JSON"):
        rename_classes(data, tmp_path / "n.json")


def arrays(**more):
    images = np.zeros((6, 8, 8), np.uint8) + np.arange(6, dtype=np.uint8)[:, None, None]
    return {"images": images, "labels": np.arange(6) % 3, **more}


def test_an_npz_has_an_array_of_names(tmp_path):
    np.savez(tmp_path / "x.npz", **arrays(classes=np.array(["ant", "bee", "cat"])))
    data = open_dataset(tmp_path / "x.npz")
    assert data.classes == ["ant", "bee", "cat"]
    assert not any("not read" in note for note in data.notes)
    np.savez(tmp_path / "plain.npz", **arrays())
    (tmp_path / "classes.txt").write_text("x\ny\nz")
    assert open_dataset(tmp_path / "plain.npz").classes == ["x", "y", "z"]


@pytest.mark.parametrize("classes", [np.arange(3), np.array([["a", "b"]]), np.array(["a", "b"])])
def test_a_wrong_array_of_names(tmp_path, classes):
    np.savez(tmp_path / "x.npz", **arrays(classes=classes))
    with pytest.raises(
        vt.InputError, match=r"^The array .* one name for each class|2 names, but the data has 3"
    ):
        open_dataset(tmp_path / "x.npz")


def test_an_array_of_names_that_claims_much_memory(tmp_path):
    np.savez(tmp_path / "x.npz", **arrays())
    header = b"{'descr': '<U9', 'fortran_order': False, 'shape': (99999999999,), }"
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("classes.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(vt.InputError, match=r"^The array classes .* one name for each class"):
        open_dataset(tmp_path / "x.npz")


def test_flowers_have_their_names():
    names = shared("data/flowers102_cat_to_name.json")
    with zipfile.ZipFile(shared("data/flowers102_64.zip")) as archive:
        folders = {name.split("/")[-2] for name in archive.namelist() if name.endswith((".jpg", ".png"))}
    data = vt_dataset(sorted(folders))
    assert rename_classes(data, names).classes[data.classes.index("021")] == "fire lily"


def vt_dataset(classes):
    from vitrail.images.formats.sources import Dataset, Split

    labels = np.arange(len(classes))
    images = np.zeros((len(classes), 4, 4, 3), np.uint8)
    return Dataset("flowers", classes, Split(labels, [str(one) for one in labels], None, images))


def test_the_commands_take_names_and_a_resumed_run_keeps_them(numbered, tmp_path):
    (tmp_path / "n.txt").write_text("\n".join(NAMES))
    small = ["--set", "model.width=16", "--set", "model.depth=1", "--set", "model.heads=1", "--size", "16"]
    out = [*small, "--epochs", "1", "--out", "run"]

    def vitrail(*arguments, code=0):
        done = run_command(*arguments, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    vitrail("train", "data", "--classes", "n.txt", *out)
    assert vt.load(tmp_path / "run" / "best.safetensors").labels[:5] == EXPECTED
    assert vt.train(out=tmp_path / "run", resume=True, epochs=2, report=False).bundle.labels[:5] == EXPECTED
    assert "Accuracy" in vitrail("evaluate", "run/best.safetensors", "data", "--classes", "n.txt").title()
    for names in (NAMES, tmp_path / "n.txt", {str(number): name for number, name in enumerate(NAMES, 1)}):
        result = vt.evaluate(tmp_path / "run" / "best.safetensors", numbered, classes=names)
        assert (result.images, result.classes[:5]) == (24, EXPECTED)
    with pytest.raises(vt.InputError, match="classes has 2 names"):
        vt.evaluate(tmp_path / "run" / "best.safetensors", numbered, classes=["a", "b"])
    (tmp_path / "n.txt").write_text("a\nb")
    assert "n.txt has 2 names" in vitrail(
        "evaluate", "run/best.safetensors", "data", "--classes", "n.txt", code=2
    )
