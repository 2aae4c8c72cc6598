"""The system's Chromium, for the tests that look at pages."""

import os
import shutil

import pytest

SWITCHES = [  # Debian's Chromium without network and GPU
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="no Chromium on the path, and this is not CI"
)
