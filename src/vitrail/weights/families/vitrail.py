"""Our own files: a JSON object in the header describes the model (bundle.py), the names are ours."""

from __future__ import annotations

from vitrail.weights.family import Detection, Family, KeyMap

VITRAIL = Family(
    "vitrail",
    "vitrail",
    "a vitrail file",
    detect=Detection(metadata="vitrail"),
    keys=KeyMap(own=True),
)
