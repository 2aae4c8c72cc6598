"""Opening images: by content, with the header checked first, and nothing but an image decoder."""

import io
import os
import struct
import threading
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from vitrail.base.errors import InputError
from vitrail.images.decode import open_image
from vitrail.images.headers import FORMATS
from vitrail.images.limits import BrokenImage, DecodeLimits, ImageTooLarge, NotAnImage


def noise(*shape):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8))


def png_header(width, height, data=b""):
    """A PNG with a header and little data."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_the_content_decides_the_format(kind, tmp_path):
    image = noise(10, 12, 3)
    image.save(tmp_path / "photo.txt", kind, **({"lossless": True} if kind == "WEBP" else {}))
    found = open_image(tmp_path / "photo.txt")
    assert found.size == (12, 10)
    if kind in ("PNG", "BMP", "TIFF", "WEBP"):
        assert (np.asarray(found.convert("RGB")) == np.asarray(image)).all()


def test_the_first_frame_of_several(tmp_path):
    frames = [Image.new("RGB", (8, 8), (red, 0, 0)) for red in (10, 200)]
    for kind in ("GIF", "TIFF", "WEBP"):
        frames[0].save(tmp_path / "film", kind, save_all=True, append_images=frames[1:])
        assert np.asarray(open_image(tmp_path / "film").convert("RGB"))[..., 0].mean() < 60


OTHERS = {
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n/x 1 def\n",  # Pillow would start gs
    "ppm": b"P6 2 2 255\n" + bytes(12),
    "ico": b"\0\0\1\0\1\0" + bytes(100),
    "text": b"hello",
    "nothing": b"",
    "html": b"<html><body>404</body></html>",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_are_refused(kind, tmp_path):
    """Pillow reads PPM, so only the list of formats excludes it."""
    (tmp_path / "photo.jpg").write_bytes(OTHERS[kind])
    if kind in ("eps", "ppm"):
        assert Image.open(io.BytesIO(OTHERS[kind])).format == kind.upper()
    with pytest.raises(NotAnImage, match=r"photo.jpg is not an image of a known format.* JPEG, PNG"):
        open_image(tmp_path / "photo.jpg")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_a_truncated_image(kind, tmp_path):
    noise(40, 40, 3).save(tmp_path / "complete", kind)
    data = (tmp_path / "complete").read_bytes()
    (tmp_path / "half").write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenImage, match=r"half is broken"):
        open_image(tmp_path / "half")


@pytest.mark.parametrize("size", [(50_001, 1_000), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_refused_by_the_header(size, tmp_path, monkeypatch):
    """The decoder is not even called."""
    (tmp_path / "bomb.png").write_bytes(png_header(*size))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: pytest.fail("it was decoded"))
    start = time.perf_counter()
    with pytest.raises(ImageTooLarge, match=r"bomb.png has .*(50 megapixels|far too many)"):
        open_image(tmp_path / "bomb.png")
    assert time.perf_counter() - start < 0.5


def test_the_limit_itself_is_allowed(tmp_path):
    limits = DecodeLimits(pixels=120)
    noise(10, 12).save(tmp_path / "just.png")
    assert open_image(tmp_path / "just.png", limits=limits).size == (12, 10)
    noise(11, 11).save(tmp_path / "over.png")
    with pytest.raises(ImageTooLarge, match="megapixels"):
        open_image(tmp_path / "over.png", limits=limits)
    assert DecodeLimits().pixels == 50_000_000


def test_pipes_devices_and_folders(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    start = time.perf_counter()
    with pytest.raises(InputError, match=r"pipe.png is a pipe or a device"):
        open_image(tmp_path / "pipe.png")
    with pytest.raises(InputError, match=r"is a folder, and an image must be a regular file"):
        open_image(tmp_path)
    with pytest.raises(InputError, match=r"a pipe or a device"):
        open_image("/dev/zero")
    with pytest.raises(FileNotFoundError):
        open_image(tmp_path / "nowhere.png")
    assert time.perf_counter() - start < 1


def test_files_are_closed(tmp_path):
    noise(8, 8).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no")
    count = len(os.listdir("/proc/self/fd"))
    kept = [open_image(tmp_path / "a.png") for _ in range(20)]
    for name in ["b.png", "."] * 5:
        with pytest.raises(InputError):
            open_image(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == count
    assert len(kept) == 20


def test_a_jpeg_is_decoded_smaller_only_on_request(tmp_path):
    """Evaluation needs the exact pixels; for training, fewer will do."""
    noise(400, 300, 3).save(tmp_path / "a.jpg", quality=95)
    noise(400, 300, 3).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.jpg").size == (300, 400)
    assert open_image(tmp_path / "a.jpg", min_size=(100, 75)).size == (75, 100)
    assert open_image(tmp_path / "a.jpg", min_size=(150, 75)).size == (150, 200)  # never smaller than that
    assert open_image(tmp_path / "a.jpg", min_size=(201, 10)).size == (300, 400)
    assert open_image(tmp_path / "a.png", min_size=(10, 10)).size == (300, 400)
    ours, plain = open_image(tmp_path / "a.jpg"), Image.open(tmp_path / "a.jpg")
    assert (np.asarray(ours) == np.asarray(plain)).all()


def test_warning_filters_are_restored_with_threads(tmp_path):
    """Python has one list of filters for all threads."""
    noise(64, 64, 3).save(tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        threads = [
            threading.Thread(target=lambda: [open_image(tmp_path / "a.png") for _ in range(30)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert warnings.filters == before
        with pytest.raises(UserWarning):
            warnings.warn("heard", stacklevel=1)


def test_pillows_warnings_are_not_errors(tmp_path):
    """Pillow warns of odd metadata, and decodes the image."""
    noise(8, 8, 3).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + b"II*\0\x08\0\0\0" + b"\xff\xff" + b"\1" * 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(tmp_path / "a.jpg").size == (8, 8)
