"""Early stopping, the same for a resumed run; and the device of a run."""

import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    fingerprints,
    rows,
    stopped_and_resumed,
    train,
    write_arrays,
)
from vitrail.base.errors import ConfigError
from vitrail.cli import app
from vitrail.model.device import choose_device
from vitrail.training.epoch import early_stop

FLAT = {**SETTINGS, "epochs": 9, "lr": 1e-9, "ema": None}  # the accuracy hardly changes


def history(*scores):
    return [
        {"epoch": epoch} if score is None else {"epoch": epoch, "val_accuracy": score}
        for epoch, score in enumerate(scores, start=1)
    ]


def test_when_it_stops():
    assert early_stop(history(0.5, 0.6, 0.6), None) is None
    assert early_stop(history(0.5, 0.6, 0.6), 2) is None
    assert (
        "after epoch 4: the validation accuracy was 60.00% after epoch 2, and not higher since"
        in early_stop(history(0.5, 0.6, 0.6, 0.5), 2)
    )
    assert early_stop(history(0.5, 0.4, 0.6), 2) is None
    assert early_stop(history(None, 0.5, None), 1) is None  # not evaluated since
    assert early_stop(history(None, 0.5, None, 0.5), 1)
    assert early_stop([], 1) is None


def test_a_run_stops_early_and_resumes_to_the_same(data, tmp_path):
    callback = RecordingCallback()
    train(data, out=tmp_path / "whole", patience=2, callback=callback, **FLAT)
    scores = [row["val_accuracy"] for row in rows(tmp_path / "whole")]
    last = scores.index(max(scores)) + 1 + 2  # two epochs after the best one
    assert len(scores) == last < 9
    assert rows(tmp_path / "whole")[-1]["seconds_left"] == 0
    assert sum(f"Stopped early after epoch {last}" in note for note in callback.notes) == 1
    assert (tmp_path / "whole" / "last.safetensors").exists()
    stopped_and_resumed(data, tmp_path / "run", 12, patience=2, **FLAT)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "whole")
    (tmp_path / "run" / "last.safetensors").unlink()  # killed after the last checkpoint
    train(out=tmp_path / "run", resume=True)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "whole")


def test_a_test_set_does_not_decide_when_to_stop(tmp_path):
    arrays = dict(np.load(write_arrays(tmp_path / "data.npz")))
    np.savez(tmp_path / "test.npz", **{name.replace("val", "test"): a for name, a in arrays.items()})
    with pytest.raises(ConfigError, match="patience needs a validation set"):
        train(tmp_path / "test.npz", out=tmp_path / "run", patience=2, **FLAT)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--device=cuda:7", r"cuda:7 needs GPU 7, and"),
        ("--device=tpu", "device must be auto, cpu, cuda, cuda:N or mps, not 'tpu'"),
        ("--device=mps", "--device mps needs a Mac"),
        ("--patience=0", "--patience"),
    ],
)
def test_wrong_values(option, message, data, tmp_path):
    done = CliRunner().invoke(app, ["train", str(data), "--out", str(tmp_path / "run"), option])
    assert done.exit_code != 0
    assert re.search(message, f"{done.output} {done.exception}")
    assert not (tmp_path / "run").exists()


def test_the_cpu_on_request():
    compute = choose_device("auto", device="cpu")
    assert (compute.device.type, compute.reason) == ("cpu", "the CPU, fp32: as requested")
