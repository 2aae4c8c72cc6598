"""How a picture file becomes pixels: quickly for training, and to the bit for judging."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import loader
from vitrail.data.augment import Augment
from vitrail.data.chance import uniform
from vitrail.data.decode import open_picture
from vitrail.data.loader import Reader, draw_box, read_part
from vitrail.data.sources import Split
from vitrail.preprocess import Preprocess, upright

TURNED = 6  # EXIF: lies on its side; upright, height and width have changed places


def smooth(high, wide, channels=3):
    """Waves, so that a place can be told from its neighbours and a small copy looks like a large one."""
    down, across = np.mgrid[:high, :wide]
    waves = [np.sin(down / high * (3 + c)) + np.cos(across / wide * (5 - c)) for c in range(channels)]
    levels = (127 + 60 * np.stack(waves, -1)).astype(np.uint8)
    return Image.fromarray(levels if channels > 1 else levels[..., 0])


def saved(path, image, orientation=None):
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    image.save(path, quality=95, **({"exif": exif} if orientation else {}))
    return path


def reader_of(path, spec, **more):
    return Reader(Split(np.zeros(1, np.int64), [path.name], [path]), spec, **more)


def one(reader):
    return next(reader.batches(iter([(0, torch.tensor([0]))]))).images[0].permute(1, 2, 0).numpy()


# ---- judging --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["bilinear", "bicubic", "lanczos"])
def test_judging_sees_what_pillow_by_hand_would(how, tmp_path):
    """Of a JPEG that training would decode at an eighth."""
    path = saved(tmp_path / "a.jpg", smooth(600, 800))
    spec = Preprocess(size=28, resize="shortest", resize_to=32, interpolation=how)
    by_hand = Image.open(path).convert("RGB").resize((42, 32), Image.Resampling[how.upper()])
    assert (one(reader_of(path, spec)) == np.asarray(by_hand.crop((7, 2, 35, 30)))).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "CMYK"])
@pytest.mark.parametrize("orientation", [None, TURNED])
def test_a_picture_is_not_changed_and_not_copied_in_vain(mode, orientation):
    image = smooth(20, 30).convert(mode)
    if orientation:
        image.getexif()[0x0112] = orientation
    before = image.tobytes()
    found = upright(image, 3)
    assert (found is image) == (mode == "RGB" and orientation is None)
    assert (found.mode, found.size) == ("RGB", (20, 30) if orientation else (30, 20))
    pixels = Preprocess(size=8, interpolation="bicubic").pixels(image)
    assert (pixels == np.asarray(found.resize((8, 8), Image.Resampling.BICUBIC))).all()
    assert pixels.flags.writeable
    assert (image.tobytes(), image.mode, image.size) == (before, mode, (30, 20))


# ---- training -------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", [None, TURNED])
def test_near_is_asked_for_the_picture_as_it_stands_upright(orientation, tmp_path):
    path, asked = saved(tmp_path / "a.jpg", smooth(400, 600), orientation), []

    def near(high, wide):
        asked.append((high, wide))
        return 200, 151 if orientation else 200

    found = upright(open_picture(path, near), 3)
    assert asked == [(600, 400) if orientation else (400, 600)]
    assert found.size[::-1] == ((300, 200) if orientation else (200, 300))
    given = upright(open_picture(path, (50, 100) if orientation else (100, 50)), 3)
    assert given.size[::-1] == ((150, 100) if orientation else (100, 150))


CHANCE = [[0.0, 0.5, 0.2, 0.9], [1.0, 0.5, 0.5, 0.5], [0.6, 0.1, 0.0, 1.0], [0.3, 0.9, 0.99, 0.01]]


@pytest.mark.parametrize("chance", CHANCE)
@pytest.mark.parametrize("orientation", [None, TURNED])
@pytest.mark.parametrize("how", ["bilinear", "bicubic", "lanczos"])
def test_a_part_is_the_part_that_was_drawn(chance, orientation, how, tmp_path):
    """Of a JPEG decoded smaller, as of the whole: but for less than a pixel, and for rounding."""
    path, augment = saved(tmp_path / "a.jpg", smooth(600, 900), orientation), Augment(crop=0.1)
    spec = Preprocess(size=(32, 48), interpolation=how)
    part = read_part(path, spec, augment, chance)
    whole = upright(Image.open(path), 3)
    top, left, h, w = draw_box(whole.height, whole.width, augment, chance)
    box = (left, top, left + w, top + h)
    wanted = np.asarray(whole.resize((48, 32), Image.Resampling[how.upper()], box=box)).astype(int)
    assert part.shape == (32, 48, 3)
    assert np.abs(part - wanted).max() <= 6
    elsewhere = np.asarray(whole.resize((48, 32), Image.Resampling[how.upper()])).astype(int)
    assert chance[0] == 1.0 or np.abs(elsewhere - wanted).max() > 20  # the test would see another part


@pytest.mark.parametrize("size", [(1200, 1600), (700, 500), (60, 50)])
def test_a_part_is_decoded_no_smaller_than_it_is_to_be(size, tmp_path, monkeypatch):
    path, augment, seen = saved(tmp_path / "a.jpg", smooth(*size)), Augment(crop=0.05), []

    def watched(path, near):
        seen.append(open_picture(path, near))
        return seen[-1]

    monkeypatch.setattr(loader, "open_picture", watched)
    for chance in uniform([torch.arange(60)], 4).tolist():
        read_part(path, Preprocess(size=64), augment, chance)
        high, wide = seen[-1].size[::-1]
        _, _, h, w = draw_box(high, wide, augment, chance)
        assert min(h, w) >= 63 or (high, wide) == size  # a JPEG at a half has its sides rounded up
        _, _, h, w = draw_box(*size, augment, chance)
        larger = [step for step in (2, 4, 8) if min(h, w) // step >= 66]
        assert high <= -(-size[0] // max(larger, default=1))  # and no larger than that
    assert len({image.size for image in seen}) == (1 if size == (60, 50) else 2)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (9, 7)])
def test_small_pictures_and_other_channels(channels, size, tmp_path):
    smooth(*size).save(tmp_path / "a.png")
    spec = Preprocess(size=16, mean=(0.5,) * channels, std=(0.5,) * channels)
    for chance in CHANCE:
        part = read_part(tmp_path / "a.png", spec, Augment(crop=0.05), chance)
        assert part.shape == (16, 16, channels)
        assert part.min() >= int(np.asarray(smooth(*size)).min()) - 20  # nothing from beyond the border


def test_without_crops_a_large_picture_is_decoded_smaller_too(tmp_path):
    path, spec = saved(tmp_path / "a.jpg", smooth(600, 800)), Preprocess(size=32)
    judged, trained = one(reader_of(path, spec)), one(reader_of(path, spec, augment=Augment()))
    assert 0 < np.abs(judged.astype(int) - trained).max() <= 6
