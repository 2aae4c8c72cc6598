"""Every command with invalid arguments: one message, exit code 2, and no file written."""

import io
import os
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.views.sample import SAMPLE_FILE

HUGE, DIGITS = "9" * 20, "9" * 5000
LONG = "x" * 5000
BYTES = os.fsdecode(b"\xff\xfe")  # not UTF-8
MODEL, DATA, IMAGES = "m.safetensors", "data", "images"

PATHS = ["nowhere", "text.txt/below", LONG, BYTES, "a\0b", "", "/dev/null", "empty"]
NOT_INTEGERS = ["nan", "1e3", "1.5", "-1", "-" + HUGE, HUGE, DIGITS]
NOT_POSITIVE = ["nan", "inf", "-inf", "-1", "x", "1e400"]
WORDS = ["nope", "", "\0", BYTES, LONG]
NEW = ["text.txt", "text.txt/below", "nowhere/below", LONG, "a\0b", ""]  # no file can be created there

OPTIONS = [  # command, option, values that must be refused
    (["info", MODEL], "--size", [*NOT_INTEGERS, "0", "x", "28x", "28x0", "28x28x28"]),
    (["info", MODEL], "--family", WORDS),
    (["info", MODEL], "--keys", [*PATHS, "text.txt"]),
    (
        ["info", MODEL],
        "--set",
        [*WORDS, f"heads={HUGE}", "heads=nan", f"heads={DIGITS}", "classes=-1", "size=0"],
    ),
    (["predict", MODEL, IMAGES], "--top", [*NOT_INTEGERS, "0"]),
    (["predict", MODEL, IMAGES], "--format", WORDS),
    (["predict", MODEL, IMAGES], "--batch", [*NOT_INTEGERS, "0"]),
    (["predict", MODEL, IMAGES], "--workers", NOT_INTEGERS),
    (["predict", MODEL, IMAGES], "--size", [*NOT_INTEGERS, "0", "29", "100000000"]),
    (["predict", MODEL, IMAGES], "--out", NEW),
    (["predict", MODEL, IMAGES], "--embeddings", [*NEW, "nowhere.txt", "nowhere/below.npy"]),
    (["predict", MODEL, IMAGES], "--explain", NEW),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--split", WORDS),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--probe", [*WORDS, ","]),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--layers", ["0", "x", HUGE, DIGITS, "-1", ""]),
    (["evaluate", MODEL, DATA, "--set", "classes=2", "--probe", "knn"], "--layers", ["99", "-1", HUGE]),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--batch", [*NOT_INTEGERS, "0"]),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--workers", NOT_INTEGERS),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--target-accuracy", NOT_POSITIVE),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--real", [*PATHS, "text.txt"]),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--json", NEW),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--html", NEW),
    (["evaluate", MODEL, DATA, "--set", "classes=2"], "--calibrate", [*NEW, "nowhere/below.safetensors"]),
    (["inspect", MODEL, IMAGES], "--layer", [*NOT_INTEGERS[:3], "2", "-3", "99", HUGE, DIGITS]),
    (["inspect", MODEL, IMAGES], "--head", [*NOT_INTEGERS[:3], "4", "-5", "-7", HUGE, "-" + HUGE]),
    (["inspect", MODEL, IMAGES], "--target", [*WORDS, "99", "-1", HUGE, DIGITS, "²"]),
    (["inspect", MODEL, IMAGES], "--max-images", [*NOT_INTEGERS, "0", "65"]),
    (["inspect", MODEL, IMAGES], "--only", [*WORDS, ","]),
    (["inspect", MODEL, IMAGES], "--out", [value for value in NEW if value != "nowhere/below"]),
    (["walk", MODEL, "images/0.png"], "--block", [*NOT_INTEGERS, "99"]),
    (["walk", MODEL, "images/0.png"], "--head", [*NOT_INTEGERS, "99"]),
    (["walk", MODEL, "images/0.png"], "--token", [*NOT_INTEGERS, "99"]),
    (["walk", MODEL, "images/0.png"], "--seed", [*NOT_INTEGERS, "1"]),
    (["walk", "mu/4", "images/0.png"], "--seed", NOT_INTEGERS),
    (["walk", "mu/4", "images/0.png"], "--json", NEW),
    (["check", "text.txt"], "--limit", [*NOT_POSITIVE, "0"]),
    (["check", "text.txt"], "--only", WORDS),
    (["export", MODEL], "--to", WORDS),
    (["export", MODEL, "--to", "onnx"], "--dynamic", WORDS),
    (["export", MODEL, "--to", "html"], "--out", NEW),
    (["convert", MODEL, "new"], "--to", WORDS),
    (["convert", MODEL, "new"], "--classes", NOT_INTEGERS),
    (["convert", MODEL, "new"], "--channels", [*NOT_INTEGERS, "0"]),
    (["convert", MODEL, "new"], "--size", [*NOT_INTEGERS, "0", "29"]),
    (["serve", "nowhere"], "--port", [*NOT_INTEGERS, "65536"]),
    (["serve", "nowhere"], "--deadline", NOT_POSITIVE),
    (["serve", "nowhere"], "--batch", [*NOT_INTEGERS, "0"]),
    (["serve", "nowhere"], "--queue", [*NOT_INTEGERS, "0"]),
    (["serve", "nowhere"], "--decoders", [*NOT_INTEGERS, "0"]),
    (["serve", "nowhere"], "--token-file", PATHS),
    (["lab", "scale", "--small"], "--out", [value for value in NEW if value != "nowhere/below"]),
    (["notes"], "--out", ["nowhere", ""]),
    (["demo"], "--epochs", [*NOT_INTEGERS, "0"]),
    (["demo"], "--seed", NOT_INTEGERS),
    (["train", DATA], "--epochs", [*NOT_INTEGERS, "0"]),
    (["train", DATA], "--batch", [*NOT_INTEGERS, "0"]),
    (["train", DATA], "--seed", [*NOT_INTEGERS, str(2**63)]),
    (["train", DATA], "--size", [*NOT_INTEGERS, "0", "100000000"]),
    (["train", DATA], "--lr", [*NOT_POSITIVE, "0", "101"]),
    (["train", DATA], "--tune", WORDS),
    (["train", DATA], "--recipe", WORDS),
    (["train", DATA], "--model", [*WORDS, "B/0", f"B/{HUGE}", "B/16@0"]),
    (["train", DATA], "--from", PATHS),
    (["train", DATA], "--teacher", PATHS),
    (["train", DATA], "--out", [value for value in NEW if value != "nowhere/below"]),
    (["train", DATA], "--set", [f"{name}={value}" for name in ("seed", "epochs") for value in NOT_INTEGERS]),
    (
        ["train", DATA],
        "--set",
        [f"{name}={value}" for name in ("batch", "workers") for value in NOT_INTEGERS],
    ),
    (["train", DATA], "--set", [*WORDS, "model.width=-1", f"model.size={HUGE}", "clip=nan", "betas=nan,nan"]),
    (["train", DATA, "--set", "tune=lora"], "--set", ["lora_rank=0", "lora_rank=999999999"]),
]
COMMANDS = [  # "@" stands for the path
    *(["info", "@"], ["predict", "@", IMAGES], ["evaluate", "@", DATA], ["evaluate", MODEL, "@"]),
    *(
        ["inspect", "@", IMAGES],
        ["inspect", MODEL, "@", "--only", "attention"],
        ["walk", "@", "images/0.png"],
    ),
    *(["walk", "mu/4", "@"], ["check", "@"], ["export", "@", "--to", "html"], ["convert", "@", "new"]),
    *(["verify", "@"], ["doctor", "@"], ["serve", "@", "--port", "0"], ["lab", "@"], ["train", "@"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    shutil.copy(SAMPLE_FILE, folder / MODEL)
    (folder / "text.txt").write_text("hello")
    (folder / "empty").mkdir()
    rng = np.random.default_rng(0)
    for name in ("images/0.png", "images/1.png", *(f"data/{c}/{n}.png" for c in "ab" for n in range(6))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (28, 28), dtype=np.uint8)).save(folder / name)
    return folder


def run(arguments, monkeypatch):
    """Run a command in this process; return exit code, stdout and stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    monkeypatch.setattr(sys, "argv", ["vitrail", *arguments])
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as exit_info:
        main()
    for stream in streams:
        stream.flush()
    return exit_info.value.code, *(stream.buffer.getvalue().decode() for stream in streams)


def check_refused(arguments, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(os.listdir(folder))
    code, stdout, stderr = run(arguments, monkeypatch)
    assert code == 2, (stdout, stderr)
    assert stderr.strip()
    for word in ("Traceback", "This is a bug"):
        assert word not in stdout + stderr
    assert sorted(os.listdir(folder)) == before


def short(value):
    return ascii(value)[1:-1][:40]


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        pytest.param(command, option, value, id=f"{command[0]} {option} {short(value)}")
        for command, option, values in OPTIONS
        for value in values
    ],
)
def test_invalid_option_values(folder, monkeypatch, command, option, value):
    check_refused([*command, option, value], folder, monkeypatch)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            [path if word == "@" else word for word in command], id=f"{' '.join(command)} {short(path)}"
        )
        for command in COMMANDS
        for path in PATHS
    ],
)
def test_unreadable_input_paths(folder, monkeypatch, arguments):
    check_refused(arguments, folder, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", MODEL, IMAGES, "--layer", "99"], "from 0 to 1"),
        (["inspect", MODEL, IMAGES, "--head", "-7"], "from 0 to 3"),
        (["train", DATA, "--set", f"seed={HUGE}"], "from 0 to 9,223,372,036,854,775,807"),
        (["train", DATA, "--set", "epochs=1000001"], "from 1 to 1,000,000"),
        (["train", DATA, "--set", f"workers={HUGE}"], "from 0 to 1,024"),
        (["train", DATA, "--set", "tune=lora", "--set", "lora_rank=999999999"], "lora_rank"),
        (["info", ""], "argument 2 (after info) is empty"),
        (["info", LONG], "too long"),
    ],
)
def test_the_message_names_the_allowed_values(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    _, _, stderr = run(arguments, monkeypatch)
    assert message in stderr
    assert len(stderr) < 600
    shutil.rmtree(folder / "runs", ignore_errors=True)
