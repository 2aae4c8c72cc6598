"""One model of a server: its routes, its decoder processes, and the memory that it may take.

All models run in one thread, one batch at a time, and share the queue. Each has decoder processes of its own,
which know its preprocessing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import InputError, VitrailError, printable
from vitrail.base.machine import format_bytes
from vitrail.model.model_memory import forward_bytes
from vitrail.serve import insight
from vitrail.serve.batcher import Batcher, DeadlineExceeded
from vitrail.serve.decode_pool import DecodePool
from vitrail.serve.decode_worker import unfit_image
from vitrail.serve.forms import Form, Part, read_form
from vitrail.serve.messages import Client, HTTPError, Request, Response, Route, as_json, internal_error
from vitrail.serve.request_classes import MAX_TEXTS, Labels, ZeroShot
from vitrail.serve.responses import embedding_json, model_json, prediction_json
from vitrail.serve.server_settings import ServeConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.model.text_tower import TextTower
    from vitrail.predict import Prediction, Predictor

MAX_TOP = 100
FULL_SIZE_QUEUE = 8  # images in progress for a graph that resizes: each may have the maximum number of pixels


class ServedModel:
    """A model and its routes.

    Args:
        settings: the limits for this model, from `model_limits`.
        name: the name of the model in responses.
        log: called with a line about errors.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: ServeConfig,
        name: str,
        batcher: Batcher,
        log: Callable[[str], None],
    ) -> None:
        self.predictor, self.settings, self.name, self.batcher = predictor, settings, name, batcher
        self.metrics, self.log = batcher.metrics, log
        self.zero_shot = ZeroShot(predictor, batcher)
        # The decoders never load torch: images that torch or the graph resizes keep their size until then.
        self.full_size = predictor.engine.one_by_one or predictor.preprocess.backend == "torch"
        self.decoders = DecodePool(
            predictor.preprocess, settings, self.metrics, full_size=self.full_size, log=log
        )
        self.figures: dict[str, bytes] = {}
        self.description = as_json(model_json(predictor, name, settings))
        self.routes = {
            "predict": Route("POST", self.predict),
            "embed": Route("POST", self.embed),
            "explain": Route("POST", self.explain),
            "model": Route("GET", self.model),
            "filters": Route("GET", partial(self.figure, insight.filters)),
            "positions": Route("GET", partial(self.figure, insight.positions)),
        }
        """By the last part of the path."""

    # ---- routes ---------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        form = await self._read_form(request)
        top = form.integer("top", 5, 1, MAX_TOP)
        results, seconds = await self._predict_all(
            form, request, self.zero_shot.parse(form.fields.get("labels"))
        )
        rows = [prediction_json(one, part.name, top) for one, part in zip(results, form.files, strict=True)]
        return as_json({"model": self.name, "predictions": rows, "seconds": seconds})

    async def embed(self, request: Request) -> Response:
        """The unit vector of each image, as `vitrail embed` writes it."""
        form, vector = await self._read_form(request), self.zero_shot.vector
        results, seconds = await self._predict_all(form, request)
        rows = [embedding_json(one, part.name, vector) for one, part in zip(results, form.files, strict=True)]
        return as_json({"model": self.name, "embeddings": rows, "seconds": seconds})

    async def explain(self, request: Request) -> Response:
        if self.predictor.bundle is None:
            message = "An ONNX file has no weights to explain a prediction with; use /v1/predict."
            raise HTTPError(404, "no_explain", message)
        form, depth = await self._read_form(request), self.predictor.config.depth
        layer = form.integer("layer", depth - 1, 0, depth - 1)
        top = form.integer("top", 5, 1, MAX_TOP)
        if len(form.files) > 1:
            raise HTTPError(400, "one_image", "/v1/explain takes one image per request.")
        request.images = 1
        with self.batcher.reserve(1):
            async with self._within_deadline() as deadline:
                pixels = await self._decode(form.files[0], request.client)
                explain = partial(insight.explain, self.predictor, pixels, layer, top)
                body = await self._inspect(explain, deadline)
        return Response(200, body)

    async def model(self, request: Request) -> Response:
        return self.description

    async def figure(self, compute: Callable[[Predictor], dict[str, Any]], request: Request) -> Response:
        """A figure of the weights, computed once."""
        name = compute.__name__
        if name not in self.figures:
            with self.batcher.reserve(1):
                async with self._within_deadline() as deadline:
                    self.figures[name] = await self._inspect(partial(compute, self.predictor), deadline)
        return Response(200, self.figures[name])

    # ---- images ---------------------------------------------------------------------------------

    async def _read_form(self, request: Request) -> Form:
        self.batcher.check_capacity()  # before the body is read, which may take long
        return await read_form(request, self.settings.files)

    @asynccontextmanager
    async def _within_deadline(self) -> AsyncIterator[float]:
        """Stop the work for a request at its deadline, which this yields."""
        deadline = asyncio.get_running_loop().time() + self.settings.deadline
        try:
            async with asyncio.timeout_at(deadline):
                yield deadline
        except TimeoutError:
            raise DeadlineExceeded from None

    async def _predict_all(
        self, form: Form, request: Request, labels: Labels | None = None
    ) -> tuple[list[Prediction | HTTPError], dict[str, float]]:
        """The prediction for each image, and seconds; the error of a single one is that of the request."""
        timer, classes = _Timer(), None
        async with self._within_deadline() as deadline:
            if labels is not None:
                classes = await self.zero_shot.vectors(labels, request.client, deadline)
                timer.encoded = timer.decoded = timer.time()
            request.images = len(form.files)
            with self.batcher.reserve(request.images):
                results = await asyncio.gather(
                    *(self._predict_one(part, request.client, deadline, timer) for part in form.files)
                )
        if len(results) == 1 and isinstance(results[0], HTTPError):
            raise results[0]
        if classes is not None:
            results = [
                one if isinstance(one, HTTPError) else self.zero_shot.predict(one, classes) for one in results
            ]
        return results, timer.seconds()

    async def _predict_one(
        self, part: Part, client: Client, deadline: float, timer: _Timer
    ) -> Prediction | HTTPError:
        """The prediction for one image. An error affects only this image."""
        try:
            pixels = await self._decode(part, client)
            timer.decoded = timer.time()
            prediction = await self.batcher.submit(pixels, deadline, self.predictor, self.settings.batch)
        except HTTPError as error:
            return error
        except DeadlineExceeded:
            raise  # the other images of this request have the same deadline
        except Exception as error:
            return internal_error(error, self.log)
        return prediction if prediction.error is None else _not_finite()

    async def _decode(self, part: Part, client: Client) -> NDArray[np.uint8]:
        """Decode an image in one of the decoder processes."""
        start = asyncio.get_running_loop().time()
        try:
            pixels = await self.decoders.decode(part.data, client)
            if self.full_size:
                pixels = await asyncio.to_thread(self.predictor.preprocess.pixels, pixels)
        except InputError as error:
            self.metrics.bad.inc()
            raise unfit_image() from error
        except HTTPError:
            self.metrics.bad.inc()
            raise
        self.metrics.decoding.observe(asyncio.get_running_loop().time() - start)
        self.metrics.images.inc()
        return pixels

    async def _inspect(self, compute: Callable[[], dict[str, Any]], deadline: float) -> bytes:
        """Compute in the model's thread, where the long JSON is encoded too."""
        try:
            return await self.batcher.call(
                lambda: json.dumps(compute() | {"model": self.name}, allow_nan=False).encode(), deadline
            )
        except VitrailError:
            raise _not_finite() from None


