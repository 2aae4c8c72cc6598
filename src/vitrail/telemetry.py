"""No telemetry: the switches of libraries that would report to their makers (SECURITY.md has the table).

Each library reads its switch once, when it is loaded, so `disable_telemetry` comes before that. It overrides
what the user has set: Vitrail promises that nothing is reported, whatever the environment says.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from vitrail.errors import needs

SWITCHES = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, and with it hf_xet, transformers and timm
}


def disable_telemetry() -> None:
    """Set the switches, for this process and its children; before a library that has one is loaded."""
    os.environ.update(SWITCHES)
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None:  # the user's own code has loaded it, and it has read its switch
        hub.HF_HUB_DISABLE_TELEMETRY = True  # type: ignore[attr-defined]


def import_onnxruntime() -> Any:
    """ONNX Runtime without telemetry. No other code imports it: loading it can write a device id."""
    disable_telemetry()
    with needs("export"):
        import onnxruntime  # type: ignore[import-untyped]
    onnxruntime.disable_telemetry_events()  # where the user's own code loaded it, and on Windows
    return onnxruntime
