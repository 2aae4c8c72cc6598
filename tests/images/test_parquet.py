"""Parquet files with image bytes: the same data set as the folder, and what is refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.tiny_runs import write_folder
from vitrail.base.errors import FileError, InputError
from vitrail.images.content import content_keys
from vitrail.images.formats.pack_shards import pack_shards
from vitrail.images.formats.sources import open_dataset, read_data
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMES = ["ant", "bee", "cat"]


def write(path, images, labels, names=None, group=4, image="image", label="label"):
    """As the library datasets writes it."""
    features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()} if names else None
    table = pa.table({image: pa.array(images, IMAGE), label: labels}).replace_schema_metadata(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)
    return path


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images", each=7)


def rows_of(folder):
    files = sorted(file for file in folder.rglob("*.*"))
    images = [{"bytes": file.read_bytes(), "path": file.relative_to(folder).as_posix()} for file in files]
    return images, [NAMES.index(file.parent.name) for file in files]


def pixels_of(split):
    reader = Reader(split, Preprocess(size=8), workers=2)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    try:
        return torch.cat([batch.images for batch in reader.batches([(0, order)])])
    finally:
        reader.close()


def test_parquet_is_the_same_data_set_as_the_folder(folder, tmp_path):
    images, labels = rows_of(folder)
    write(tmp_path / "hub" / "data" / "train-00000-of-00002.parquet", images[:10], labels[:10], NAMES)
    write(tmp_path / "hub" / "data" / "train-00001-of-00002.parquet", images[10:], labels[10:], NAMES)
    source, found = open_dataset(folder), open_dataset(tmp_path / "hub")
    assert found.classes == NAMES
    assert any("row group of up to 4 images" in note for note in found.notes)
    for name in ("train", "val"):
        one, other = getattr(source, name), getattr(found, name)
        assert list(other.names) == list(one.names)
        assert (other.labels == one.labels).all()
        assert (content_keys(other) == content_keys(one)).all()
        assert torch.equal(pixels_of(one), pixels_of(other))
    pack_shards(read_data(tmp_path / "hub"), tmp_path / "shards")
    assert (content_keys(read_data(tmp_path / "shards").train) == content_keys(read_data(folder).train)).all()


def test_splits_by_name_texts_as_labels_and_other_columns(folder, tmp_path):
    images, labels = rows_of(folder)
    texts = [NAMES[label] for label in labels]
    images[0]["path"] = None
    for name in ("train", "validation", "test"):
        write(tmp_path / "p" / f"{name}-0.parquet", images, texts, image="img", label="fine_label")
    data = read_data(tmp_path / "p")
    assert list(data.splits) == ["train", "val", "test"]
    assert data.classes == NAMES
    assert data.train.names[0] == "train-0/0"
    assert read_data(tmp_path / "p" / "test-0.parquet").classes == NAMES


def test_what_is_refused(folder, tmp_path):
    images, labels = rows_of(folder)

    def error(kind=InputError, **columns):
        pq.write_table(pa.table(columns), tmp_path / "x.parquet")
        with pytest.raises(kind) as raised:
            read_data(tmp_path / "x.parquet")
        return str(raised.value)

    column = pa.array(images, IMAGE)
    assert "no column image of {bytes, path}; found: photo, label" in error(photo=["a"], label=[1])
    assert "no column label; found: image, y" in error(image=column, y=labels)
    assert "row 3, has no label" in error(image=column, label=[1, 1, 1, None, *labels[4:]])
    assert "row 0, has the label 0.5" in error(image=column, label=[0.5] * len(labels))
    write(tmp_path / "x.parquet", images, [7] * len(labels), NAMES)
    with pytest.raises(InputError, match="numbered from 0 to 2"):
        read_data(tmp_path / "x.parquet")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(FileError, match="not a complete Parquet file"):
        read_data(tmp_path / "x.parquet")
    write(tmp_path / "val-0.parquet", images, labels)
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(InputError, match="images of val but none of train"):
        open_dataset(tmp_path)


def test_an_image_that_is_elsewhere_is_a_sentence(folder, tmp_path):
    images, labels = rows_of(folder)
    images[2]["bytes"] = None
    data = read_data(write(tmp_path / "a.parquet", images, labels, NAMES))
    with pytest.raises(InputError, match="only the path of a file that is elsewhere"):
        pixels_of(data.train)
