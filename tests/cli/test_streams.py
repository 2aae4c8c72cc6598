"""Closed stdin, stdout and stderr, and readers that go away."""

import os
import subprocess
import sys

import pytest

from tests.support.tiny_runs import write_arrays
from vitrail.views.sample import SAMPLE_FILE

pytestmark = pytest.mark.slow  # real processes

PROGRAM = f"'{sys.executable}' -m vitrail"
INFO, PREDICT = f"{PROGRAM} info '{SAMPLE_FILE}'", f"{PROGRAM} predict '{SAMPLE_FILE}'"


def shell(script, cwd):
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    command = ["bash", "-c", f"set -o pipefail; {script}"]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("script", "code", "stdout", "stderr"),
    [
        (f"{INFO} >&-", 2, "", "standard output is closed"),
        (f"{PROGRAM} --help >&-", 2, "", "standard output is closed"),
        (f"{PREDICT} - <&-", 2, "", "standard input is closed"),
        (f"{INFO} <&-", 0, "parameters", ""),
        (f"{INFO} 2>&-", 0, "parameters", ""),
        (f"{PROGRAM} info nowhere 2>&-", 2, "nowhere", ""),
        (f"{PROGRAM} info --nonsense 2>&-", 2, "No such option", ""),
        (f"{PREDICT} - <&- 2>&-", 2, "standard input is closed", ""),
        (f"{INFO} <&- >&- 2>&-", 2, "", ""),
        (f"{PREDICT} - <&- >&- 2>&-", 2, "", ""),
    ],
)
def test_closed_streams(tmp_path, script, code, stdout, stderr):
    done = shell(script, tmp_path)
    assert done.returncode == code
    for output, text in ((done.stdout, stdout), (done.stderr, stderr)):
        assert text in output
        assert bool(text) == bool(output)
        assert "Traceback" not in output
        assert "bug" not in output


@pytest.mark.parametrize("command", [INFO, f"{PROGRAM} notes", f"{PROGRAM} notes --full", f"{PREDICT} x.png"])
def test_a_reader_that_is_gone_ends_a_command_silently(tmp_path, command):
    done = shell(f"{command} | true", tmp_path)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("both", ["", "2>&1"])
def test_training_continues_when_the_reader_is_gone(tmp_path, both):
    write_arrays(tmp_path / "data.npz")
    sizes = " ".join(
        f"--set model.{text}" for text in ("width=16", "depth=1", "heads=2", "patch=4", "size=8")
    )
    done = shell(f"{PROGRAM} train data.npz --epochs 2 --out out {sizes} {both} | head -1", tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    if not both:
        assert "the output is closed" in done.stderr
        assert "out/log.txt" in done.stderr
        assert done.stderr.count("\n") == 1
    assert {"last.safetensors", "best.safetensors", "report.html"} <= set(os.listdir(tmp_path / "out"))
    assert "epoch   2" in (tmp_path / "out" / "log.txt").read_text()


def test_training_continues_when_its_output_cannot_be_written(tmp_path):
    write_arrays(tmp_path / "data.npz")
    done = shell(f"{PROGRAM} train data.npz --epochs 1 --out out > /dev/full", tmp_path)
    assert done.returncode == 0
    assert "No space left" in done.stderr
    assert (tmp_path / "out" / "last.safetensors").exists()
