"""How a model's logits become scores: its file records it, and everything that predicts follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from vitrail.base.errors import ConfigError, suggest
from vitrail.base.fields import is_real, short_repr

Activation = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Softmax, or sigmoid for a model trained with binary cross-entropy."""

    activation: Activation = "softmax"
    thresholds: tuple[float, ...] | None = None
    """Multi-label models: a class is predicted if its score is above its threshold, one per class. None for
    models of one label per image."""

    def __post_init__(self) -> None:
        if self.activation not in get_args(Activation):
            words = get_args(Activation)
            raise ConfigError(
                f"unknown activation {short_repr(self.activation)}. {suggest(str(self.activation), words)}"
            )
        if self.thresholds is None:
            return
        if self.activation != "sigmoid":
            raise ConfigError("thresholds belong to sigmoid scores; softmax scores have none.")
        if not all(is_real(one) and 0 <= one <= 1 for one in self.thresholds):
            raise ConfigError(f"thresholds must be numbers from 0 to 1, not {short_repr(self.thresholds)}.")

    def check_classes(self, classes: int) -> None:
        """Check that there is a threshold for each class."""
        if self.thresholds is not None and len(self.thresholds) != classes:
            raise ConfigError(
                f"thresholds must be {classes} numbers, one for each class of the model, not "
                f"{len(self.thresholds)}."
            )

    def summary(self) -> str:
        """One phrase for a page or a table."""
        if self.thresholds is None:
            return f"{self.activation}, one label per image"
        low, high = min(self.thresholds, default=0.5), max(self.thresholds, default=0.5)
        at = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        return f"sigmoid, multi-label; thresholds {at}"

    def describe(self) -> dict[str, Any]:
        """For the JSON in a file."""
        return asdict(self)


def parse_scores(fields: Mapping[str, Any] | None, classes: int) -> Scores:
    """The scores in a file's JSON; a file without them is of softmax, as all were before format 2."""
    fields = dict(fields or {})
    if isinstance(thresholds := fields.get("thresholds"), list):
        fields["thresholds"] = tuple(thresholds)
    scores = Scores(**fields)
    scores.check_classes(classes)
    return scores
