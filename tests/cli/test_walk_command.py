"""`vitrail walk`: what it shows and writes, and how it refuses."""

import json
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from conftest import shake
from vitrail.cli.walk import as_json, read_picture, short
from vitrail.walkthrough import Stage, walk


def vitrail_command(*arguments, cwd, **environment):
    """Run the command as a user would, in a terminal 80 columns wide without colour."""
    return subprocess.run(
        [sys.executable, "-m", "vitrail", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def painted(width=60, height=40):
    """A picture with a different colour everywhere."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([columns * 4, rows * 6, rows + columns], axis=-1).astype(np.uint8))


NAME = "<b>[red]cat & 'dog'.png"  # markup for a page and for rich


def squash(config):
    """How a picture is brought to a size: as `vitrail walk` does for models without a file."""
    half = (0.5,) * config.channels
    return vt.Preprocess(size=config.pixels, interpolation="bicubic", mean=half, std=half)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    painted().save(folder / NAME)
    arguments = ["walk", "mu/8", NAME, "--token", "3", "--head", "1", "--json", "w.json", "--html", "w.html"]
    return folder, vitrail_command(*arguments, cwd=folder)


def test_the_terminal_shows_every_stage_in_80_columns(walked):
    _, done = walked
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    said = " ".join(done.stdout.split())
    assert f"{NAME} through mu/8" in said
    assert "Random weights (seed 0), nothing learned" in said
    assert "block 0, head 1, patch 2 (row 0, column 2)" in said
    model = vt.create("mu/8")
    for stage in walk(model, torch.zeros(3, 32, 32), token=3, head=1):
        assert stage.name in said
        assert " x ".join(map(str, stage.shape)) in said
    for text in ("q = LN(z_0) U_q + b_q", "S = q k^T / sqrt(d)", "A = softmax(S)", "y = LN(z_1)^0"):
        assert text in said
    assert "the class token 0.0" in said
    assert re.search(r"^ .*@@.*$", done.stdout, re.MULTILINE)  # the map of where the token looks


def test_the_json_holds_the_stages_of_the_walk(walked):
    folder, _ = walked

    def refuse(word):
        raise AssertionError(word)

    told = json.loads((folder / "w.json").read_text(), parse_constant=refuse)
    assert told["picture"] == NAME
    assert "Random" in told["weights"]
    torch.manual_seed(0)
    model = vt.create("mu/8")
    stages = walk(model, read_picture(folder / NAME, squash(model.config)), token=3, head=1)
    assert [entry["name"] for entry in told["stages"]] == [stage.name for stage in stages]
    for entry, stage in zip(told["stages"], stages, strict=True):
        assert entry["equation"] == stage.equation
        assert entry["meaning"] == stage.meaning
        assert tuple(entry["shape"]) == stage.shape
        assert entry["summary"]["max"] == pytest.approx(stage.tensor.max().item(), rel=1e-5, abs=1e-6)
        assert ("values" in entry) == (stage.tensor.numel() <= 4096)
        if "values" in entry:
            assert torch.allclose(torch.tensor(entry["values"]), stage.tensor, atol=1e-5)


def test_json_has_no_numbers_that_are_none():
    stage = Stage("a", "b", "c", torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]]))
    (entry,) = json.loads(as_json([stage], {}))["stages"]
    assert entry["values"] == [[1.0, None], [None, 2.0]]
    assert entry["summary"]["mean"] is None
    assert (short(None), short(0.1234567), short(-0.000123456)) == ("-", "0.123", "-1e-04")


def test_the_page_stands_alone(walked):
    folder, _ = walked
    text = (folder / "w.html").read_text()
    page = xml.etree.ElementTree.fromstring(text)  # well-formed: every tag is closed
    images = [image.get("src") for image in page.iter("img")]
    bare = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text)
    for word in ("http", "//", "<script", "<link", "@import", "url("):
        assert word not in bare
    assert all(src.startswith("data:image/png;base64,iVBOR") for src in images)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert "<b>" not in text  # the name of the file is text, not markup
    assert page.find("head/title").text == f"{NAME} through mu/8"
    assert "Random weights" in "".join(page.itertext())
    model = vt.create("mu/8")
    stages = walk(model, torch.zeros(3, 32, 32), token=3)
    sections = list(page.iter("section"))
    assert [section.find("div/h2").text.strip() for section in sections] == [stage.name for stage in stages]
    assert len(images) == sum(stage.tensor.numel() > 2 for stage in stages)
    assert all(section.find("div/code").text for section in sections)


def test_seeds_draw_other_weights(walked):
    folder, done = walked
    arguments = ["walk", "mu/8", NAME, "--token", "3", "--head", "1"]
    assert vitrail_command(*arguments, cwd=folder).stdout == done.stdout
    other = vitrail_command(*arguments, "--seed", "1", cwd=folder)
    assert "(seed 1)" in other.stdout
    assert other.stdout.splitlines()[10:] != done.stdout.splitlines()[10:]


# ---- pictures -------------------------------------------------------------------------------

CONFIG = vt.preset("mu/8", size=(16, 24))
SQUASH = squash(CONFIG)


def test_a_picture_as_the_model_takes_it(tmp_path):
    painted(24, 16).save(tmp_path / "a.png")
    pixels = read_picture(tmp_path / "a.png", SQUASH)
    assert pixels.shape == (3, 16, 24)
    expected = torch.from_numpy(np.array(painted(24, 16))).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(pixels, expected.float(), atol=1e-6)
    assert read_picture(tmp_path / "a.png", squash(vt.preset("mu/8", channels=1))).shape == (1, 32, 32)
    assert read_picture(tmp_path / "a.png", squash(vt.preset("mu/8", channels=4))).shape == (4, 32, 32)
    with pytest.raises(vt.InputError, match="A picture file has 1, 3 or 4 channels"):
        read_picture(tmp_path / "a.png", squash(vt.preset("mu/8", channels=5)))
    with pytest.raises(vt.InputError, match="a model for other things"):
        read_picture(tmp_path / "a.png", None)


def test_a_picture_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees to the right
    painted(16, 24).save(tmp_path / "a.png", exif=exif)
    painted(16, 24).rotate(-90, expand=True).save(tmp_path / "b.png")
    assert torch.equal(read_picture(tmp_path / "a.png", SQUASH), read_picture(tmp_path / "b.png", SQUASH))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_every_mode_of_8_bits(tmp_path, mode):
    painted(24, 16).convert(mode).save(tmp_path / "a.tiff")
    pixels = read_picture(tmp_path / "a.tiff", SQUASH)
    assert pixels.shape == (3, 16, 24)
    assert pixels.min() < pixels.max()


def test_what_is_transparent_is_white(tmp_path):
    Image.new("LA", (24, 16), (0, 0)).save(tmp_path / "a.png")
    assert (read_picture(tmp_path / "a.png", SQUASH) == 1).all()


def test_16_bits_are_scaled_and_32_refused(tmp_path):
    ramp = np.linspace(0, 65535, 16 * 24).reshape(16, 24)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "deep.png")
    pixels = read_picture(tmp_path / "deep.png", SQUASH)
    assert pixels.mean().abs() < 0.02
    assert (pixels.min(), pixels.max()) == (-1, 1)
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(vt.InputError, match=r"levels from 0 to 1. Got levels from 0 to 65535"):
        read_picture(tmp_path / "float.tiff", SQUASH)


# ---- refusals -------------------------------------------------------------------------------


def huge_png(path, side=20_000):
    """A PNG whose header says 400 megapixels, and which ends soon after."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)))


@pytest.fixture
def bad(tmp_path):
    """A folder with pictures that are none."""
    (tmp_path / "text.png").write_text("I am no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    huge_png(tmp_path / "huge.png")
    huge_png(tmp_path / "large.png", side=8_000)
    painted().save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.png", "text.png is not an image"),
        ("empty.png", "empty.png is not an image"),
        ("script.jpg", "script.jpg is not an image"),
        ("folder", "folder is a folder"),
        ("pipe.png", "pipe.png is a pipe or a device"),
        ("huge.png", "far too many pixels"),
        ("large.png", "the limit is 50 megapixels"),
        ("cut.png", "cut.png is broken"),
    ],
)
def test_what_is_no_picture_is_refused(bad, monkeypatch, name, message):
    monkeypatch.chdir(bad)
    with pytest.raises(vt.InputError) as caught:
        read_picture(Path(name), SQUASH)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mu/8", "pipe.png"], "pipe.png is a pipe or a device"),
        (["mu/8", "missing.png"], "The system refused missing.png: No such file or directory."),
        (["mu/8", "huge.png"], "huge.png has far too many pixels"),
        (["mu/8", "good.png", "--block", "1"], "block must be a whole number from 0 to 0. Got block=1."),
        (["mu/8", "good.png", "--token", "-1"], "token must be a whole number from 0 to 16. Got token=-1."),
        (["mue/8", "good.png"], "Did you mean 'mu'?"),
        (["mu/1@224", "good.png"], "at most 5,000 tokens. Got mu/1@224 with 50,177."),
        (["mu/8", "good.png", "--html", "text.png"], "--html must name a new file: nothing of yours"),
        (["mu/8", "good.png", "--json", "a", "--html", "a"], "--json and --html need a file each."),
        (["mu/8", "good.png", "--json", "no/where.json"], "The system refused no/where.json: No such file"),
        (["mu/8", "good.png", "--json", "a", "--html", "good.png/b"], "The system refused good.png/b: Not a"),
    ],
)
def test_wrong_use_is_code_2_and_one_line(bad, arguments, message):
    before = sorted(path.name for path in bad.iterdir())
    done = vitrail_command("walk", *arguments, cwd=bad)
    assert done.returncode == 2
    assert done.stdout == ""  # noticed before anything was shown
    assert done.stderr.startswith("vitrail: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in bad.iterdir()) == before
    assert (bad / "text.png").read_text() == "I am no picture"


def test_a_weight_file_is_walked_with_its_own_preprocessing(tmp_path):
    painted().save(tmp_path / "a.png")
    spec = vt.Preprocess(size=32, resize="shortest", resize_to=40, mean=(0.1,) * 3, std=(0.2,) * 3)
    bundle = vt.Bundle(model=shake(vt.create("mu/8", classes=4)), preprocess=spec)
    bundle.save(tmp_path / "m.safetensors")
    done = vitrail_command("walk", "m.safetensors", "a.png", "--json", "w.json", cwd=tmp_path)
    assert "The weights of m.safetensors." in done.stdout, done.stderr
    told = json.loads((tmp_path / "w.json").read_text())
    logits = next(entry["values"] for entry in told["stages"] if entry["name"] == "logits")
    expected = bundle.model(spec(Image.open(tmp_path / "a.png"))[None])[0]
    assert torch.allclose(torch.tensor(logits), expected, atol=1e-4)
    done = vitrail_command("walk", "missing.safetensors", "a.png", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "missing.safetensors" in done.stderr
