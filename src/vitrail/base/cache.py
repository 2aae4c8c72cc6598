"""The cache folder: files that save time and may be deleted at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$VITRAIL_CACHE, or vitrail in $XDG_CACHE_HOME, or ~/.cache/vitrail. It need not exist."""
    if own := os.environ.get("VITRAIL_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "vitrail"
    return Path("~/.cache/vitrail").expanduser()
