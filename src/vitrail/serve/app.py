"""The routes: what a server can be asked, and by whom.

Before a route sees a request, the request has passed in this order: is there such a route, such a method,
may this client ask, does this web page belong here. Only then is a body read.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vitrail.errors import InputError, VitrailError
from vitrail.serve import answers, insight
from vitrail.serve.batcher import Batcher, Expired
from vitrail.serve.decode_pool import DecodePool
from vitrail.serve.forms import read_form, wanted
from vitrail.serve.http import Site
from vitrail.serve.images import unfit
from vitrail.serve.messages import Client, Refusal, Request, Response, as_json
from vitrail.serve.metrics import Gauge, Metrics
from vitrail.serve.multipart import Part
from vitrail.serve.openapi import describe
from vitrail.serve.settings import ServeConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitrail.predict import Prediction, Predictor
    from vitrail.serve.examples import Example

MOST_TOP = 100
WHOLE = 8  # pictures inside of a model that resizes by itself: each may have as many pixels as are allowed


@dataclass(frozen=True)
class Route:
    template: str
    method: str
    answer: Callable[[Request], Awaitable[Response]]

    @property
    def guarded(self) -> bool:
        """Whether it needs the token, where there is one, and else a name that is surely ours."""
        return self.template.startswith("/v1/") or self.template == "/metrics"


class Watch:
    """Where a request's time went. Waiting counts where it was waited."""

    def __init__(self) -> None:
        self.time = asyncio.get_running_loop().time
        self.start = self.decoded = self.time()

    def seconds(self) -> dict[str, float]:
        """Until the last picture was decoded, from there to the answer, and both."""
        end = self.time()
        return {"decode": self.decoded - self.start, "model": end - self.decoded, "total": end - self.start}


