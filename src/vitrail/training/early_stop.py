"""Early stopping: a function of the metrics so far, so that a resumed run stops at the same epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def early_stop(history: Sequence[Mapping[str, Any]], patience: int | None) -> str | None:
    """Why a run stops now, as a sentence; None if it continues.

    Args:
        history: the rows of metrics.jsonl; those that were not evaluated have no val_accuracy.
        patience: after how many epochs without a better validation accuracy it stops.
    """
    evaluated = [row for row in history if "val_accuracy" in row]
    if patience is None or not evaluated:
        return None
    best = max(evaluated, key=lambda row: row["val_accuracy"])  # the first of equals
    last = evaluated[-1]["epoch"]
    if last - best["epoch"] < patience:
        return None
    return (
        f"Stopped early after epoch {last}: the validation accuracy was {best['val_accuracy']:.2%} after "
        f"epoch {best['epoch']}, and not higher since (patience {patience})."
    )
