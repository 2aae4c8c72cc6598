"""The models of one server: their memory, their apps, and the warm-up of all of them.

All models run in one thread, one batch at a time, and share the queue. Each has decoder processes of its own,
which know its preprocessing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.errors import InputError, VitrailError, printable
from vitrail.base.machine import format_bytes
from vitrail.model.model_memory import forward_bytes
from vitrail.serve.app import App
from vitrail.serve.server_settings import ServeConfig
from vitrail.serve.words import MAX_TEXTS

if TYPE_CHECKING:
    from vitrail.model.text_tower import TextTower
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
    return app


def fit_memory(predictor: Predictor, settings: ServeConfig, name: str) -> ServeConfig:
    """The settings with a batch that fits into the memory of a model; refuse a model that does not fit."""
    limit = settings.model_memory
    if limit is None:
        return settings
    weights, texts = _weight_bytes(predictor), _text_bytes(predictor)

    def needed(images: int) -> int:
        return weights + max(forward_bytes(predictor.config, images), texts)

    batch = settings.batch
    while batch and needed(batch) > limit:
        batch -= 1
    if not batch:
        what = "its weights, with those of its text tower," if texts else "its weights"
        raise InputError(
            f"{printable(name)} needs {format_bytes(needed(1))} for {what} and one image, and each model "
            f"may take {format_bytes(limit)}; raise --memory, or serve a smaller model."
        )
    return replace(settings, batch=batch)


def _weight_bytes(predictor: Predictor) -> int:
    """The bytes of all tensors in memory: the model, the rest of its file, and the text tower."""
    bundle = predictor.bundle
    if bundle is None:
        return 4 * sum(predictor.config.parameter_counts.values())
    tensors = [*bundle.model.state_dict().values(), *bundle.extras.values()]
    if tower := _text_tower(predictor):
        tensors += tower.state_dict().values()
    storages = [tensor.untyped_storage() for tensor in tensors]  # a tower in float32 shares those of its file
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _text_bytes(predictor: Predictor) -> int:
    """The memory for encoding texts, which happens at other times than predicting images."""
    tower = _text_tower(predictor)
    return forward_bytes(tower.config.as_vit_config, MAX_TEXTS) if tower else 0


def _text_tower(predictor: Predictor) -> TextTower | None:
    if predictor.bundle is None or not predictor.needs_words:
        return None
    try:
        return predictor.bundle.text.tower
    except VitrailError:
        return None  # requests get an error


async def warm_up(app: App) -> None:
    """Run every model once before the first request: the first forward passes are slow."""

    def run_all() -> None:
        for one in app.apps:
            preprocess = one.predictor.preprocess
            blank = np.zeros((*preprocess.target, preprocess.channels), np.uint8)
            few = 1 if one.predictor.acceleration is None else min(8, one.settings.batch)  # a CUDA graph each
            for count in sorted({1, few, one.settings.batch}):
                list(one.predictor.predict_batch([("", blank)] * count))
            if one.zero_shot.available:
                with suppress(VitrailError):  # requests get an error
                    one.predictor.require_bundle().text("a")

    model = app.batcher.call(run_all, float("inf"))
    await asyncio.gather(*(one.decoders.start() for one in app.apps), model)
    app.ready = True


async def close_decoders(app: App) -> None:
    await asyncio.gather(*(one.decoders.close() for one in app.apps))