class _Timer:
    """The time of a request, split into texts, decoding and model, each including waiting."""

    def __init__(self) -> None:
        self.time = asyncio.get_running_loop().time
        self.start = self.encoded = self.decoded = self.time()

    def seconds(self) -> dict[str, float]:
        end = self.time()
        return {
            "text": self.encoded - self.start,
            "decode": self.decoded - self.encoded,
            "model": end - self.decoded,
            "total": end - self.start,
        }


def _not_finite() -> HTTPError:
    message = "The model's output is NaN or infinite; check its parameters for such values."
    return HTTPError(500, "not_finite", message)


# ---- memory and warm-up ---------------------------------------------------------------------------------


def model_limits(predictor: Predictor, settings: ServeConfig, name: str) -> ServeConfig:
    """The settings of a server for one of its models; refuse a model that does not fit into its memory."""
    settings = fit_memory(predictor, settings, name)
    if not predictor.engine.one_by_one:
        return settings
    # Images of different sizes cannot share a batch. They wait at full size, so the queue is shorter.
    queue = min(settings.queue, FULL_SIZE_QUEUE)
    return replace(settings, batch=1, queue=queue, files=min(settings.files, queue))


def fit_memory(predictor: Predictor, settings: ServeConfig, name: str) -> ServeConfig:
    """The settings with a batch that fits into the memory of a model; refuse a model that does not fit."""
    limit = settings.model_memory
    if limit is None:
        return settings
    tower = _text_tower(predictor)
    weights = _weight_bytes(predictor, tower)
    texts = forward_bytes(tower.config.as_vit_config, MAX_TEXTS) if tower else 0  # not while predicting

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


def _weight_bytes(predictor: Predictor, tower: TextTower | None) -> int:
    """The bytes of all tensors in memory: the model, the rest of its file, and the text tower."""
    bundle = predictor.bundle
    if bundle is None:
        return 4 * sum(predictor.config.parameter_counts.values())
    tensors = [*bundle.model.state_dict().values(), *bundle.extras.values()]
    if tower:
        tensors += tower.state_dict().values()
    storages = [tensor.untyped_storage() for tensor in tensors]  # a tower in float32 shares those of its file
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _text_tower(predictor: Predictor) -> TextTower | None:
    if predictor.bundle is None or not predictor.needs_words:
        return None
    try:
        return predictor.bundle.text.tower
    except VitrailError:
        return None  # requests get an error


def warm_up(models: Iterable[ServedModel]) -> None:
    """Run every model before the first request: the first forward passes are slow."""
    for one in models:
        predictor, batch = one.predictor, one.settings.batch
        blank = np.zeros((*predictor.preprocess.target, predictor.preprocess.channels), np.uint8)
        few = 1 if predictor.acceleration is None else min(8, batch)  # a CUDA graph each
        for count in sorted({1, few, batch}):
            list(predictor.predict_batch([("", blank)] * count))
        if predictor.needs_words:
            with suppress(VitrailError):  # requests get an error
                predictor.require_bundle().text("a")
