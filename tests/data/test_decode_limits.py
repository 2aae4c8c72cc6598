"""What decoding may cost: every file of the corpus within a time and a memory limit, in a child process."""

import io
import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from image_corpus import BROKEN, CASES, LARGE, OK, OTHER
from PIL import Image

from vitrail.data.decode import (
    BrokenImage,
    DecodeLimits,
    ImageTooLarge,
    NotAnImage,
    decode,
    open_header,
    quiet,
)
from vitrail.data.headers import read_header
from vitrail.data.limits import bytes_needed
from vitrail.errors import VitrailError
from vitrail.preprocess import Preprocess

SECONDS, MEGABYTES = 2.5, 400  # of one core, and beyond what the process had
ERRORS = {ImageTooLarge: LARGE, BrokenImage: BROKEN, NotAnImage: OTHER}


def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1000


def measure(name):
    """What becomes of a case, in how many seconds, and with how many more megabytes at the most."""
    data, preprocess, error, needed = CASES[name].make(), Preprocess(), "", 0
    with quiet(), suppress(VitrailError):
        header = read_header(io.BytesIO(data), name, DecodeLimits())
        needed = bytes_needed(open_header(io.BytesIO(data), name), header, preprocess) / 1e6
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before, start = memory("VmRSS"), time.process_time()
    try:
        with quiet():
            preprocess.pixels(decode(io.BytesIO(data), "it", preprocess=preprocess))
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
    """One child for all: it is short of memory, so that a case that takes too much does not end us."""
    command = [sys.executable, __file__, *CASES]
    # Large blocks go back to the system when they are freed, so that each case is measured by itself.
    returning = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=returning)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{done.stderr[-2000:]} after {found[-1:]}"
    return {one["name"]: one for one in found}


@pytest.mark.parametrize("name", CASES)
def test_what_a_file_may_cost(measured, name):
    found = measured[name]
    assert found["outcome"] == CASES[name].outcome, found
    assert found["seconds"] < SECONDS, found
    assert found["megabytes"] < MEGABYTES, found
    assert found["outcome"] != OK or found["megabytes"] < found["needed"] + 20, found  # the estimate holds
    assert found["outcome"] == OK or found["error"].startswith("it "), found


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
    Preprocess().pixels(Image.new("I;16", (300, 300)))  # what is imported late is imported now
    for case in sys.argv[1:]:
        print(json.dumps(measure(case)), flush=True)
