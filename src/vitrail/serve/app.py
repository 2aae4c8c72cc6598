"""The routes, and who may use them.

A request is checked in this order: route, method, token, Host, Origin. Only then is its body read.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import InputError, VitrailError
from vitrail.serve import insight
from vitrail.serve.batcher import Batcher, DeadlineExceeded
from vitrail.serve.decode_pool import DecodePool
from vitrail.serve.forms import integer_parameter, read_form
from vitrail.serve.http import Application
from vitrail.serve.messages import Client, HTTPError, Request, Response, as_json
from vitrail.serve.multipart import Form, Part
from vitrail.serve.openapi import build_openapi
from vitrail.serve.prometheus import Gauge, Metrics
from vitrail.serve.received_images import unfit_image
from vitrail.serve.responses import embedding_json, model_json, prediction_json
from vitrail.serve.routes import MODEL_ROUTES, RequestTimer, Route, template_of
from vitrail.serve.server_settings import ServeConfig
from vitrail.serve.words import Words, ZeroShot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.predict import Prediction, Predictor
    from vitrail.serve.examples import Example

MAX_TOP = 100
FULL_SIZE_QUEUE = 8  # images in progress for a graph that resizes: each may have the maximum number of pixels


class App(Application):
    """A model and its routes.

    Args:
        name: the name of the model in responses.
        page: the static files as (content type, bytes), by path such as "/style.css".
        examples: the example images of the page.
        log: called with a line for each request.
        shared: the app of the server's first model, whose queue and metrics this one uses.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: ServeConfig,
        *,
        name: str,
        page: dict[str, tuple[str, bytes]],
        examples: Sequence[Example],
        log: Callable[[str], None],
        shared: App | None = None,
    ) -> None:
        if predictor.engine.one_by_one:
            # Images of different sizes cannot share a batch. They wait at full size, so the queue is shorter.
            queue = min(settings.queue, FULL_SIZE_QUEUE)
            settings = replace(settings, batch=1, queue=queue, files=min(settings.files, queue))
        super().__init__(settings)
        self.predictor, self.name, self.page, self.examples, self.log = predictor, name, page, examples, log
        self.ready = False
        self.models: dict[str, App] = {}
        """All models by name, this one included, if there are several."""
        self.metrics: Metrics = Metrics() if shared is None else shared.metrics
        self.batcher: Batcher = shared.batcher if shared else Batcher(settings.queue, self.metrics)
        self.zero_shot = ZeroShot(predictor, self.batcher)
        # The decoders never load torch: images that torch or the graph resizes keep their size until then.
        self.full_size = predictor.engine.one_by_one or predictor.preprocess.backend == "torch"
        self.decoders = DecodePool(
            predictor.preprocess, settings, self.metrics, full_size=self.full_size, log=self.log
        )
        self.figures: dict[str, bytes] = {}
        reason = insight.unavailable_reason(predictor)
        words = self.zero_shot.available
        self.description = as_json(model_json(predictor, name, settings, reason, words=words))
        if shared is not None:
            return
        self.metrics.gauges = [
            Gauge("vitrail_queue_depth", "Images in progress.", lambda: self.batcher.in_progress),
            Gauge("vitrail_decodes_running", "Images being decoded.", self._count_decodes),
            Gauge("vitrail_connections", "Open connections.", lambda: len(self.connections)),
            Gauge("vitrail_ready", "1 if the server accepts requests.", lambda: int(self.accepting)),
        ]

    @property
    def apps(self) -> list[App]:
        """The apps of all models."""
        return list(self.models.values()) or [self]

    def _count_decodes(self) -> int:
        return sum(len(one.decoders.running) for one in self.apps)

    @cached_property
    def routes(self) -> dict[str, Route]:
        """The routes by template, once all models are known."""
        routes = [
            Route("/v1/predict", "POST", self.predict),
            Route("/v1/embed", "POST", self.embed),
            Route("/v1/explain", "POST", self.explain),
            Route("/v1/model", "GET", self.model),
            Route("/v1/filters", "GET", lambda request: self.figure("filters")),
            Route("/v1/positions", "GET", lambda request: self.figure("positions")),
            Route("/v1/examples", "GET", self.list_examples),
            Route("/v1/examples/{number}", "GET", self.example),
            Route("/healthz", "GET", self.healthz),
            Route("/readyz", "GET", self.readyz),
            Route("/metrics", "GET", self.show_metrics),
            Route("/openapi.json", "GET", self.openapi),
            *(Route(path, "GET", self.file) for path in self.page),
        ]
        if self.models:
            methods = {route.template: route.method for route in routes}
            routes.append(Route("/v1/models", "GET", self.list_models))
            for name in MODEL_ROUTES:
                template, method = f"/v1/models/{{model}}/{name}", methods[f"/v1/{name}"]
                routes.append(Route(template, method, self.of_a_model))
        return {route.template: route for route in routes}

    @property
    def accepting(self) -> bool:
        return self.ready and not self.stopping

    # ---- all requests ----------------------------------------------------------------------

    async def respond(self, request: Request) -> Response:
        try:
            route = self._find_route(request)
            request.route = route.template
            self._check_access(request, route)
            return await route.handler(request)
        except DeadlineExceeded:
            self.metrics.expired.add()
            message = f"There was no result within {self.settings.deadline:g} seconds; try again later."
            raise HTTPError(504, "deadline_exceeded", message) from None

    def _find_route(self, request: Request) -> Route:
        route = self.routes.get(template_of(request.path))
        if route is None:
            raise _not_found()
        return route

    def _check_access(self, request: Request, route: Route) -> None:
        if request.method != route.method and (request.method, route.method) != ("HEAD", "GET"):
            allow = "GET, HEAD" if route.method == "GET" else route.method
            raise HTTPError(405, "wrong_method", f"This route accepts only {allow}.", (("Allow", allow),))
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        sent, token = f"{scheme.capitalize()} {credentials}", self.settings.token  # the scheme ignores case
        if token and route.guarded and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            header = (("WWW-Authenticate", "Bearer"),)
            message = "The token is missing or wrong; send it in the header Authorization: Bearer."
            raise HTTPError(401, "bad_token", message, header)
        if route.guarded and not self.settings.accepts_host(request.headers.get("host", "").lower()):
            message = (
                "The Host header must be an IP address or localhost; for other names, start the server with "
                "a token or with --public."
            )
            raise HTTPError(403, "wrong_host", message)
        origin = request.headers.get("origin")
        if route.method == "POST" and origin and origin.partition("://")[2] != request.headers.get("host"):
            message = "Requests from other web pages are not allowed; open the page of this server."
            raise HTTPError(403, "wrong_origin", message)

    def internal_error(self, error: BaseException) -> HTTPError:
        """The response to an unexpected exception; the log says where it was raised."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "asyncio"
        self.log(f"internal error: {type(error).__name__} in {where}")
        return HTTPError(500, "internal_error", "Internal error; see the log of the server.")

    def record_response(self, request: Request | None, status: int, seconds: float) -> None:
        method = request.method if request and request.method in ("GET", "HEAD", "POST") else "other"
        route, images = (request.route, request.images) if request else ("unknown", 0)
        self.metrics.requests.add(method, route, str(status))
        self.metrics.latency.add(seconds)
        if status == 499:
            self.metrics.abandoned.add()
        self.log(f"{method} {route} {status} {seconds * 1000:.1f} ms {images} images")

    # ---- images ---------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        form = await self._read_form(request)
        top = integer_parameter(form, "top", 5, 1, MAX_TOP)
        labels = self.zero_shot.parse(form.fields.get("labels"))
        timer, words = RequestTimer(), None
        async with self._within_deadline() as deadline:
            if labels is not None:
                words = await self.zero_shot.vectors(labels, request.client, deadline)
                timer.texts_encoded()
            results = await self._predict_all(form, request, deadline, timer, words)
        predictions = [
            prediction_json(result, part.name, top) for result, part in zip(results, form.files, strict=True)
        ]
        return as_json({"model": self.name, "predictions": predictions, "seconds": timer.seconds()})

    async def embed(self, request: Request) -> Response:
        """The unit vector of each image, as `vitrail embed` writes it."""
        form, timer = await self._read_form(request), RequestTimer()
        async with self._within_deadline() as deadline:
            results = await self._predict_all(form, request, deadline, timer)
        rows = [
            embedding_json(result, part.name, self.zero_shot.vector)
            for result, part in zip(results, form.files, strict=True)
        ]
        return as_json({"model": self.name, "embeddings": rows, "seconds": timer.seconds()})

    async def _predict_all(
        self, form: Form, request: Request, deadline: float, timer: RequestTimer, words: Words | None = None
    ) -> list[Prediction | HTTPError]:
        """The prediction for each image; the error of a single one is the error of the request."""
        request.images = len(form.files)
        with self.batcher.reserve(len(form.files)):
            results = await asyncio.gather(
                *(self._predict_one(part, request.client, deadline, timer) for part in form.files)
            )
        if len(results) == 1 and isinstance(results[0], HTTPError):
            raise results[0]
        if words is None:
            return results
        return [one if isinstance(one, HTTPError) else self.zero_shot.predict(one, words) for one in results]

    async def explain(self, request: Request) -> Response:
        if insight.unavailable_reason(self.predictor):
            message = "An ONNX file has no weights to explain a prediction with; use /v1/predict."
            raise HTTPError(404, "no_explain", message)
        form, depth = await self._read_form(request), self.predictor.config.depth
        layer = integer_parameter(form, "layer", depth - 1, 0, depth - 1)
        top = integer_parameter(form, "top", 5, 1, MAX_TOP)
        if len(form.files) > 1:
            raise HTTPError(400, "one_image", "/v1/explain takes one image per request.")
        request.images = 1
        with self.batcher.reserve(1):
            async with self._within_deadline() as deadline:
                pixels = await self._decode(form.files[0], request.client)
                explain = partial(insight.explain, self.predictor, pixels, layer, top)
                body = await self._inspect(explain, deadline)
        return Response(200, body)

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

    async def _predict_one(
        self, part: Part, client: Client, deadline: float, timer: RequestTimer
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
            return self.internal_error(error)
        return prediction if prediction.error is None else _not_finite()

    async def _decode(self, part: Part, client: Client) -> NDArray[np.uint8]:
        """Decode an image in one of the decoder processes."""
        start = asyncio.get_running_loop().time()
        try:
            pixels = await self.decoders.decode(part.data, client)
            if self.full_size:
                pixels = await asyncio.to_thread(self.predictor.preprocess.pixels, pixels)
        except InputError as error:
            self.metrics.bad.add()
            raise unfit_image() from error
        except HTTPError:
            self.metrics.bad.add()
            raise
        self.metrics.decoding.add(asyncio.get_running_loop().time() - start)
        self.metrics.images.add()
        return pixels

    # ---- several models -----------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        rows = [
            {"name": name, "url": f"{request.mount}/v1/models/{name}", "default": app is self}
            for name, app in self.models.items()
        ]
        return as_json(rows)

    async def of_a_model(self, request: Request) -> Response:
        """A route of one of the models."""
        *_, name, route = request.path.split("/")
        if name not in self.models:
            raise HTTPError(404, "no_such_model", "There is no model of this name; see /v1/models.")
        return await self.models[name].routes[f"/v1/{route}"].handler(request)

    # ---- the model --------------------------------------------------------------------------

    async def model(self, request: Request) -> Response:
        return self.description

    async def figure(self, name: str) -> Response:
        """A figure of the weights, computed once."""
        if name not in self.figures:
            compute = getattr(insight, name)
            with self.batcher.reserve(1):
                async with self._within_deadline() as deadline:
                    self.figures[name] = await self._inspect(partial(compute, self.predictor), deadline)
        return Response(200, self.figures[name])

    async def _inspect(self, compute: Callable[[], dict[str, Any]], deadline: float) -> bytes:
        """Compute in the model's thread, where the long JSON is encoded too."""
        try:
            return await self.batcher.call(
                lambda: json.dumps(compute() | {"model": self.name}, allow_nan=False).encode(), deadline
            )
        except VitrailError:
            raise _not_finite() from None

    # ---- everything else --------------------------------------------------------------------

    async def list_examples(self, request: Request) -> Response:
        return as_json(
            [{"name": one.name, "url": f"/v1/examples/{i}"} for i, one in enumerate(self.examples)]
        )

    async def example(self, request: Request) -> Response:
        number = request.path.rpartition("/")[2]
        if request.path.count("/") != 3 or number not in map(str, range(len(self.examples))):
            raise _not_found()
        example = self.examples[int(number)]
        return Response(200, example.data, example.kind)

    async def healthz(self, request: Request) -> Response:
        return as_json({"live": True})

    async def readyz(self, request: Request) -> Response:
        return as_json({"ready": self.accepting}, 200 if self.accepting else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(200, self.metrics.text().encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return as_json(build_openapi(self.settings, several=bool(self.models), mount=request.mount))

    async def file(self, request: Request) -> Response:
        kind, data = self.page[request.path]
        return Response(200, data, kind, (("Cache-Control", "no-cache"),))


def _not_finite() -> HTTPError:
    message = "The model's output is NaN or infinite; check its parameters for such values."
    return HTTPError(500, "not_finite", message)


def _not_found() -> HTTPError:
    return HTTPError(404, "not_found", "There is no such route; see /openapi.json.")
