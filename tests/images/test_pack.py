"""Packed files: what was packed comes back, interruptions and changes are noticed, forgeries are refused."""

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.support.command import run_command
from tests.support.tiny_runs import SETTINGS, RecordingCallback, one_thread, train, write_folder
from vitrail.base.errors import FileError, InputError
from vitrail.base.safe_files import locked_file
from vitrail.cli import app
from vitrail.images.augment.pipeline import Augment
from vitrail.images.content import content_keys
from vitrail.images.decode import read_pixels
from vitrail.images.formats import pack_writer as pack
from vitrail.images.formats.pack_cache import clear_cache, packed_folder
from vitrail.images.formats.pack_writer import check_packed, pack_dataset
from vitrail.images.formats.packed import HEADER, ROW, read_index
from vitrail.images.formats.sources import open_dataset, read_data
from vitrail.images.limits import BrokenImage
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.preprocess import Preprocess

__all__ = ["one_thread"]

SPEC = Preprocess(size=8, resize="shortest", resize_to=10)
LARGE = 1000  # a short side that no image has: nothing is resized


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images")


@pytest.fixture
def packed(folder, tmp_path):
    return pack_dataset(read_data(folder), tmp_path / "images.pack", size=LARGE, workers=0).out


def pixels_of(split, augment=None, corrupt=None):
    reader = Reader(split, SPEC, augment=augment, seed=3, corrupt=corrupt)
    return torch.cat([batch.images for batch in reader.batches([(2, torch.arange(len(split)))])])


# ---- what comes back ---------------------------------------------------------------------------


def test_a_packed_file_is_the_same_data_set(folder, packed):
    source, found = open_dataset(folder), open_dataset(packed)
    assert found.classes == source.classes
    assert found.name == source.name
    for name in ("train", "val"):
        one, other = getattr(source, name), getattr(found, name)
        assert list(other.names) == list(one.names)  # the same images are held out
        assert (other.labels == one.labels).all()
        assert (content_keys(other) == content_keys(one)).all()
    assert any("packed file" in note for note in found.notes)


@pytest.mark.parametrize("augment", [None, Augment(crop=0.3)])
def test_images_that_were_not_resized_have_the_same_pixels_and_crops(folder, packed, augment):
    source, found = read_data(folder).train, read_data(packed).train
    one, other = pixels_of(source, augment), pixels_of(found, augment)
    exact = [augment is None or name.endswith(".png") for name in source.names]  # a JPEG is decoded smaller
    assert torch.equal(one[exact], other[exact])
    assert (one.float() - other.float()).abs().mean() < 4  # and of the same box


def test_splits_and_several_labels_come_back(folder, tmp_path):
    lines = [
        json.dumps(
            {"path": f"images/{name}/{i:02d}.png", "label": [name, "odd"][: 1 + i % 2], "split": split}
        )
        for name, split in (("ant", "train"), ("bee", "val"), ("cat", "test"))
        for i in (1, 3, 5)
    ]
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    source = read_data(tmp_path / "table.jsonl")
    pack_dataset(source, tmp_path / "t.pack", workers=0)
    found = read_data(tmp_path / "t.pack")
    assert found.multilabel
    for name in ("train", "val", "test"):
        assert (getattr(found, name).labels == getattr(source, name).labels).all()
        assert list(getattr(found, name).names) == list(getattr(source, name).names)


