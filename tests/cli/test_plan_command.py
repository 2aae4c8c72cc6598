"""`vitrail plan`: the cost of a run on many GPUs, without torch."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vitrail.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "80"})


def test_a_plan_within_80_columns():
    done = run("--gpus=64", "--nodes=8", "--model=L/16")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    for row in ("model", "mode", "memory", "step", "bottleneck", "run", "assumed"):
        assert any(line.startswith(f"{row} ") for line in lines), row
    assert "ddp: a copy of the model fits on each GPU" in done.output
    assert "not measured" in done.output


def test_json_and_a_model_that_does_not_fit():
    done = run("--gpus=1", "--model=g/14", "--batch=512", "--json")
    found = json.loads(done.output)
    assert (found["mode"], found["fits"]) == ("one", False)
    assert "it does not fit" in " ".join(run("--gpus=1", "--model=g/14", "--batch=512").output.split())
    assert "slower than this" in " ".join(run("--gpus=1", "--batch=8").output.split())


@pytest.mark.parametrize(
    ("memory", "mode", "line"),
    [
        ("12", "hsdp", "hsdp: the model fits in shards on the GPUs of a node (parallel=hsdp)"),
        ("5", "fsdp", "fsdp: the model needs shards over all GPUs (parallel=fsdp)"),
    ],
)
def test_shards_are_advised_if_a_copy_does_not_fit(memory, mode, line):
    """g/14 on 16 GPUs of two nodes; each mode is advised with its own memory."""
    words = ["--model=g/14", "--gpus=16", "--nodes=2", "--batch=1024", "--checkpoint-blocks=40"]
    done = run(*words, f"--memory={memory}")
    assert line in " ".join(done.output.split())
    assert "it does not fit" not in done.output
    found = json.loads(run(*words, f"--memory={memory}", "--json").output)
    assert (found["mode"], found["fits"]) == (mode, True)
    assert found["memory"] == found["states"] + found["activations"] < float(memory) * 2**30
    assert found["sent"] == found["all_gather"] + found["reduce_scatter"] + found["all_reduce"] > 0
    assert (found["all_reduce"] > 0) == (mode == "hsdp")
    assert found["read"] == 64 * 110_000
    text = " ".join(done.output.split())
    size = {"hsdp": "3.5 GB", "fsdp": "3.8 GB"}[mode]
    assert f"{size} of weights (all-gather), {size} of gradients (reduce-scatter)" in text
    assert ("506 MB of gradients between copies (all-reduce)" in text) == (mode == "hsdp")
    assert "7.0 MB of image files for each GPU in a step" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus=7", "--nodes=2"], "7 GPUs on 2 nodes"),
        (["--gpus=8", "--batch=100"], "divisible by GPUs"),
        (["--model=X/16"], "unknown size 'X'"),
        (["--images=100"], "must not exceed the 100 images"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    done = run(*arguments)
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_torch_is_not_imported():
    code = "import sys; from vitrail.cli import app\ntry: app(['plan'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
