"""Damaged packed files and indexes of shards: flipped bytes are noticed when they are read, and named."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.support.shard_files import shard_folder
from tests.support.tiny_runs import train, write_folder
from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.images.augment.pipeline import Augment
from vitrail.images.content import content_keys
from vitrail.images.formats import packed
from vitrail.images.formats.pack_writer import pack_dataset
from vitrail.images.formats.packed import read_index
from vitrail.images.formats.shard_images import HEADER
from vitrail.images.formats.shard_index import open_index
from vitrail.images.formats.sources import read_data
from vitrail.images.limits import BrokenImage
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.preprocess import Preprocess

SPEC = Preprocess(size=8, resize="shortest", resize_to=10)
DAMAGED = ("ant/03.png", "cat/02.jpg")


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images")


def flip(file, position):
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 16]))


@pytest.fixture(params=[False, True], ids=["pixels", "jpeg"])
def damaged(folder, tmp_path, request):
    """A packed file with a flipped bit in the last byte but five of two images."""
    out = pack_dataset(read_data(folder), tmp_path / "images.pack", jpeg=request.param, workers=0).out
    index = read_index(out)
    for name in DAMAGED:
        row = index.rows[index.names.index(name)]
        flip(out, int(row["offset"] + row["bytes"]) - 6)
    return out


@pytest.mark.parametrize("augment", [None, Augment(crop=0.3)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_a_corrupt_file(damaged, augment, workers):
    split, corrupt = read_data(damaged).train, CorruptFiles("skip")
    reader = Reader(split, SPEC, augment=augment, seed=3, corrupt=corrupt, workers=workers)
    requests = [(epoch, torch.arange(len(split))) for epoch in (1, 2)]
    for batch in reader.batches(requests):
        invalid = {split.names[int(number)] for number in batch.indices[batch.valid == 0]}
        assert invalid == set(DAMAGED)
    reader.close()
    assert set(corrupt.reasons) == set(DAMAGED)
    assert all("do not have the checksum" in reason for reason in corrupt.reasons.values())
    with pytest.raises(InputError, match=r"ant/03.png is damaged.*Pack the data again.*corrupt='skip'"):
        list(Reader(split, SPEC, augment=augment, seed=3).batches(requests))


def test_training_evaluation_and_doctor_notice_it(damaged, folder, tmp_path):
    with pytest.raises(InputError, match="is damaged: its bytes do not have the checksum"):
        train(damaged, out=tmp_path / "refused", epochs=1)
    train(folder, out=tmp_path / "run", epochs=1)
    done = CliRunner().invoke(app, ["doctor", str(damaged)])
    assert done.exit_code == 1
    assert "Nothing must be repaired" not in done.output
    assert "cannot be read (2):\n  2: The image is damaged" in done.output
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run/best.safetensors"), str(damaged)])
    assert done.exit_code
    assert all(name in f"{done.exception} {done.output}" for name in DAMAGED[:1])


def test_each_image_is_checked_once_in_a_process(folder, tmp_path, monkeypatch):
    out = pack_dataset(read_data(folder), tmp_path / "images.pack", workers=0).out
    images, checked = list(read_data(out).train.paths), []
    real = packed.zlib.crc32

    class Zlib:
        @staticmethod
        def crc32(data):
            checked.append(len(data))
            return real(data)

    monkeypatch.setattr(packed, "zlib", Zlib)
    expected = {}
    for image in reversed(images):
        expected[image.image_name] = image.read_rows(3, 2)  # a part, for which all of it is read and checked
    assert checked == [image.size for image in reversed(images)]
    for image in images:
        assert (image.read_rows(3, 2) == expected[image.image_name]).all()
        assert (image.load(image.channels)[3:5] == expected[image.image_name]).all()
    assert len(checked) == len(images)


def test_a_damaged_image_stays_damaged(damaged):
    split = read_data(damaged).train
    image = split.paths[list(split.names).index(DAMAGED[0])]
    for _ in range(2):
        with pytest.raises(BrokenImage, match="checksum"):
            image.read_bytes()


# ---- the index of a shard -------------------------------------------------------------------


def contents(tars):
    split = read_data(tars).train
    data = [bytes(image.read_bytes()) for image in split.paths]
    return list(split.names), split.labels.tolist(), content_keys(split).tolist(), data


@pytest.mark.parametrize("column", ["places", "labels", "keys", "ends", "names"])
def test_a_damaged_index_is_made_again(folder, tmp_path, column):
    tars = shard_folder(folder, tmp_path / "shards")
    expected, tar = contents(tars), tars / "pets-001.tar"
    header, index = open_index(tar), tars / "pets-001.tar.index"
    intact = index.read_bytes()
    flip(index, header.starts[column] + 9)
    assert open_index(tar) is None
    assert contents(tars) == expected
    assert index.read_bytes() == intact


def test_an_index_without_a_hash_of_places_is_still_used(folder, tmp_path):
    tars = shard_folder(folder, tmp_path / "shards")
    expected, index = contents(tars), tars / "pets-001.tar.index"
    data = bytearray(index.read_bytes())
    data[HEADER.size - 8 : HEADER.size] = bytes(8)  # as before Vitrail wrote it
    index.write_bytes(data)
    assert open_index(tars / "pets-001.tar").places_digest == bytes(8)
    assert contents(tars) == expected
    assert index.read_bytes() == bytes(data)


def test_an_intact_index_is_used(folder, tmp_path):
    tars = shard_folder(folder, tmp_path / "shards")
    contents(tars)
    for tar in tars.glob("*.tar"):
        header = open_index(tar)
        assert header is not None
        assert np.asarray(header.read("labels", 0, header.count)).size == header.count
