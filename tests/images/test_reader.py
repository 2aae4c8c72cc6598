"""Reading images in order: without labels, ahead of use, and the same crops for files and arrays."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.images.augment.pipeline import Augment, augment_batch, crop_numbers
from vitrail.images.crop import place_crop, propose_crops
from vitrail.images.decode import read_pixels
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import take_ahead


def coordinates(size=200):
    """An image whose red and green values are the row and the column."""
    rows, columns = np.mgrid[:size, :size]
    return np.stack([rows, columns, 0 * rows], -1).astype(np.uint8)


@pytest.fixture
def files(tmp_path):
    """Images without labels, one of them broken."""
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    for i, path in enumerate(paths):
        Image.new("RGB", (12, 9), (i, 10 * i, 0)).save(path)
    paths[3].write_bytes(b"no image")
    return SimpleNamespace(names=[path.name for path in paths], paths=paths, images=None)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_without_labels_are_read_in_order(files, workers):
    corrupt = CorruptFiles("skip")
    reader = Reader(files, Preprocess(size=8), workers=workers, corrupt=corrupt)
    order = torch.tensor([4, 3, 0, 4])
    (batch,) = reader.batches([(0, order)])
    reader.close()
    assert batch.images[:, 0, 0, 0].tolist() == [4, 128, 0, 4]
    assert batch.valid.tolist() == [1, 0, 1, 1]
    assert list(corrupt.reasons) == ["3.png"]


def test_pixels_of_a_path_an_image_and_an_array_are_the_same(files):
    preprocess, image = Preprocess(size=8), Image.open(files.paths[2])
    path, pil, array = (
        read_pixels(source, preprocess) for source in (files.paths[2], image, np.asarray(image))
    )
    assert (path == pil).all()
    assert (path == array).all()


def test_results_come_in_order_and_are_taken_before_they_are_needed():
    taken = []

    def slow_first(i):
        time.sleep(0.05 if i == 0 else 0)
        return i

    with ThreadPoolExecutor(4) as pool:
        ahead = take_ahead((taken.append(i) or pool.submit(slow_first, i) for i in range(6)), 2)
        assert next(ahead) == 0
        assert taken == [0, 1, 2]
        assert list(ahead) == [1, 2, 3, 4, 5]
        assert list(take_ahead([], 2)) == []


def test_files_and_arrays_get_the_same_crops(tmp_path):
    """The box of a sample is a function of (seed, epoch, index) and the size of the image alone."""
    image, indices, augment = coordinates(), torch.arange(6), Augment(crop=0.2)
    Image.fromarray(image).save(tmp_path / "a.png")
    source = SimpleNamespace(names=["a"] * 6, paths=[tmp_path / "a.png"] * 6, images=None)
    preprocess = Preprocess(size=32)
    (batch,) = Reader(source, preprocess, augment=augment, seed=3).batches([(2, indices)])
    arrays = torch.from_numpy(image).permute(2, 0, 1).expand(6, -1, -1, -1)
    augmented = augment_batch(arrays, indices, augment, seed=3, epoch=2, size=(32, 32)) * 255
    proposals = propose_crops(crop_numbers(3, 2, indices), 0.2, augment.crop_ratio)
    boxes = place_crop(proposals, 200, 200, augment.crop_ratio)
    for images in (batch.images.float(), augmented):
        centers = images[:, :2].mean((2, 3))  # the mean row and column of each crop
        expected = boxes[:, :2] + boxes[:, 2:] / 2 - 0.5
        assert torch.allclose(centers, expected.float(), atol=1.5)