def test_larger_images_are_resized_and_turned_upright(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        exif = Image.Exif()
        exif[0x0112] = 6
        pixels = np.zeros((60, 100, 3), np.uint8)
        pixels[:, 50:] = 200
        for i in range(2):
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.jpg", exif=exif, quality=95)
    pack_dataset(read_data(tmp_path / "data"), tmp_path / "d.pack", size=30, workers=0)
    (rows,) = {
        tuple(row[name] for name in ("height", "width", "channels"))
        for row in read_index(tmp_path / "d.pack").rows
    }
    assert rows == (50, 30, 3)
    image = read_data(tmp_path / "d.pack").train.paths[0].load(3)
    assert image[:20].mean() < 20
    assert image[-20:].mean() > 180


def test_jpegs_take_less_space_and_look_the_same(tmp_path):
    down, across = np.mgrid[:120, :160]
    waves = np.stack([127 + 80 * np.sin(down / 9 + c) * np.cos(across / 11) for c in range(3)], -1)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(waves.astype(np.uint8)).save(tmp_path / "data" / name / f"{i}.png")
    data = read_data(tmp_path / "data")
    plain, jpeg = (
        pack_dataset(data, tmp_path / f"{jpeg}.pack", size=100, jpeg=jpeg, workers=0)
        for jpeg in (False, True)
    )
    assert jpeg.bytes < plain.bytes / 4
    one, other = (pixels_of(read_data(result.out).train).float() for result in (plain, jpeg))
    assert (one - other).abs().mean() < 3


def test_a_model_with_one_channel_reads_a_packed_file(packed):
    gray = Preprocess(size=8, mean=(0.5,), std=(0.5,))
    assert read_pixels(read_data(packed).train.paths[1], gray).shape == (8, 8, 1)


def test_every_command_takes_a_packed_file(packed, tmp_path):
    settings = [
        word
        for one in ("model.width=16", "model.depth=1", "model.heads=2", "model.patch=4")
        for word in ("--set", one)
    ]
    run = tmp_path / "run"
    commands = [
        ["doctor", packed],
        ["train", packed, "--out", run, "--epochs", 1, "--size", 8, "--batch", 16, *settings],
        ["evaluate", run / "best.safetensors", packed],
    ]
    for command in commands:
        done = CliRunner().invoke(app, [str(word) for word in command])
        assert done.exit_code == 0, done.output


# ---- interruptions and changes -----------------------------------------------------------------


def test_an_interrupted_pack_resumes_and_ends_with_the_same_bytes(folder, packed, tmp_path, monkeypatch):
    real, count, out = pack.pack_image, 0, tmp_path / "again.pack"

    def interrupted(*args):
        nonlocal count
        count += 1
        if count > 40:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(pack, "pack_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack_dataset(read_data(folder), out, size=LARGE, workers=0)
    assert not out.exists()
    monkeypatch.setattr(pack, "pack_image", real)
    result = pack_dataset(read_data(folder), out, size=LARGE, workers=0)
    assert 0 < result.resumed <= 40
    assert out.read_bytes() == packed.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.pack", "images", "images.pack"]


def test_other_settings_do_not_resume_and_a_lost_partial_file_starts_anew(folder, tmp_path, monkeypatch):
    out, real = tmp_path / "o.pack", pack._finish
    monkeypatch.setattr(pack, "_finish", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack_dataset(read_data(folder), out, size=LARGE, workers=0)
    monkeypatch.setattr(pack, "_finish", real)
    (tmp_path / "o.pack.partial").write_bytes(b"")
    assert pack_dataset(read_data(folder), out, size=LARGE, workers=0).resumed == 0
    assert check_packed(read_data(folder), out).is_current


def test_a_second_writer_is_refused(folder, tmp_path):
    out = tmp_path / "o.pack"
    partial = tmp_path / "o.pack.partial"
    with locked_file(partial, out), pytest.raises(FileError, match=r"Another process is writing \S*o.pack;"):
        pack_dataset(read_data(folder), out, workers=0)


def test_changes_of_the_source_and_of_the_file_are_noticed(folder, packed):
    os.utime(folder / "ant" / "01.png")  # the same bytes
    assert check_packed(read_data(folder), packed).is_current
    Image.new("RGB", (9, 9)).save(folder / "ant" / "01.png")
    (folder / "bee" / "02.jpg").unlink()
    Image.new("RGB", (9, 9)).save(folder / "cat" / "new.png")
    (folder / "cat" / "03.png").rename(folder / "ant" / "moved.png")
    data = bytearray(packed.read_bytes())
    data[HEADER.size + 5] ^= 1
    packed.write_bytes(data)
    check = check_packed(read_data(folder), packed)
    assert check.damaged == ["ant/00.jpg"]
    assert check.changed == ["ant/01.png"]
    assert check.missing == ["bee/02.jpg", "cat/03.png"]
    assert sorted(check.new) == ["ant/moved.png", "cat/new.png"]
    done = CliRunner().invoke(app, ["pack", str(folder), str(packed), "--check"])
    assert done.exit_code == 1
    assert "pack the data again" in done.output


def test_unreadable_files_stay_unreadable_with_their_reason(folder, tmp_path):
    (folder / "bee" / "04.jpg").write_bytes(b"no image")
    result = pack_dataset(read_data(folder), tmp_path / "o.pack", workers=0)
    assert list(result.unreadable) == ["bee/04.jpg"]
    split = read_data(result.out).train
    corrupt = CorruptFiles("skip")
    pixels = pixels_of(split, corrupt=corrupt)
    assert list(corrupt.reasons) == ["bee/04.jpg"]
    assert "of a known format" in corrupt.reasons["bee/04.jpg"]
    assert (pixels[list(split.names).index("bee/04.jpg")] == 128).all()
    with pytest.raises(InputError, match=r"bee/04.jpg could not be read when it was packed.*corrupt='skip'"):
        pixels_of(split)


def test_a_full_disk_names_file_and_cause(folder, tmp_path):
    """No file may grow past 9,000 bytes, as if the disk ended there; with more space the pack resumes."""
    done = run_command(
        "pack", folder, "o.pack", "--workers", 0, "--quiet", cwd=tmp_path, limits={"RLIMIT_FSIZE": 9000}
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "There is no space left for o.pack (File too large); free some" in done.stderr
    done = run_command("pack", folder, "o.pack", "--workers", 0, "--quiet", cwd=tmp_path)
    assert done.returncode == 0
    assert check_packed(read_data(folder), tmp_path / "o.pack").is_current


# ---- hostile files -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 63, 64, 5_000, -1])
def test_a_file_that_was_cut_off_is_refused(packed, length):
    packed.write_bytes(packed.read_bytes()[:length])
    with pytest.raises(FileError, match="is not a complete packed file"):
        read_data(packed)


def forge(packed, change_rows=None, change_fields=None, change_header=None):
    """A packed file with another index, and the checksum that belongs to it."""
    data = packed.read_bytes()
    magic, version, _, offset, length = HEADER.unpack(data[: HEADER.size])
    block = data[offset : offset + length]
    size = struct.unpack_from("<Q", block)[0]
    fields, rest = json.loads(block[8 : 8 + size]), bytearray(block[8 + size :])
    rows = np.frombuffer(rest, dtype=ROW, count=len(fields["names"]))
    if change_rows:
        change_rows(rows)
    if change_fields:
        change_fields(fields)
    text = json.dumps(fields).encode()
    block = struct.pack("<Q", len(text)) + text + bytes(rest)
    header = [magic, version, zlib.crc32(block), offset, len(block)]
    if change_header:
        change_header(header)
    packed.write_bytes(HEADER.pack(*header) + data[HEADER.size : offset] + block)


def set_row(field, value):
    def change(rows):
        rows[field][3] = value

    return change


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 2**63),
        ("offset", 0),
        ("bytes", 2**64 - 1),
        ("bytes", 17),
        ("height", 2**31),
        ("height", 0),
        ("width", 0),
        ("channels", 7),
        ("split", 9),
    ],
)
def test_forged_rows_are_refused(packed, field, value):
    forge(packed, change_rows=set_row(field, value))
    with pytest.raises(FileError, match=r"index is malformed.*Pack the data again"):
        read_data(packed)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("names"),
        lambda fields: fields["names"].pop(),
        lambda fields: fields.update(names=[1] * len(fields["names"])),
        lambda fields: fields.update(classes="ant"),
        lambda fields: fields["classes"].pop(),
        lambda fields: fields.update(size=10**9),
        lambda fields: fields.update(multilabel=True),
    ],
)
def test_forged_descriptions_are_refused(packed, change):
    forge(packed, change_fields=change)
    with pytest.raises(FileError, match="index is malformed"):
        read_data(packed)


