"""What routes say, as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitrail.fields import is_real
from vitrail.serve.messages import Refusal
from vitrail.serve.settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.predict import Prediction, Predictor

LABELS = 1000  # that are listed


def prediction(found: Prediction | Refusal, name: str | None, top: int) -> dict[str, Any]:
    """What is said of one picture; of one that could not be read, why."""
    error = str(found) if isinstance(found, Refusal) else found.error
    said: dict[str, Any] = dict(name=name, label=None, score=None, unsure=False, top=[], error=error)
    if isinstance(found, Refusal) or found.logits is None:  # or a model that knows no classes
        return said
    guesses = [{"label": label, "score": score} for label, score in found.top(top)]
    return said | dict(label=found.label, score=found.score, unsure=found.unsure, top=guesses)


def model(predictor: Predictor, name: str, settings: ServeConfig, reason: str | None) -> dict[str, Any]:
    """What is served, how much of it one may ask for, and for what reason one cannot look inside."""
    config, preprocess, card = predictor.config, predictor.preprocess, predictor.card
    labels = list(predictor.scale.labels)
    return {
        "name": name,
        "labels": {"count": len(labels), "first": labels[:LABELS]},
        "size": list(preprocess.target),
        "patch": list(config.patch_pixels),
        "grid": list(config.grid),
        "channels": config.channels,
        "depth": config.depth,
        "heads": config.heads,
        "width": config.width,
        "parameters": parameters(predictor),
        "preprocess": preprocess.describe(),
        "card": {"licence": card.licence, "metrics": numbers(card.metrics)},
        "limits": {
            "bytes": settings.body,
            "pixels": settings.pixels,
            "side": settings.side,
            "decode_seconds": settings.decode_time,
            "decode_bytes": settings.decoders * settings.decode_memory,
            "files": settings.files,
            "queue": settings.queue,
            "batch": settings.batch,
            "deadline": settings.deadline,
        },
        "explain": {"there": reason is None, "reason": reason},
    }


def parameters(predictor: Predictor) -> int | None:
    """None where there are no weights to count."""
    if predictor.bundle is None:
        return None
    return sum(parameter.numel() for parameter in predictor.bundle.model.parameters())


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A file's metrics may hold anything; JSON has no word for what is not a number."""
    return {name: float(one) for name, one in metrics.items() if is_real(one)}
