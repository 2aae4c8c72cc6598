"""Two processes (gloo) stop after the same step, and no step waits for the other process or the device."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.tiny_runs import write_arrays
from tests.support.two_ranks import __file__ as program
from vitrail.training.epoch import LOG_EVERY


def two_ranks(what, folder):
    """The results of both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(path for path in (os.getcwd(), os.environ.get("PYTHONPATH")) if path)
    children = [
        subprocess.Popen(
            [sys.executable, program, what, folder, str(rank), str(port)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [child.communicate(timeout=120)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], errors
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(2)]


def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path):
    """A step later; and the steps before have read nothing from a device and waited for no collective."""
    write_arrays(tmp_path / "data.npz")
    for found in two_ranks("run", tmp_path):
        assert (found["signal"], found["step"]) == (signal.SIGTERM, 8)
        for step in range(1, 8):
            waits = found["waits"].get(str(step), {})
            assert waits["background"] == 1
            assert "blocking" not in waits, (step, waits)
            # The signal of the last step, which is on the CPU; the first one has none to read.
            assert waits.get("read", 0) == (step > 1), (step, waits)
    assert LOG_EVERY > 8  # where metrics are read
    assert (tmp_path / "run" / "checkpoints" / "step-00000008" / "manifest.json").exists()


@pytest.mark.slow
def test_a_group_that_the_caller_has_made_for_gpus_gets_one_for_cpus(tmp_path):
    for found in two_ranks("gpus", tmp_path):
        assert found == {"signals": [0, 0, signal.SIGTERM], "any": True, "sum": 3}
