"""`vitrail walk`: its output, files and errors."""

import json
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.command import run_command
from tests.support.models import add_noise
from tests.support.read_pages import ParsedPage, check_safe
from vitrail.cli.walk import as_json, read_image
from vitrail.views.walk import Stage, walk
from vitrail.views.walk.label_file import name_classes


def painted(width=60, height=40):
    """An image with a different color everywhere."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([columns * 4, rows * 6, rows + columns], axis=-1).astype(np.uint8))


NAME = "<b>[red]cat & 'dog'.png"  # markup for a page and for rich


def squash(config):
    """The preprocessing of `vitrail walk` for a model size without a file."""
    half = (0.5,) * config.channels
    return vt.Preprocess(size=config.pixels, interpolation="bicubic", mean=half, std=half)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    painted().save(folder / NAME)
    arguments = ["walk", "mu/8", NAME, "--token", "3", "--head", "1", "--json", "w.json", "--html", "w.html"]
    return folder, run_command(*arguments, cwd=folder)


def test_the_terminal_shows_every_stage_in_80_columns(walked):
    _, done = walked
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    output = " ".join(done.stdout.split())
    assert f"{NAME} through mu/8" in output
    assert "Random weights (seed 0)" in output
    assert "block 0, head 1, patch 2 (row 0, column 2)" in output
    model = vt.create("mu/8")
    for stage in walk(model, torch.zeros(3, 32, 32), token=3, head=1):
        assert stage.name in output
        assert " x ".join(map(str, stage.shape)) in output
    for text in ("q = LN(z_0) U_q + b_q", "S = q k^T / sqrt(d)", "A = softmax(S)", "y = LN(z_1)^0"):
        assert text in output
    assert "the class token 0.0" in output
    assert re.search(r"^ .*@@.*$", done.stdout, re.MULTILINE)  # the attention map
    assert "Eq. (1): from pixels to" in output
    assert "z'_l = MSA(LN(z_l-1)) + z_l-1" in output
    assert "count from 0" in output
    answer = output.partition("The answer")[2].split(" % ")
    assert len(answer) == 6  # five classes


def test_repeated_blocks_are_one_row(tmp_path):
    painted().save(tmp_path / "a.png")
    done = run_command(
        "walk", "mu/8", "a.png", "--set", "depth=7", "--set", "classes=3", "--block", "2", cwd=tmp_path
    )
    output = " ".join(done.stdout.split())
    assert "blocks.0 ... blocks.1" in output
    assert "z_7 = Block_6( ... Block_3(z_3)" in output
    assert "Blocks 3 to 6, with the stages of" in output
    assert "blocks.4" not in output
    assert len(output.partition("The answer")[2].split(" % ")) == 4  # as many as there are


def test_the_json_has_all_stages(walked):
    folder, _ = walked

    def refuse(word):
        raise AssertionError(word)

    content = json.loads((folder / "w.json").read_text(), parse_constant=refuse)
    assert content["image"] == NAME
    assert "Random" in content["weights"]
    torch.manual_seed(0)
    model = vt.create("mu/8")
    stages = walk(model, read_image(folder / NAME, squash(model.config)), token=3, head=1)
    assert [entry["name"] for entry in content["stages"]] == [stage.name for stage in stages]
    for entry, stage in zip(content["stages"], stages, strict=True):
        assert entry["equation"] == stage.equation
        assert entry["meaning"] == stage.meaning
        assert tuple(entry["shape"]) == stage.shape
        assert entry["summary"]["max"] == pytest.approx(stage.tensor.max().item(), rel=1e-5, abs=1e-6)
        assert ("values" in entry) == (stage.tensor.numel() <= 4096)
        if "values" in entry:
            assert torch.allclose(torch.tensor(entry["values"]), stage.tensor, atol=1e-5)


def test_nan_and_infinity_are_null_in_json():
    stage = Stage("a", "b", "c", torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]]))
    (entry,) = json.loads(as_json([stage], {}))["stages"]
    assert entry["values"] == [[1.0, None], [None, 2.0]]
    assert entry["summary"]["mean"] is None


def test_the_page_is_saved(walked):
    folder, _ = walked
    read = ParsedPage((folder / "w.html").read_text())
    check_safe(read, script=True)
    assert f"{NAME} through mu/8" in read.text
    assert "Random weights" in read.text


def test_another_seed_gives_other_weights(walked):
    folder, done = walked
    arguments = ["walk", "mu/8", NAME, "--token", "3", "--head", "1"]
    assert done.stdout.startswith(run_command(*arguments, cwd=folder).stdout)  # and "Saved ..." lines
    other = run_command(*arguments, "--seed", "1", cwd=folder)
    assert "(seed 1)" in other.stdout
    assert other.stdout.splitlines()[10:] != done.stdout.splitlines()[10:]


# ---- images -------------------------------------------------------------------------------

CONFIG = vt.preset("mu/8", size=(16, 24))
SQUASH = squash(CONFIG)


def test_read_image_preprocesses(tmp_path):
    painted(24, 16).save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png", SQUASH)
    assert pixels.shape == (3, 16, 24)
    expected = torch.from_numpy(np.array(painted(24, 16))).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(pixels, expected.float(), atol=1e-6)
    assert read_image(tmp_path / "a.png", squash(vt.preset("mu/8", channels=1))).shape == (1, 32, 32)
    assert read_image(tmp_path / "a.png", squash(vt.preset("mu/8", channels=4))).shape == (4, 32, 32)
    with pytest.raises(vt.InputError, match="1, 3 or 4 channels"):
        read_image(tmp_path / "a.png", squash(vt.preset("mu/8", channels=5)))
    with pytest.raises(vt.InputError, match="this model takes other inputs"):
        read_image(tmp_path / "a.png", None)


def test_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    painted(16, 24).save(tmp_path / "a.png", exif=exif)
    painted(16, 24).rotate(-90, expand=True).save(tmp_path / "b.png")
    assert torch.equal(read_image(tmp_path / "a.png", SQUASH), read_image(tmp_path / "b.png", SQUASH))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_8_bit_modes(tmp_path, mode):
    painted(24, 16).convert(mode).save(tmp_path / "a.tiff")
    pixels = read_image(tmp_path / "a.tiff", SQUASH)
    assert pixels.shape == (3, 16, 24)
    assert pixels.min() < pixels.max()


def test_transparent_pixels_are_white(tmp_path):
    Image.new("LA", (24, 16), (0, 0)).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png", SQUASH) == 1).all()


def test_16_bit_images_are_scaled_and_float_images_refused(tmp_path):
    ramp = np.linspace(0, 65535, 16 * 24).reshape(16, 24)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "deep.png")
    pixels = read_image(tmp_path / "deep.png", SQUASH)
    assert pixels.mean().abs() < 0.02
    assert (pixels.min(), pixels.max()) == (-1, 1)
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(vt.InputError, match=r"mode F.* 0 .*1.*65535"):
        read_image(tmp_path / "float.tiff", SQUASH)


# ---- refusals -------------------------------------------------------------------------------


def huge_png(path, side=20_000):
    """A PNG with 400 megapixels in its header and almost no data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)))


