"""Tests that need a GPU: `python -m pytest tests/gpu`, under eight minutes. Results go to gpu-tests.json.

$VITRAIL_GPU_RESULTS names another file. The file has the commit, the versions and the outcome of each test.
"""

import json
import os
import subprocess
from pathlib import Path

import torch

_OUTCOMES = {}


def pytest_runtest_logreport(report):
    if "tests/gpu" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _OUTCOMES[report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}


def pytest_sessionfinish(session):
    if not _OUTCOMES or not torch.cuda.is_available():
        return
    here = Path(__file__).parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    result = {
        "commit": git.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tests": _OUTCOMES,
    }
    Path(os.environ.get("VITRAIL_GPU_RESULTS", "gpu-tests.json")).write_text(
        json.dumps(result, indent=1) + "\n"
    )