class App(Site):
    """A model, and the routes that lead to it.

    Args:
        name: the model's, for those who ask.
        page: files by their path, such as "/style.css", with their kind: all that is served besides routes.
        examples: pictures that the page offers.
        log: takes a line for each request.
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
    ) -> None:
        if predictor.engine.one_by_one:
            # A batch wins nothing, and each would wait for all. What waits are whole pictures: fewer fit.
            queue = min(settings.queue, WHOLE)
            settings = replace(settings, batch=1, queue=queue, files=min(settings.files, queue))
        super().__init__(settings)
        self.predictor, self.name, self.page, self.examples, self.log = predictor, name, page, examples, log
        self.metrics, self.ready = Metrics(), False
        self.batcher = Batcher(predictor, places=settings.queue, batch=settings.batch, metrics=self.metrics)
        # torch is not in the decoders: where it resizes, it does so here, as a graph that resizes would
        self.whole = predictor.engine.one_by_one or predictor.preprocess.backend == "torch"
        self.decoders = DecodePool(
            predictor.preprocess, settings, self.metrics, whole=self.whole, log=self.log
        )
        self.figures: dict[str, bytes] = {}
        reason = insight.reason_against(predictor)
        self.description = as_json(answers.model(predictor, name, settings, reason))
        self.routes = {route.template: route for route in self.all_routes()}
        self.metrics.gauges = [
            Gauge("vitrail_queue_depth", "Pictures inside.", lambda: self.batcher.taken),
            Gauge("vitrail_decodes_running", "Images being decoded.", lambda: len(self.decoders.running)),
            Gauge("vitrail_connections", "Clients connected.", lambda: len(self.connections)),
            Gauge("vitrail_ready", "1 where requests are welcome.", lambda: int(self.welcome)),
        ]

    def all_routes(self) -> list[Route]:
        return [
            Route("/v1/predict", "POST", self.predict),
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

    @property
    def welcome(self) -> bool:
        return self.ready and not self.stopping

    # ---- every request ----------------------------------------------------------------------

    async def answer(self, request: Request) -> Response:
        try:
            route = self.route_of(request)
            request.route = route.template
            self.check(request, route)
            return await route.answer(request)
        except Expired:
            self.metrics.expired.add()
            must = f"An answer must be there within {self.settings.deadline:g} seconds."
            raise Refusal(504, "late", must, "none in time", "Try again later.") from None

    def route_of(self, request: Request) -> Route:
        path = "/v1/examples/{number}" if request.path.startswith("/v1/examples/") else request.path
        route = self.routes.get(path)
        if route is None:
            raise unknown()
        return route

    def check(self, request: Request, route: Route) -> None:
        if request.method != route.method and (request.method, route.method) != ("HEAD", "GET"):
            allow = "GET, HEAD" if route.method == "GET" else route.method
            must = f"This route takes {allow}."
            raise Refusal(405, "wrong_method", must, "another method", "Use that one.", (("Allow", allow),))
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        given, token = f"{scheme.capitalize()} {sent}", self.settings.token  # HTTP takes "bearer" too
        if token and route.guarded and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            header = (("WWW-Authenticate", "Bearer"),)
            must = "This route needs the server's token."
            do = "Send it as Authorization: Bearer."
            raise Refusal(401, "no_token", must, "none, or another", do, header)
        if route.guarded and not self.settings.knows(request.headers.get("host", "").lower()):
            must = "This server must be asked by an address or as localhost."
            do = "Or let it be started with a token, or with --public."
            raise Refusal(403, "other_host", must, "another name", do)
        origin = request.headers.get("origin")
        if route.method == "POST" and origin and origin.partition("://")[2] != request.headers.get("host"):
            do = "Open the page that this server has."
            raise Refusal(403, "other_origin", "Only its own page may ask this server.", "another", do)

    def failed(self, error: BaseException) -> Refusal:
        """A mistake of ours. The client learns that it was; the log, where."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "asyncio"
        self.log(f"bug: {type(error).__name__} in {where}")
        must = "The server must have an answer."
        return Refusal(500, "bug", must, "a mistake of its own", "Look at the server's log.")

    def done(self, request: Request | None, status: int, seconds: float) -> None:
        method = request.method if request and request.method in ("GET", "HEAD", "POST") else "other"
        route, pictures = (request.route, request.pictures) if request else ("unknown", 0)
        self.metrics.requests.add(method, route, str(status))
        self.metrics.latency.add(seconds)
        if status == 499:
            self.metrics.abandoned.add()
        self.log(f"{method} {route} {status} {seconds * 1000:.1f} ms {pictures} pictures")

    # ---- pictures ---------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        self.batcher.check_room()  # before a body is read, which may take its time
        form = await read_form(request, self.settings.files)
        top = wanted(form, "top", 5, 1, MOST_TOP)
        request.pictures = len(form.files)
        watch = Watch()
        async with self.inside(len(form.files)) as due:
            found = await asyncio.gather(
                *(self.judge(part, request.client, due, watch) for part in form.files)
            )
        if len(found) == 1 and isinstance(found[0], Refusal):
            raise found[0]
        said = [answers.prediction(one, part.name, top) for one, part in zip(found, form.files, strict=True)]
        return as_json({"model": self.name, "predictions": said, "seconds": watch.seconds()})

    async def explain(self, request: Request) -> Response:
        if insight.reason_against(self.predictor):
            must, do = "The model must have weights to look at.", "Use /v1/predict."
            raise Refusal(404, "no_explain", must, "one in ONNX", do)
        self.batcher.check_room()  # before a body is read, which may take its time
        form = await read_form(request, self.settings.files)
        depth = self.predictor.config.depth
        layer = wanted(form, "layer", depth - 1, 0, depth - 1)
        top = wanted(form, "top", 5, 1, MOST_TOP)
        if len(form.files) > 1:
            raise Refusal(400, "one_picture", "Explain takes one picture.", "several", "Send one.")
        request.pictures = 1
        async with self.inside(1) as due:
            levels = await self.decode(form.files[0], request.client)
            said = await self.look(lambda: insight.explain(self.predictor, levels, layer, top), due)
        return Response(200, said)

    @asynccontextmanager
    async def inside(self, count: int) -> AsyncIterator[float]:
        """So many places, and the time by which whoever has them must be answered."""
        due = asyncio.get_running_loop().time() + self.settings.deadline
        with self.batcher.room(count):
            try:
                async with asyncio.timeout_at(due):
                    yield due
            except TimeoutError:
                raise Expired from None

    async def judge(self, part: Part, client: Client, due: float, watch: Watch) -> Prediction | Refusal:
        """The answer for one picture. Whatever is wrong with it is its own affair alone."""
        try:
            levels = await self.decode(part, client)
            watch.decoded = watch.time()
            found = await self.batcher.submit(levels, due)
        except Refusal as refusal:
            return refusal
        except Expired:
            raise  # there is no time left for the others of this request either
        except Exception as error:
            return self.failed(error)
        return found if found.error is None else no_answer()

    async def decode(self, part: Part, client: Client) -> NDArray[np.uint8]:
        """The pixels of an image, from a process of the decoders."""
        start = asyncio.get_running_loop().time()
        try:
            pixels = await self.decoders.decode(part.data, client)
            if self.whole:
                pixels = await asyncio.to_thread(self.predictor.preprocess.pixels, pixels)
        except InputError as error:
            self.metrics.bad.add()
            raise unfit() from error
        except Refusal:
            self.metrics.bad.add()
            raise
        self.metrics.decoding.add(asyncio.get_running_loop().time() - start)
        self.metrics.pictures.add()
        return pixels

    # ---- the model --------------------------------------------------------------------------

    async def model(self, request: Request) -> Response:
        return self.description

    async def figure(self, name: str) -> Response:
        """A figure of the weights, which is computed once."""
        if name not in self.figures:
            compute = getattr(insight, name)
            async with self.inside(1) as due:
                self.figures[name] = await self.look(lambda: compute(self.predictor), due)
        return Response(200, self.figures[name])

    async def look(self, compute: Callable[[], dict[str, Any]], due: float) -> bytes:
        """What is seen inside the model, as JSON, which is made in the model's thread too: it is long."""
        try:
            return await self.batcher.call(
                lambda: json.dumps(compute() | {"model": self.name}, allow_nan=False).encode(), due
            )
        except VitrailError:
            raise no_answer() from None

    # ---- everything else --------------------------------------------------------------------

    async def list_examples(self, request: Request) -> Response:
        return as_json(
            [{"name": one.name, "url": f"/v1/examples/{i}"} for i, one in enumerate(self.examples)]
        )

    async def example(self, request: Request) -> Response:
        number = request.path.rpartition("/")[2]
        if request.path.count("/") != 3 or number not in map(str, range(len(self.examples))):
            raise unknown()
        found = self.examples[int(number)]
        return Response(200, found.data, found.kind)

    async def healthz(self, request: Request) -> Response:
        return as_json({"live": True})

    async def readyz(self, request: Request) -> Response:
        return as_json({"ready": self.welcome}, 200 if self.welcome else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(200, self.metrics.text().encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return as_json(describe(self.settings))

    async def file(self, request: Request) -> Response:
        kind, data = self.page[request.path]
        return Response(200, data, kind, (("Cache-Control", "no-cache"),))


def no_answer() -> Refusal:
    do = "Look for such numbers in its parameters."
    return Refusal(500, "no_answer", "The model's answer must be a number.", "NaN or infinity", do)


def unknown() -> Refusal:
    return Refusal(404, "unknown", "There must be such a route.", "another", "See /openapi.json.")