def test_other_versions_are_refused(packed):
    forge(packed, change_header=lambda header: header.__setitem__(1, 2))
    with pytest.raises(FileError, match=r"packed file of format 2.*pack the data again"):
        read_data(packed)


def test_a_file_cut_off_while_it_is_in_use_is_an_error_and_no_crash(packed):
    image = read_data(packed).train.paths[-1]
    image.load(3)
    with packed.open("r+b") as file:
        file.truncate(HEADER.size + 100)
    with pytest.raises(BrokenImage, match="was cut off"):
        image.load(3)


# ---- the cache ---------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_run_packs_its_images_into_the_cache_once(folder, cache, tmp_path):
    settings = {**SETTINGS, "epochs": 1, "cache": True}
    notes = []
    for number in range(3):
        if number == 2:
            Image.new("RGB", (30, 30)).save(folder / "ant" / "00.jpg")
        callback = RecordingCallback()
        train(folder, out=tmp_path / f"run{number}", callback=callback, **settings)
        notes.append(" ".join(callback.notes))
    assert "packed into the cache" in notes[0]
    assert "come from the cache" in notes[1]
    assert "packed into the cache" in notes[2]  # a file has changed
    weights = [(tmp_path / f"run{number}" / "last.safetensors").read_bytes() for number in (0, 1)]
    assert weights[0] == weights[1]
    assert len(list(packed_folder().iterdir())) == 2
    (packed_folder() / "mine.txt").write_text("not Vitrail's")
    assert clear_cache()[0] == 2
    assert [path.name for path in packed_folder().iterdir()] == ["mine.txt"]


def test_the_cache_is_emptied_by_a_command(cache):
    done = CliRunner().invoke(app, ["pack", "--clear-cache"])
    assert done.exit_code == 0
    assert "Deleted 0 files" in done.output


# ---- arguments ---------------------------------------------------------------------------------


def test_what_cannot_be_packed(folder, packed, tmp_path):
    def output(*words):
        done = CliRunner().invoke(app, ["pack", *map(str, words)])
        assert done.exit_code
        return str(done.exception or "") + done.output

    assert "already exists" in output(folder, packed)
    assert "an array" in output("digits", tmp_path / "d.pack")
    assert "packed already" in output(packed, tmp_path / "d.pack")
    assert "takes DATA and OUT" in output(folder)
    assert "neither DATA nor OUT" in output(folder, packed, "--clear-cache")
    assert "does not exist" in output(tmp_path / "none", tmp_path / "d.pack")
    assert not (tmp_path / "d.pack").exists()
    assert not Path(f"{tmp_path}/d.pack.partial").exists()
