"""A preprocessing that is a guess: every command that loads a model says so on stderr."""

import contextlib
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from timm.models.vision_transformer import VisionTransformer

from tests.support.command import run_command
from tests.support.serving import make_image
from vitrail.cli import app

NOTE = "the one published for augreg is used: mean 0.5, std 0.5. That is a guess: files of deit look the same"
COMMANDS = {
    "predict": ["predict", "plain.safetensors", "photos"],
    "predict in parts": ["predict", "plain.safetensors", "photos", "--out", "parts/"],
    "embed": ["embed", "plain.safetensors", "photos", "-o", "new.safetensors"],
    "embed in parts": ["embed", "plain.safetensors", "photos", "-o", "vectors/"],
    "search": ["search", "index.safetensors", "photos/cat/0.png"],
    "evaluate": ["evaluate", "plain.safetensors", "photos", "--set", "classes=0", "--probe", "knn"],
    "probe": ["probe", "plain.safetensors", "photos"],
    "doctor": ["doctor", "photos", "--model", "plain.safetensors"],
    "inspect": ["inspect", "plain.safetensors", "--only", "filters"],
    "export": ["export", "plain.safetensors", "--to", "html"],
    "bench": ["bench", "plain.safetensors", "--batch", "1"],
    "walk": ["walk", "plain.safetensors", "photos/cat/0.png"],
}
WITHOUT_CHOICE = ("walk",)  # has no --quiet
OTHERS = {"train", "sweep", "info", "convert"}  # which print or log all notes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file that does not tell its preprocessing, images of two classes, and an index of them."""
    path = tmp_path_factory.mktemp("guess")
    torch.manual_seed(0)
    small = dict(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=1, num_classes=2)
    safetensors.torch.save_file(VisionTransformer(**small).state_dict(), path / "plain.safetensors")
    for number in range(24):
        file = path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(make_image(number))
    done = run_command("embed", "plain.safetensors", "photos", "-q", cwd=path)
    assert done.returncode == 0, done.stderr
    return path


def said(*arguments, folder, work):
    """stderr of a command in a new folder with the same files, and its stdout."""
    for name in ("plain.safetensors", "photos", "index.safetensors"):
        with contextlib.suppress(FileExistsError):
            (work / name).symlink_to(folder / name)
    done = run_command(*arguments, cwd=work, columns=500)
    assert done.returncode in (0, 1), done.stderr
    assert "guess: files" not in done.stdout
    return done.stderr


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_command_says_that_the_preprocessing_is_a_guess(folder, tmp_path, arguments):
    text = said(*arguments, folder=folder, work=tmp_path)
    assert text.count(NOTE) == 1
    assert "give --set preprocess=deit" in text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_CHOICE])
def test_quiet_says_nothing(folder, tmp_path, name):
    assert "guess" not in said(*COMMANDS[name], "--quiet", folder=folder, work=tmp_path)


@pytest.mark.parametrize("given", ["preprocess=deit", "preprocess=augreg"])
def test_nothing_is_said_about_a_choice(folder, tmp_path, given):
    text = said("predict", "plain.safetensors", "photos", "--set", given, folder=folder, work=tmp_path)
    assert "guess" not in text


def test_mean_and_std_are_a_choice_and_one_of_them_is_none(folder, tmp_path):
    mean = ["predict", "plain.safetensors", "photos", "--set", "preprocess.mean=0.4"]
    assert NOTE in said(*mean, folder=folder, work=tmp_path)
    both = [*mean, "--set", "preprocess.std=0.2"]
    assert "guess" not in said(*both, folder=folder, work=tmp_path)


def test_a_server_says_it_before_it_listens(folder):
    command = [sys.executable, "-m", "vitrail", "serve", "plain.safetensors", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as server:
        server.stdout.readline()
        server.terminate()
        assert NOTE in server.communicate(timeout=60)[1]


def test_no_command_that_loads_a_model_is_forgotten():
    """Every command with --set opens a model; the others of them print all their notes."""
    takes_settings = {
        command.callback.__name__
        for command in app.registered_commands
        if "given" in command.callback.__annotations__ or "settings" in command.callback.__annotations__
    }
    tested = {words[0] for words in COMMANDS.values()} | {"serve"}
    assert takes_settings <= tested | OTHERS


# ---- vitrail doctor --model: the choice that the note recommends ------------------------------


def test_doctor_takes_the_choice(folder, tmp_path):
    chosen = ["doctor", "photos", "--model", "plain.safetensors", "--set", "preprocess=deit", "--size", "48"]
    text = said(*chosen, "--family", "timm", folder=folder, work=tmp_path)
    assert "guess" not in text


def test_doctor_passes_its_options_on(folder):
    keys = folder / "keys.json"
    keys.write_text("{}")
    for words, message in (
        (["--size", "big"], "--size must be a number"),
        (["--family", "clap"], "unknown family 'clap'"),
        (["--keys", keys], "a list of rows"),
        (["--set", "preprocess=diet"], "unknown published preprocessing 'diet'"),
    ):
        done = run_command(
            "doctor", "photos", "--model", "plain.safetensors", *words, cwd=folder, columns=500
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], "give --model as well"),
        (["--model", "plain.safetensors", "--no-features"], "leave out --no-feat"),
    ],
)
@pytest.mark.parametrize("given", [["--set", "preprocess=deit"], ["--size", "48"], ["--family", "timm"]])
def test_doctor_refuses_options_of_a_model_that_is_not_run(folder, words, advice, given):
    done = run_command("doctor", "photos", *words, *given, cwd=folder, columns=500)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{given[0]} says how the model is loaded that computes features; {advice}" in done.stderr
