"""Our own files, whose names are ours.

In a vitrail file a JSON object in the header describes the model (bundle.py). A plain state dict has no
description, and its config is inferred (state_dict.py).
"""

from __future__ import annotations

from vitrail.weights.families.family import Detection, Family, KeyMap

VITRAIL = Family(
    "vitrail",
    "vitrail",
    "a vitrail file",
    detect=Detection(metadata="vitrail"),
    keys=KeyMap(own=True),
)

STATE_DICT = Family(
    "state-dict",
    "vitrail",
    "the state dict of a vitrail model",
    detect=Detection(anchors=("{w}tokens.proj.weight", "{w}blocks.0.attention.qkv.weight")),
    keys=KeyMap(own=True),
)
