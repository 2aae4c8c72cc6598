"""Disabling the telemetry of other libraries (the table is in SECURITY.md).

Each library reads its environment variable once, on import, so `disable_telemetry` must be called before.
It overrides the user's environment: Vitrail promises that nothing is reported.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from vitrail.base.errors import require_extra

SWITCHES = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, and with it hf_xet, transformers and timm
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",  # reports of its own errors
    "RAY_USAGE_STATS_ENABLED": "0",
}


def disable_telemetry() -> None:
    """Set the environment variables, for this process and its children."""
    os.environ.update(SWITCHES)
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None:  # the user's code has imported it already
        hub.HF_HUB_DISABLE_TELEMETRY = True  # type: ignore[attr-defined]


def import_onnxruntime() -> Any:
    """Import ONNX Runtime without telemetry. No other code may import it: that can write a device id."""
    disable_telemetry()
    with require_extra("export"):
        import onnxruntime  # type: ignore[import-untyped]
    onnxruntime.disable_telemetry_events()  # if the user's code has imported it, and on Windows
    return onnxruntime
