"""A prediction in parts that is killed with -9 again and again, each time while it writes them. As a script:

python -m tests.support.killed_predictions MODEL PHOTOS FOLDER FORM KILLS
"""

import csv
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from tests.support.tiny_runs import forked
from vitrail.cli import app
from vitrail.predict import Predictor


def names_in(out, form):
    """The images of all complete parts."""
    if form == "csv":
        return [row["file"] for part in out.glob("*.csv") for row in csv.DictReader(part.open())]
    names = {part: json.loads(part.with_suffix(".json").read_text()) for part in out.glob("*.npy")}
    assert all(len(np.load(part)) == len(some) for part, some in names.items())
    return [name for some in names.values() for name in some]


def kill_again_and_again(model, photos, folder, form, kills):
    """Each run is killed at a random moment after its first part. A run that was faster does not count."""
    words = ["predict", model, photos, "--format", form, "--part-size", "4", "--batch", "2", "--workers", "0"]
    out, rng, images = folder / "parts", random.Random(0), len(list(photos.rglob("*.*")))

    def start(folder):
        command = [*map(str, words), "--out", f"{folder}/", "--quiet"]
        return forked(lambda: app(command, standalone_mode=False))

    Predictor(model)  # imports here what every fork would import
    assert os.waitpid(start(folder / "all"), 0)[1] == 0
    ends = sorted(part.stat().st_mtime for part in (folder / "all").glob(f"*.{form}"))
    killed = finished = found = 0
    while killed < kills:
        parts = sorted(out.glob(f"*.{form}"))
        if len(ends) - len(parts) < 5:  # nearly done: begin again, in the middle
            for part in rng.sample(parts, 25):
                part.unlink()
        before, child = set(out.glob(f"*.{form}")), start(out)
        while not set(out.glob(f"*.{form}")) - before:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, ends[-1] - ends[0]) * (len(ends) - len(before)) / len(ends))
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        killed, finished = killed + (code == -signal.SIGKILL), finished + (code == 0)
        found += any(name.startswith(".") for name in os.listdir(out))
        names = names_in(out, form)
        assert len(names) == len(set(names)) <= images  # also between kills
    assert os.waitpid(start(out), 0)[1] == 0
    assert len(names_in(out, form)) == images
    print(json.dumps({"killed": killed, "finished": finished, "partial_files": found}))


if __name__ == "__main__":
    kill_again_and_again(*map(Path, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]))
