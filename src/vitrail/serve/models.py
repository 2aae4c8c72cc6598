"""The models of one server: their memory, their apps, and the warm-up of all of them.

All models run in one thread, one batch at a time, and share the queue. Each has decoder processes of its own,
which know its preprocessing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vitrail.errors import InputError, printable
from vitrail.memory import format_bytes, forward_bytes
from vitrail.serve.app import App
from vitrail.serve.settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.examples import Example


def build_app(
    predictors: Mapping[str, Predictor],
    settings: ServeConfig,
    *,
    page: dict[str, tuple[str, bytes]],
    examples: Sequence[Example],
    log: Callable[[str], None],
) -> App:
    """An app with the first model, and the others below /v1/models/NAME/ beside it."""
    (name, first), *others = predictors.items()
    parts = {"page": page, "log": log}
    app = App(first, fit_memory(first, settings, name), name=name, examples=examples, **parts)  # type: ignore[arg-type]
    for one, predictor in others:
        limited = fit_memory(predictor, settings, one)
        app.models[one] = App(predictor, limited, name=one, page={}, examples=(), log=log, shared=app)
    if app.models:
        app.models = {name: app, **app.models}
        app.routes = {route.template: route for route in app.all_routes()}
    return app


def fit_memory(predictor: Predictor, settings: ServeConfig, name: str) -> ServeConfig:
    """The settings with a batch that fits into the memory of a model; refuse a model that does not fit."""
    limit = settings.model_memory
    if limit is None:
        return settings
    weights = 4 * sum(predictor.config.parameter_counts.values())
    if predictor.bundle is not None:
        state = predictor.bundle.model.state_dict().values()
        weights = sum(tensor.numel() * tensor.element_size() for tensor in state)
    batch = settings.batch
    while batch and weights + forward_bytes(predictor.config, batch) > limit:
        batch -= 1
    if not batch:
        needed = weights + forward_bytes(predictor.config, 1)
        raise InputError(
            f"{printable(name)} needs {format_bytes(needed)} for its weights and one image, and each model "
            f"may take {format_bytes(limit)}; raise --memory, or serve a smaller model."
        )
    return replace(settings, batch=batch)


async def warm_up(app: App) -> None:
    """Run every model once before the first request: the first forward passes are slow."""
    apps = list(app.models.values()) or [app]

    def predict_blank() -> None:
        for one in apps:
            preprocess = one.predictor.preprocess
            blank = np.zeros((*preprocess.target, preprocess.channels), np.uint8)
            few = 1 if one.predictor.acceleration is None else min(8, one.settings.batch)  # a CUDA graph each
            for count in sorted({1, few, one.settings.batch}):
                list(one.predictor.predict_batch([("", blank)] * count))

    model = app.batcher.call(predict_blank, float("inf"))
    await asyncio.gather(*(one.decoders.start() for one in apps), model)
    app.ready = True


async def close_decoders(app: App) -> None:
    await asyncio.gather(*(one.decoders.close() for one in list(app.models.values()) or [app]))
