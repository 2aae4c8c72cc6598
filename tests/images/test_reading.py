"""From an image file to pixels: quickly for training, and to the bit for evaluation."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.images.augment.pipeline import Augment
from vitrail.images.decode import open_image
from vitrail.images.formats.sources import Split
from vitrail.images.loader import Reader
from vitrail.images.pixels import apply_orientation
from vitrail.images.preprocess import Preprocess

SIDEWAYS = 6  # the EXIF orientation of an image whose height and width are exchanged


def smooth(height, width):
    """Waves, so that a small copy looks like the large image."""
    down, across = np.mgrid[:height, :width]
    waves = [np.sin(down / height * (3 + c)) + np.cos(across / width * (5 - c)) for c in range(3)]
    return Image.fromarray((127 + 60 * np.stack(waves, -1)).astype(np.uint8))


def save(path, image, orientation=None):
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    image.save(path, quality=95, **({"exif": exif} if orientation else {}))
    return path


def reader_of(path, spec, **more):
    return Reader(Split(np.zeros(1, np.int64), [path.name], [path]), spec, **more)


def read_one(reader):
    return next(reader.batches(iter([(0, torch.tensor([0]))]))).images[0].permute(1, 2, 0).numpy()


# ---- evaluation -----------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_evaluation_sees_the_pixels_of_pillow(interpolation, tmp_path):
    """Also of a JPEG that training would decode at an eighth of its size."""
    path = save(tmp_path / "a.jpg", smooth(600, 800))
    spec = Preprocess(size=28, resize="shortest", resize_to=32, interpolation=interpolation)
    filter = Image.Resampling[interpolation.upper()]
    by_hand = Image.open(path).convert("RGB").resize((42, 32), filter)
    assert (read_one(reader_of(path, spec)) == np.asarray(by_hand.crop((7, 2, 35, 30)))).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "CMYK"])
@pytest.mark.parametrize("orientation", [None, SIDEWAYS])
def test_an_image_is_not_changed_and_copied_only_if_needed(mode, orientation):
    image = smooth(20, 30).convert(mode)
    if orientation:
        image.getexif()[0x0112] = orientation
    before = image.tobytes()
    found = apply_orientation(image, 3)
    assert (found is image) == (mode == "RGB" and orientation is None)
    assert (found.mode, found.size) == ("RGB", (20, 30) if orientation else (30, 20))
    pixels = Preprocess(size=8, interpolation="bicubic").pixels(image)
    assert (pixels == np.asarray(found.resize((8, 8), Image.Resampling.BICUBIC))).all()
    assert pixels.flags.writeable
    assert (image.tobytes(), image.mode, image.size) == (before, mode, (30, 20))


# ---- training -------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", [None, SIDEWAYS])
def test_min_size_gets_the_size_of_the_upright_image(orientation, tmp_path):
    path, calls = save(tmp_path / "a.jpg", smooth(400, 600), orientation), []

    def min_size(height, width):
        calls.append((height, width))
        return 200, 151 if orientation else 200

    found = apply_orientation(open_image(path, min_size), 3)
    assert calls == [(600, 400) if orientation else (400, 600)]
    assert found.size[::-1] == ((300, 200) if orientation else (200, 300))
    given = apply_orientation(open_image(path, (50, 100) if orientation else (100, 50)), 3)
    assert given.size[::-1] == ((150, 100) if orientation else (100, 150))


def test_without_a_crop_a_large_jpeg_is_decoded_smaller_too(tmp_path):
    path, spec = save(tmp_path / "a.jpg", smooth(600, 800)), Preprocess(size=32)
    exact, fast = read_one(reader_of(path, spec)), read_one(reader_of(path, spec, augment=Augment()))
    assert 0 < np.abs(exact.astype(int) - fast).max() <= 6
