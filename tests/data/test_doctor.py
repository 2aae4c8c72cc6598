"""`vitrail doctor`: finds what was put there, and nothing else; changes nothing."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitrail.cli import app
from vitrail.data.doctor import examine
from vitrail.data.sources import open_data


def picture(number, side=40):
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Twelve good pictures of each class in train, three in val."""
    number = 0
    for split, count in (("train", 12), ("val", 3)):
        for kind in ("ant", "bee"):
            place = tmp_path / "data" / split / kind
            place.mkdir(parents=True)
            for index in range(count):
                number += 1
                picture(number).save(place / f"{index}.png")
    return tmp_path / "data"


def fingerprint(folder):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def test_a_sound_data_set(folder):
    found = examine(open_data(folder))
    assert not found.ill
    assert found.pictures == {"train": 24, "val": 6}
    assert found.modes == {"RGB": 30}
    assert [found.twice, found.few, found.small] == [[], {}, []]


def test_it_finds_what_was_put_there(folder):
    train, val = folder / "train", folder / "val"
    (train / "ant" / "broken.jpg").write_bytes(b"no picture")
    whole = (train / "ant" / "0.png").read_bytes()
    (train / "bee" / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.open(train / "ant" / "1.png").save(val / "ant" / "same.bmp")  # leaked, in another format
    Image.open(train / "ant" / "2.png").save(train / "bee" / "other.png")  # under another label
    Image.open(train / "bee" / "3.png").save(train / "bee" / "again.tiff")  # twice
    picture(99, side=8).save(train / "ant" / "small.png")
    picture(98).convert("L").save(train / "ant" / "grey.png")
    (train / "cow").mkdir()
    picture(97).save(train / "cow" / "one.png")
    before = fingerprint(folder)
    found = examine(open_data(folder), workers=3)
    assert fingerprint(folder) == before
    assert found.ill
    assert sorted(found.corrupt) == ["train/ant/broken.jpg", "train/bee/cut.png"]
    assert found.leaked == [["train: train/ant/1.png", "val: val/ant/same.bmp"]]
    assert found.disputed == [["train: train/ant/2.png (ant)", "train: train/bee/other.png (bee)"]]
    assert found.twice == [["train: train/bee/3.png", "train: train/bee/again.tiff"]]
    assert found.few == {"cow": 1}
    assert found.small == ["train/ant/small.png"]
    assert found.modes["L"] == 1


def test_the_command(folder):
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 0
    assert "24 in train, 6 in val" in done.stdout
    assert "Nothing must be repaired." in done.stdout
    (folder / "train" / "ant" / "broken.jpg").write_bytes(b"no picture")
    done = CliRunner().invoke(app, ["doctor", str(folder)])
    assert done.exit_code == 1
    assert "cannot be read (1):" in done.stdout
    assert "train/ant/broken.jpg" in done.stdout
    found = json.loads(CliRunner().invoke(app, ["doctor", str(folder), "--json"]).stdout)
    assert list(found["corrupt"]) == ["train/ant/broken.jpg"]


def test_arrays_are_examined_too():
    found = examine(open_data("digits"))
    assert found.pictures == {"train": 1437, "val": 360}
    assert not found.corrupt
    assert not found.leaked
    assert found.modes == {"1 channels": 1797}
