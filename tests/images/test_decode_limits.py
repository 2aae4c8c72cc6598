"""The cost of decoding: every file of the corpus stays within limits of time and memory, in a child process."""

import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.image_corpus import BROKEN, CASES, LARGE, OK, OTHER, saved
from vitrail.base.errors import VitrailError
from vitrail.images import headers
from vitrail.images.decode import decode_image, open_header, suppress_warnings
from vitrail.images.headers import read_header
from vitrail.images.limits import BrokenImage, DecodeLimits, ImageTooLarge, NotAnImage, bytes_needed
from vitrail.images.preprocess import Preprocess

SECONDS, MEGABYTES = 2.5, 400  # of one core, and beyond what the process had
ERRORS = {ImageTooLarge: LARGE, BrokenImage: BROKEN, NotAnImage: OTHER}


def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1000


def measure(name):
    """The outcome of a case, its time in seconds, and its peak memory in megabytes."""
    data, preprocess, error, needed = CASES[name].make(), Preprocess(), "", 0
    with suppress_warnings(), suppress(VitrailError):
        header = read_header(io.BytesIO(data), name, DecodeLimits())
        needed = bytes_needed(open_header(io.BytesIO(data), name), header, preprocess) / 1e6
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before, start = memory("VmRSS"), time.process_time()
    try:
        with suppress_warnings():
            preprocess.pixels(decode_image(io.BytesIO(data), "it", preprocess=preprocess))
        outcome = OK
    except (ImageTooLarge, BrokenImage, NotAnImage) as caught:
        outcome, error = ERRORS[type(caught)], str(caught)
    taken = time.process_time() - start, memory("VmHWM") - before
    return dict(
        name=name,
        outcome=outcome,
        error=error,
        seconds=taken[0],
        megabytes=taken[1],
        needed=needed,
        bytes=len(data),
    )


@pytest.fixture(scope="module")
def measured():
    """One child process for all cases, with a memory limit, so that a failing case does not kill this one."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.images.test_decode_limits", *CASES]
    # Large blocks are returned to the system when freed, so that each case is measured separately.
    returning = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=returning, cwd=root)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{done.stderr[-2000:]} after {found[-1:]}"
    return {one["name"]: one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_cost_of_decoding(measured, name):
    found = measured[name]
    assert found["outcome"] == CASES[name].outcome, found
    assert found["seconds"] < SECONDS, found
    assert found["megabytes"] < MEGABYTES, found
    assert found["outcome"] != OK or found["megabytes"] < found["needed"] + 20, found  # the estimate holds
    assert found["outcome"] == OK or found["error"].startswith("it "), found


# ---- scans ----------------------------------------------------------------------------------


def noisy(mode, side=900):
    """Entropy-coded data of more than one window, with stuffed zeros."""
    return Image.frombytes(mode, (side, side), np.random.default_rng(0).bytes(side * side * len(mode)))


def scans_of(data):
    return read_header(io.BytesIO(data), "it", DecodeLimits()).scans


@pytest.mark.parametrize(
    ("mode", "settings", "scans"),
    [
        ("RGB", {}, 1),
        ("RGB", dict(progressive=True), 10),  # libjpeg's script for color
        ("L", dict(progressive=True), 6),  # and for gray
        ("RGB", dict(progressive=True, restart_marker_blocks=5), 10),
        ("RGB", dict(progressive=True, comment=b"\xff\xda" * 500), 10),
        (
            "RGB",
            dict(progressive=True, exif=b"Exif\0\0" + saved("JPEG", noisy("RGB", 64), progressive=True)),
            10,
        ),
    ],
)
def test_scans_are_counted(mode, settings, scans):
    assert scans_of(saved("JPEG", noisy(mode), quality=95, **settings)) == scans


def test_scans_are_counted_across_fill_bytes_and_windows():
    data = saved("JPEG", noisy("RGB"), quality=95, progressive=True)
    assert len(data) > 2 * headers.WINDOW
    assert scans_of(data.replace(b"\xff\xda", b"\xff\xff\xff\xff\xda")) == 10
    assert scans_of(data + b"\xff\xda" * 500) == 10  # after the end
    assert scans_of(data[:-2]) == 10


def test_custom_limits():
    data = saved("JPEG", noisy("RGB", 300), progressive=True)
    assert decode_image(
        io.BytesIO(data), "it", limits=DecodeLimits(scans=10, side=300, pixels=90_000)
    ).size == (
        300,
        300,
    )
    for limits, words in (
        (DecodeLimits(scans=9), "10 scans or more.*limit is 9"),
        (DecodeLimits(side=299), "limit of a side is 299"),
        (DecodeLimits(pixels=89_999), "limit is 0.089999 megapixels"),
        (DecodeLimits(memory=500_000), "MiB to decode and resize"),
    ):
        with pytest.raises(ImageTooLarge, match=words) as caught:
            decode_image(io.BytesIO(data), "it", limits=limits)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_memory_for_resizing_is_refused_before_decoding(monkeypatch):
    """65,535 x 1 is small; with a short side of 224 it would be 224 x 14,679,840."""
    data, shortest = CASES["png longest row"].make(), Preprocess(resize="shortest")
    assert decode_image(io.BytesIO(data), "it").size == (65_535, 1)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(ImageTooLarge, match="MiB to decode and resize"):
        decode_image(io.BytesIO(data), "it", preprocess=shortest)


# ---- the command ----------------------------------------------------------------------------


def test_predict_has_a_row_for_each_file(tmp_path, monkeypatch):
    """Broken files do not change the predictions of the others."""
    from typer.testing import CliRunner  # not imported in the child process

    import vitrail as vt
    from vitrail.cli import app

    monkeypatch.chdir(tmp_path)
    vt.Bundle(model=vt.create("mu/16@32", classes=3), labels=["ant", "bee", "cat"]).save("model.safetensors")
    bad = {name: case.make() for name, case in CASES.items() if case.outcome != OK}
    names = [name for name, data in bad.items() if len(data) < 1_300_000]
    assert len(names) > 40
    for number, name in enumerate(names):
        (tmp_path / f"{number}.png").write_bytes(bad[name])
    Image.new("RGB", (40, 30), "orange").save(tmp_path / "good.png")
    paths = ["good.png", *(f"{number}.png" for number in range(len(names))), "good.png"]
    start = time.process_time()
    done = CliRunner().invoke(
        app, ["predict", "model.safetensors", *paths, "--format", "jsonl", "--workers", "1"]
    )
    assert time.process_time() - start < 10
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 1
    assert [row["file"] for row in rows] == paths
    assert rows[0]["label"]
    assert rows[0] == rows[-1]
    large = "limit is|no ordinary image|limit of a side|far too many|run-length"
    patterns = {LARGE: large, BROKEN: "is broken", OTHER: "not an image"}
    for name, row in zip(names, rows[1:-1], strict=True):
        assert re.search(patterns[CASES[name].outcome], row["error"]), (name, row)


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
    Preprocess().pixels(Image.new("I;16", (300, 300)))  # run lazy imports now
    for case in sys.argv[1:]:
        print(json.dumps(measure(case)), flush=True)
