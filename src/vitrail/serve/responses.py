"""The JSON bodies of the routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vitrail.base.fields import is_real
from vitrail.serve.messages import HTTPError
from vitrail.serve.server_settings import ServeConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.predict import Prediction, Predictor

MAX_LABELS = 1000  # listed in /v1/model
NO_WEIGHTS = "An ONNX file has no weights to look at; serve the .safetensors file of the model instead."


def prediction_json(result: Prediction | HTTPError, name: str | None, top: int) -> dict[str, Any]:
    """The prediction for one image, or the reason why there is none."""
    error = str(result) if isinstance(result, HTTPError) else result.error
    none: dict[str, Any] = dict(label=None, score=None, unsure=False, ood=None, ood_score=None)
    body = dict(name=name, **none, labels=[], top=[], error=error)
    if isinstance(result, HTTPError) or result.logits is None:  # an error, or a model without a head
        return body
    labels, guesses = (
        [{"label": label, "score": score} for label, score in pairs]
        for pairs in (result.labels, result.top(top))
    )
    said = {name: getattr(result, name) for name in none}
    return {**body, **said, "labels": labels, "top": guesses}


def embedding_json(
    result: Prediction | HTTPError, name: str | None, vector: Callable[[Prediction], NDArray[np.float32]]
) -> dict[str, Any]:
    """The vector of one image, or the reason why there is none."""
    error = str(result) if isinstance(result, HTTPError) else result.error
    if isinstance(result, HTTPError) or error is not None:
        return dict(name=name, embedding=None, error=error)
    return dict(name=name, embedding=[float(x) for x in vector(result)], error=None)


def model_json(predictor: Predictor, name: str, settings: ServeConfig) -> dict[str, Any]:
    """The model, the limits of the server, and why explanations are unavailable, if they are."""
    config, preprocess, card = predictor.config, predictor.preprocess, predictor.card
    labels = [] if predictor.needs_words else list(predictor.scale.labels)
    weights = None if predictor.bundle is None else list(predictor.bundle.model.parameters())
    numbers = {
        name: float(value) for name, value in card.metrics.items() if is_real(value)
    }  # JSON has no NaN
    return {
        "name": name,
        "labels": {"count": len(labels), "first": labels[:MAX_LABELS]},
        "words": predictor.needs_words,
        "scores": predictor.scale.activation,
        "multilabel": predictor.scale.multilabel,
        "size": list(preprocess.target),
        "native": preprocess.keeps_shape,
        "patch": list(config.patch_pixels),
        "grid": list(config.grid),
        "channels": config.channels,
        "depth": config.depth,
        "heads": config.heads,
        "width": config.width,
        "parameters": weights and sum(parameter.numel() for parameter in weights),
        "preprocess": preprocess.describe(),
        "card": {"license": card.license, "metrics": numbers},
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
        "explain": {"available": weights is not None, "reason": None if weights else NO_WEIGHTS},
    }
