"""One way to open a picture: by content, by the header first, and nothing but a picture decoder."""

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

from vitrail.data.decode import FORMATS, BrokenImage, DecodeLimits, ImageTooLarge, NotAnImage, open_picture
from vitrail.errors import InputError


def noise(*shape):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8))


def png_header(wide, high, data=b""):
    """A PNG that says how large it is, and little more."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", wide, high, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_content_decides_and_not_the_name(kind, tmp_path):
    image = noise(10, 12, 3)
    image.save(tmp_path / "photo.txt", kind, **({"lossless": True} if kind == "WEBP" else {}))
    found = open_picture(tmp_path / "photo.txt")
    assert found.size == (12, 10)
    if kind in ("PNG", "BMP", "TIFF", "WEBP"):
        assert (np.asarray(found.convert("RGB")) == np.asarray(image)).all()


def test_the_first_frame_of_several(tmp_path):
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (10, 200)]
    for kind in ("GIF", "TIFF", "WEBP"):
        frames[0].save(tmp_path / "film", kind, save_all=True, append_images=frames[1:])
        assert np.asarray(open_picture(tmp_path / "film").convert("RGB"))[..., 0].mean() < 60


OTHERS = {
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n/x 1 def\n",  # Pillow would start gs
    "ppm": b"P6 2 2 255\n" + bytes(12),
    "ico": b"\0\0\1\0\1\0" + bytes(100),
    "text": b"hello",
    "nothing": b"",
    "html": b"<html><body>404</body></html>",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_no_other_formats(kind, tmp_path):
    """PPM is one that Pillow itself reads, so the list of formats is what keeps it out."""
    (tmp_path / "photo.jpg").write_bytes(OTHERS[kind])
    if kind in ("eps", "ppm"):
        assert Image.open(io.BytesIO(OTHERS[kind])).format == kind.upper()
    with pytest.raises(NotAnImage, match=r"photo.jpg is not an image of a known format.* JPEG, PNG"):
        open_picture(tmp_path / "photo.jpg")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_a_picture_that_is_cut_off(kind, tmp_path):
    noise(40, 40, 3).save(tmp_path / "whole", kind)
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "half").write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenImage, match=r"half is broken"):
        open_picture(tmp_path / "half")


@pytest.mark.parametrize("size", [(50_001, 1_000), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_bombs_by_the_header(size, tmp_path, monkeypatch):
    """Before a byte of the data is looked at: the decoder is not even called."""
    (tmp_path / "bomb.png").write_bytes(png_header(*size))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: pytest.fail("it was decoded"))
    start = time.perf_counter()
    with pytest.raises(ImageTooLarge, match=r"bomb.png has .*(50 megapixels|far too many)"):
        open_picture(tmp_path / "bomb.png")
    assert time.perf_counter() - start < 0.5


def test_as_large_as_allowed_is_allowed(tmp_path):
    limits = DecodeLimits(pixels=120)
    noise(10, 12).save(tmp_path / "just.png")
    assert open_picture(tmp_path / "just.png", limits=limits).size == (12, 10)
    noise(11, 11).save(tmp_path / "over.png")
    with pytest.raises(ImageTooLarge, match="megapixels"):
        open_picture(tmp_path / "over.png", limits=limits)
    assert DecodeLimits().pixels == 50_000_000


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    start = time.perf_counter()
    with pytest.raises(InputError, match=r"pipe.png is a pipe or a device"):
        open_picture(tmp_path / "pipe.png")
    with pytest.raises(InputError, match=r"is a folder; name a file"):
        open_picture(tmp_path)
    with pytest.raises(InputError, match=r"a pipe or a device"):
        open_picture("/dev/zero")
    with pytest.raises(FileNotFoundError):
        open_picture(tmp_path / "nowhere.png")
    assert time.perf_counter() - start < 1


def test_files_are_closed(tmp_path):
    noise(8, 8).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no")
    count = len(os.listdir("/proc/self/fd"))
    kept = [open_picture(tmp_path / "a.png") for _ in range(20)]
    for name in ["b.png", "."] * 5:
        with pytest.raises(InputError):
            open_picture(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == count
    assert len(kept) == 20


def test_decoded_smaller_only_when_asked(tmp_path):
    """Judging must see the pixels themselves; training may see half of them."""
    noise(400, 300, 3).save(tmp_path / "a.jpg", quality=95)
    noise(400, 300, 3).save(tmp_path / "a.png")
    assert open_picture(tmp_path / "a.jpg").size == (300, 400)
    assert open_picture(tmp_path / "a.jpg", near=(100, 75)).size == (75, 100)
    assert open_picture(tmp_path / "a.jpg", near=(150, 75)).size == (150, 200)  # never smaller than asked for
    assert open_picture(tmp_path / "a.jpg", near=(201, 10)).size == (300, 400)
    assert open_picture(tmp_path / "a.png", near=(10, 10)).size == (300, 400)
    whole, plain = open_picture(tmp_path / "a.jpg"), Image.open(tmp_path / "a.jpg")
    assert (np.asarray(whole) == np.asarray(plain)).all()


def test_warnings_are_as_they_were_whatever_threads_did(tmp_path):
    """Python has one list of filters for all threads; each putting back what it found would lose it."""
    noise(64, 64, 3).save(tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        threads = [
            threading.Thread(target=lambda: [open_picture(tmp_path / "a.png") for _ in range(30)])
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
    """Odd metadata: Pillow warns, and the picture is there."""
    noise(8, 8, 3).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + b"II*\0\x08\0\0\0" + b"\xff\xff" + b"\1" * 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_picture(tmp_path / "a.jpg").size == (8, 8)