@pytest.fixture
def bad(tmp_path):
    """A folder with files that are not valid images."""
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    huge_png(tmp_path / "huge.png")
    huge_png(tmp_path / "large.png", side=8_000)
    painted().save(tmp_path / "good.png")
    content = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
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
def test_invalid_images_are_refused(bad, monkeypatch, name, message):
    monkeypatch.chdir(bad)
    with pytest.raises(vt.InputError) as caught:
        read_image(Path(name), SQUASH)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mu/8", "pipe.png"], "pipe.png is a pipe or a device"),
        (["mu/8", "missing.png"], "missing.png: No such file or directory."),
        (["mu/8", "huge.png"], "huge.png has far too many pixels"),
        (["mu/8", "good.png", "--block", "1"], "block must be an integer from 0 to 0, not 1"),
        (["mu/8", "good.png", "--token", "-1"], "token must be an integer from 0 to 16, not -1"),
        (["mue/8", "good.png"], "Did you mean 'mu'?"),
        (["mu/1@224", "good.png"], "mu/1@224 has 50,177 tokens"),
        (
            ["mu/8", "good.png", "--labels", "cat,dog"],
            "--labels names the classes of a weight file, and mu/8 is a model size",
        ),
        (["mu/8", "good.png", "--html", "text.png"], "text.png already exists, and --html never overwrites"),
        (["mu/8", "good.png", "--json", "a", "--html", "a"], "--json and --html both name a"),
        (["mu/8", "good.png", "--json", "no/where.json"], "no/where.json: No such file"),
        (["mu/8", "good.png", "--json", "a", "--html", "good.png/b"], "good.png/b: Not a"),
    ],
)
def test_wrong_use_is_exit_code_2_and_one_line(bad, arguments, message):
    before = sorted(path.name for path in bad.iterdir())
    done = run_command("walk", *arguments, cwd=bad)
    assert done.returncode == 2
    assert done.stdout == ""  # refused before anything is printed
    assert done.stderr.startswith("vitrail: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in bad.iterdir()) == before
    assert (bad / "text.png").read_text() == "not an image"


def test_a_weight_file_uses_its_own_preprocessing(tmp_path):
    painted().save(tmp_path / "a.png")
    spec = vt.Preprocess(size=32, resize="shortest", resize_to=40, mean=(0.1,) * 3, std=(0.2,) * 3)
    bundle = vt.Bundle(model=add_noise(vt.create("mu/8", classes=4)), preprocess=spec)
    bundle.save(tmp_path / "m.safetensors")
    done = run_command("walk", "m.safetensors", "a.png", "--json", "w.json", cwd=tmp_path)
    assert "The weights of m.safetensors." in done.stdout, done.stderr
    content = json.loads((tmp_path / "w.json").read_text())
    logits = next(entry["values"] for entry in content["stages"] if entry["name"] == "logits")
    expected = bundle.model(spec(Image.open(tmp_path / "a.png"))[None])[0]
    assert torch.allclose(torch.tensor(logits), expected, atol=1e-4)
    done = run_command("walk", "missing.safetensors", "a.png", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "missing.safetensors" in done.stderr


# ---- names ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory):
    """A classifier of three classes without names, and an image."""
    folder = tmp_path_factory.mktemp("unnamed")
    painted().save(folder / "a.png")
    vt.Bundle(model=add_noise(vt.create("mu/8", classes=3))).save(folder / "m.safetensors")
    vt.Bundle(model=vt.create("mu/8", classes=0)).save(folder / "headless.safetensors")
    (folder / "names.txt").write_text("ant\nbee\ncat\n")
    (folder / "names.json").write_text('["ant", "bee", "cat"]')
    (folder / "by_index.json").write_text('{"2": "cat", "0": "ant", "1": "bee"}')
    (folder / "by_name.json").write_text('{"cat": 2, "ant": 0, "bee": 1}')
    (folder / "wordnet.json").write_text('{"0": ["n1", "ant"], "1": ["n2", "bee"], "2": ["n3", "cat"]}')
    (folder / "four.txt").write_text("ant\nbee\ncat\ndog\n")
    (folder / "two.json").write_text('{"0": "ant", "1": "bee"}')
    (folder / "gap.json").write_text('{"0": "ant", "1": "bee", "3": "cat"}')
    (folder / "empty_name.json").write_text('["ant", "", "cat"]')
    (folder / "number.json").write_text("3")
    return folder


NAME_FILES = ["names.txt", "names.json", "by_index.json", "by_name.json", "wordnet.json"]


@pytest.mark.parametrize("given", [*NAME_FILES, "ant, bee,cat"])
def test_labels_name_the_classes_of_a_classifier(unnamed, monkeypatch, given):
    monkeypatch.chdir(unnamed)
    bundle = vt.load("m.safetensors")
    assert bundle.labels is None
    assert name_classes(bundle, given).labels == ["ant", "bee", "cat"]


def test_the_answer_has_the_names(unnamed):
    done = run_command("walk", "m.safetensors", "a.png", "--labels", "by_index.json", cwd=unnamed)
    assert done.returncode == 0, done.stderr
    answer = done.stdout.partition("The answer")[2]
    assert sorted(re.findall(r"% +(\w+)", answer)) == ["ant", "bee", "cat"]


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("m", "four.txt", "four.txt has 4 names, but the model has 3 classes; give one name for each"),
        ("m", "two.json", "two.json has 2 names, but the model has 3 classes"),
        ("m", "ant,bee", "labels= has 2 names, but the model has 3 classes"),
        ("m", "gap.json", "gap.json has no name for class 2; its keys must be 0 to 2"),
        ("m", "empty_name.json", "empty_name.json has no name for class 1"),
        ("m", "number.json", "number.json must hold a list of names"),
        ("m", "missing.json", "missing.json cannot be read: No such file"),
        ("headless", "names.txt", "This model has no head, so it has no classes to name"),
    ],
)
def test_labels_that_do_not_fit_are_refused(unnamed, monkeypatch, model, given, message):
    monkeypatch.chdir(unnamed)
    with pytest.raises(vt.InputError, match=re.escape(message)):
        name_classes(vt.load(f"{model}.safetensors"), given)


def test_headings_have_file_names_and_the_page_has_each_path_once(unnamed):
    paths = [str(unnamed / name) for name in ("a.png", "m.safetensors")]
    done = run_command("walk", *reversed(paths), "--html", "paths.html", cwd=unnamed)
    assert done.returncode == 0, done.stderr
    assert "a.png through m.safetensors, stage by stage" in done.stdout
    assert str(unnamed) not in done.stdout
    text = (unnamed / "paths.html").read_text()
    assert "<title>a.png through m.safetensors</title>" in text
    assert "<h1><bdi>a.png through m.safetensors</bdi></h1>" in text
    assert [text.count(path) for path in paths] == [1, 1]
