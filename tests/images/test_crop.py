"""Random resized crops: the distribution of torchvision, one law for one image and for tensors, and files."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop

from vitrail.images import crop as crops
from vitrail.images.crop import CROP_NUMBERS, TRIES, place_crop, place_one_crop, propose_crops, read_crop
from vitrail.images.decode import open_image
from vitrail.images.pixels import apply_orientation
from vitrail.images.preprocess import Preprocess

RATIO = 4 / 3
SIDEWAYS = 6  # the EXIF orientation of an image whose height and width are exchanged


def sample(count, height, width, min_area=0.08, max_ratio=RATIO, seed=0):
    numbers = torch.rand(count, CROP_NUMBERS, generator=torch.Generator().manual_seed(seed))
    return place_crop(propose_crops(numbers, min_area, max_ratio), height, width, max_ratio)


# ---- the distribution -----------------------------------------------------------------------


@pytest.mark.parametrize("min_area", [0.08, 0.5])
@pytest.mark.parametrize(("height", "width"), [(375, 500), (90, 90), (400, 150), (100, 600)])
def test_areas_ratios_and_positions_have_the_distribution_of_torchvision(height, width, min_area):
    count = 4000
    torch.manual_seed(1)
    image = torch.zeros(3, height, width)
    params = [RandomResizedCrop.get_params(image, (min_area, 1.0), (1 / RATIO, RATIO)) for _ in range(count)]
    ours, theirs = sample(count, height, width, min_area).double(), torch.tensor(params).double()
    for name, value in {
        "area": lambda box: box[:, 2] * box[:, 3],
        "ratio": lambda box: box[:, 3] / box[:, 2],
        "top": lambda box: box[:, 0],
        "left": lambda box: box[:, 1],
        "position": lambda box: box[:, 0] / (height - box[:, 2] + 1) - box[:, 1] / (width - box[:, 3] + 1),
    }.items():
        assert ks_2samp(value(ours), value(theirs), method="asymp").pvalue > 1e-3, name


def test_boxes_lie_inside_the_image_and_within_the_limits():
    boxes = sample(20_000, 300, 400, 0.2, 1.5).double()
    top, left, h, w = boxes.unbind(1)
    assert min(top.min(), left.min()) >= 0
    assert (top + h).max() <= 300
    assert (left + w).max() <= 400
    assert (h * w).min() > 0.2 * 300 * 400 * 0.98  # sides are rounded
    assert (w / h).log().abs().max() < math.log(1.5) + 0.02
    assert (w / h).log().abs().max() > 0.98 * math.log(1.5)


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (10, 1000, [0, 493, 10, 13]),
        (1000, 10, [493, 0, 13, 10]),
        (1, 1, [0, 0, 1, 1]),
        (30, 32, [0, 0, 30, 32]),
    ],
)
def test_without_a_try_that_fits_the_crop_is_central(height, width, box):
    """All tries are larger than the image, or it is so elongated that none fits."""
    proposals = torch.full((3, TRIES + 1, 2), 50.0, dtype=torch.float64)
    assert place_crop(proposals, height, width, RATIO).tolist() == [box] * 3
    theirs = RandomResizedCrop.get_params(torch.zeros(1, height, width), (1.5, 1.5), (1 / RATIO, RATIO))
    assert list(theirs) == box


def test_the_first_try_that_fits_is_taken():
    numbers = torch.full((CROP_NUMBERS,), 0.5)
    proposals = propose_crops(numbers, 0.1, RATIO)
    proposals[:3] = 9.0  # of the image's sides
    proposals[3] = torch.tensor([0.25, 0.5])
    assert place_crop(proposals, 100, 100, RATIO).tolist() == [38, 25, 25, 50]


def test_one_image_gets_the_same_box_as_a_batch():
    numbers = torch.rand(200, CROP_NUMBERS)
    proposals = propose_crops(numbers, 0.05, RATIO)
    batch = place_crop(proposals, 333, 257, RATIO)
    for i in range(200):
        assert torch.equal(place_crop(propose_crops(numbers[i], 0.05, RATIO), 333, 257, RATIO), batch[i])
    for part in torch.arange(200).split(7):
        assert torch.equal(
            place_crop(propose_crops(numbers[part], 0.05, RATIO), 333, 257, RATIO), batch[part]
        )


# ---- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(375, 500), (1, 1), (3, 900), (900, 3), (224, 224)])
def test_one_crop_is_placed_as_many_are(size):
    numbers = torch.rand(500, CROP_NUMBERS, generator=torch.Generator().manual_seed(0))
    proposals = propose_crops(numbers, 0.08, RATIO)
    boxes = [place_one_crop(one, *size, RATIO) for one in proposals.tolist()]
    assert boxes == [tuple(box) for box in place_crop(proposals, *size, RATIO).tolist()]


def smooth(height, width, channels=3):
    """Waves, so that parts of the image differ, and a small copy looks like the large one."""
    down, across = np.mgrid[:height, :width]
    waves = [np.sin(down / height * (3 + c)) + np.cos(across / width * (5 - c)) for c in range(channels)]
    return Image.fromarray((127 + 60 * np.stack(waves, -1)).astype(np.uint8))


def save(path, image, orientation=None):
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    image.save(path, quality=95, **({"exif": exif} if orientation else {}))
    return path


def proposals_of(area, ratio, down, across, min_area):
    """Tries that are all the same, from four random numbers."""
    numbers = torch.tensor([area] * TRIES + [ratio] * TRIES + [down, across])
    return propose_crops(numbers, min_area, RATIO)


NUMBERS = [[0.0, 0.5, 0.2, 0.9], [1.0, 0.5, 0.5, 0.5], [0.4, 0.1, 0.0, 0.99], [0.3, 0.9, 0.99, 0.01]]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("orientation", [None, SIDEWAYS])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_a_crop_of_a_file_is_its_box_resized(numbers, orientation, interpolation, tmp_path):
    """Also of a JPEG that is decoded at a smaller size: up to less than a pixel, and rounding."""
    path, proposals = save(tmp_path / "a.jpg", smooth(600, 900), orientation), proposals_of(*numbers, 0.1)
    pixels = read_crop(
        path, Preprocess(size=(32, 48), interpolation=interpolation), proposals.tolist(), RATIO
    )
    image = apply_orientation(Image.open(path), 3)
    top, left, h, w = place_crop(proposals, image.height, image.width, RATIO).tolist()
    filter = Image.Resampling[interpolation.upper()]
    expected = np.asarray(image.resize((48, 32), filter, box=(left, top, left + w, top + h))).astype(int)
    assert pixels.shape == (32, 48, 3)
    assert np.abs(pixels - expected).max() <= 6
    elsewhere = np.asarray(image.resize((48, 32), filter)).astype(int)
    assert numbers[0] == 1.0 or np.abs(elsewhere - expected).max() > 20  # another box would be noticed


@pytest.mark.parametrize("size", [(1200, 1600), (700, 500), (60, 50)])
def test_a_jpeg_is_decoded_as_small_as_the_crop_allows(size, tmp_path, monkeypatch):
    path, decoded = save(tmp_path / "a.jpg", smooth(*size)), []

    def watched(path, min_size):
        decoded.append(open_image(path, min_size))
        return decoded[-1]

    monkeypatch.setattr(crops, "open_image", watched)
    for numbers in torch.rand(60, CROP_NUMBERS, generator=torch.Generator().manual_seed(0)):
        proposals = propose_crops(numbers, 0.05, RATIO)
        read_crop(path, Preprocess(size=64), proposals.tolist(), RATIO)
        height, width = decoded[-1].size[::-1]
        _, _, h, w = place_crop(proposals, *size, RATIO).tolist()
        assert min(h * height / size[0], w * width / size[1]) >= 63.5 or (height, width) == size
        possible = [step for step in (2, 4, 8) if min(h, w) // step >= 66]
        assert height <= -(-size[0] // max(possible, default=1))
    assert (len({image.size for image in decoded}) > 1) == (size != (60, 50))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (9, 7)])
def test_small_images_and_other_channels(channels, size, tmp_path):
    smooth(*size).save(tmp_path / "a.png")
    preprocess = Preprocess(size=16, mean=(0.5,) * channels, std=(0.5,) * channels)
    for numbers in NUMBERS:
        pixels = read_crop(tmp_path / "a.png", preprocess, proposals_of(*numbers, 0.05).tolist(), RATIO)
        assert pixels.shape == (16, 16, channels)
        assert pixels.min() >= int(np.asarray(smooth(*size)).min()) - 20  # no black from beyond the border


@pytest.mark.parametrize("box", [(0, 0, 1, 1), (8, 6, 1, 1), (0, 0, 9, 7), (8, 0, 1, 7), (3, 2, 4, 4)])
@pytest.mark.parametrize("new", [(9, 7), (5, 4), (3, 2), (2, 1)])
def test_a_box_in_a_smaller_copy_lies_inside_it(box, new):
    top, left, h, w = crops._scale_box(box, (9, 7), new)
    assert min(h, w) >= 1
    assert 0 <= top <= top + h <= new[0]
    assert 0 <= left <= left + w <= new[1]
