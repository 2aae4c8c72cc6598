"""Real data that lies beside the clone, in ../shared: not part of the repository."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared(name):
    """The path of a shared file, such as "data/tinyshakespeare.txt".

    In CI, where the folder lies beside the clone, a missing file is a failure. Elsewhere the test is
    skipped, and its reason says what was not run.
    """
    path = SHARED / name
    if not path.exists():
        if os.environ.get("CI") == "true" and SHARED.exists():
            pytest.fail(f"../shared is here but {name} is not")
        pytest.skip(f"needs ../shared/{name}")
    return path
