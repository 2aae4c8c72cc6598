"""Our own format: one file with weights, config, preprocessing, labels and card."""

from typing import Any

from vitrail.base.moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
