"""The server as an ASGI application: its routes, who may use them, and the limits of a request.

A request is checked in this order: headers, route, method, token, Host, Origin. Only then is its body read.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.serve.batcher import Batcher, DeadlineExceeded
from vitrail.serve.messages import (
    Client,
    ClientLeft,
    HTTPError,
    Message,
    Receive,
    Request,
    Response,
    Route,
    Send,
    as_json,
    check_headers,
    client_network,
    internal_error,
    send_response,
)
from vitrail.serve.openapi import MODEL_ROUTES, build_openapi
from vitrail.serve.prometheus import Metrics
from vitrail.serve.served_model import ServedModel, model_limits, warm_up

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.serve.examples import Example
    from vitrail.serve.server_settings import ServeConfig

PAGE = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
MAX_CLIENTS = 4096  # connections whose slow images are remembered
_OF_A_MODEL = re.compile(rf"/v1/models/[^/]+/({'|'.join(MODEL_ROUTES)})")


class App:
    """An ASGI application. It starts with the server around it; mounted in another app, with its first
    request.

    Args:
        predictors: the models by name; the first is that of the page and of /v1/predict.
        examples: the example images of the page.
        log: called with a line for each request.
    """

    def __init__(
        self,
        predictors: Mapping[str, Predictor],
        settings: ServeConfig,
        *,
        examples: Sequence[Example] = (),
        log: Callable[[str], None],
    ) -> None:
        limits = {name: model_limits(one, settings, name) for name, one in predictors.items()}
        self.settings = next(iter(limits.values()))
        self.examples, self.log = examples, log
        self.metrics = Metrics()
        self.batcher = Batcher(self.settings.queue, self.metrics)
        self.models = {
            name: ServedModel(one, limits[name], name, self.batcher, log) for name, one in predictors.items()
        }
        """The models by name; the first is the default."""
        self.default = next(iter(self.models.values()))
        self.page = {
            "/" + path.name.replace("index.html", ""): (KINDS[path.suffix], path.read_bytes())
            for path in sorted(PAGE.iterdir())
            if path.suffix in KINDS
        }
        """Content type and bytes of the files of the page. No other file is ever served."""
        self.routes = self._build_routes()
        self.ready = self.stopping = False
        self.thread: threading.Thread | None = None
        """The thread that runs the models."""
        self.connections: set[Any] = set()  # of our own server
        self.clients: dict[Any, Client] = {}
        self.body_bytes = 0  # in memory, of all requests
        gauge = self.metrics.gauge
        gauge("queue_depth", "Images in progress.", lambda: self.batcher.in_progress)
        decoders = [one.decoders for one in self.models.values()]
        gauge("decodes_running", "Images being decoded.", lambda: sum(len(one.running) for one in decoders))
        gauge("connections", "Open connections.", lambda: len(self.connections))
        gauge("ready", "1 if the server accepts requests.", lambda: self.accepting)

    def _build_routes(self) -> dict[str, Route]:
        """The routes by template."""
        model = {f"/v1/{name}": self.default.routes[name] for name in MODEL_ROUTES}
        routes = {
            **model,
            "/v1/examples": Route("GET", self.list_examples),
            "/v1/examples/{number}": Route("GET", self.example),
            "/healthz": Route("GET", self.healthz),
            "/readyz": Route("GET", self.readyz),
            "/metrics": Route("GET", self.show_metrics),
            "/openapi.json": Route("GET", self.openapi),
            **{path: Route("GET", self.file) for path in self.page},
        }
        if len(self.models) > 1:
            routes["/v1/models"] = Route("GET", self.list_models)
            for name in MODEL_ROUTES:
                route = Route(model[f"/v1/{name}"].method, partial(self.of_a_model, name))
                routes[f"/v1/models/{{model}}/{name}"] = route
        return routes

    @property
    def accepting(self) -> bool:
        return self.ready and not self.stopping

    # ---- start and stop ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start the decoders and, unless the server has a thread for it, the model; run each model once."""
        if self.thread is None:
            run = partial(self.batcher.run, self._on_crash)
            self.thread = threading.Thread(target=run, name="model", daemon=True)
            self.thread.start()
        await asyncio.gather(
            *(one.decoders.start() for one in self.models.values()),
            self.batcher.call(lambda: warm_up(self.models.values()), float("inf")),
        )
        self.ready = True

    async def stop(self) -> None:
        """End the decoders and the model's thread."""
        self.stopping = True
        await asyncio.gather(*(one.decoders.close() for one in self.models.values()))
        self.batcher.close()

    def _on_crash(self, error: BaseException) -> None:
        self.ready = False
        internal_error(error, self.log)

    # ---- ASGI -------------------------------------------------------------------------------

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._live(receive, send)
            case "http":
                if self.thread is None:
                    await self.start()
                await self._answer(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        """The lifespan of the server around the app."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        start, status = clock(), 499  # unless a response is sent before the client leaves
        mount, names = scope.get("root_path", ""), [name.lower() for name, _ in scope["headers"]]
        values = [value.decode("latin-1") for _, value in scope["headers"]]
        request = Request(
            app=self,
            receive=receive,
            method=scope["method"],
            path=scope["path"].removeprefix(mount) or "/",
            query=scope.get("query_string", b"").decode("latin-1"),
            headers=dict(zip((name.decode("latin-1") for name in names), values, strict=True)),
            client=self._client(scope.get("client")),
            mount=mount,
        )
        try:
            response = await self._respond_unless_client_leaves(request, names)
            await send_response(response, send, with_body=request.method != "HEAD")
            status = response.status
        except ClientLeft:
            pass
        finally:
            request.release()
            self.record_response(request, status, clock() - start)

    def _client(self, peer: tuple[str, int] | None) -> Client:
        """The client of a connection, as its earlier requests have shown it."""
        client = self.clients.pop(peer, None) or Client(client_network(peer))
        self.clients[peer] = client
        if len(self.clients) > MAX_CLIENTS:
            del self.clients[next(iter(self.clients))]
        return client

    async def _respond_unless_client_leaves(self, request: Request, names: list[bytes]) -> Response:
        work = asyncio.ensure_future(self._respond(request, names))
        left = asyncio.ensure_future(request.wait_for_disconnect())
        try:
            await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientLeft
            return work.result()
        except HTTPError as error:
            return error.response()
        except ClientLeft:
            raise
        except Exception as error:
            return internal_error(error, self.log).response()
        finally:
            work.cancel()
            left.cancel()

    def record_response(self, request: Request | None, status: int, seconds: float) -> None:
        """Count and log a response. Status 499: the client left first. None: not a valid request."""
        method = request.method if request and request.method in ("GET", "HEAD", "POST") else "other"
        route, images = (request.route, request.images) if request else ("unknown", 0)
        self.metrics.requests.labels(method, route, str(status)).inc()
        self.metrics.latency.observe(seconds)
        if status == 499:
            self.metrics.abandoned.inc()
        self.log(f"{method} {route} {status} {seconds * 1000:.1f} ms {images} images")

    # ---- all requests -----------------------------------------------------------------------

    async def _respond(self, request: Request, names: list[bytes]) -> Response:
        check_headers(names, request.headers)
        template = _template_of(request.path)
        route = self.routes.get(template)
        if route is None:
            raise _not_found()
        request.route = template
        self._check_access(request, route.method)
        try:
            return await route.handler(request)
        except DeadlineExceeded:
            self.metrics.expired.inc()
            message = f"There was no result within {self.settings.deadline:g} seconds; try again later."
            raise HTTPError(504, "deadline_exceeded", message) from None

    def _check_access(self, request: Request, method: str) -> None:
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            allow = "GET, HEAD" if method == "GET" else method
            raise HTTPError(405, "wrong_method", f"This route accepts only {allow}.", (("Allow", allow),))
        guarded = request.route.startswith("/v1/") or request.route == "/metrics"
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        sent, token = f"{scheme.capitalize()} {credentials}", self.settings.token  # the scheme ignores case
        if token and guarded and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            header = (("WWW-Authenticate", "Bearer"),)
            message = "The token is missing or wrong; send it in the header Authorization: Bearer."
            raise HTTPError(401, "bad_token", message, header)
        if guarded and not self.settings.accepts_host(request.headers.get("host", "").lower()):
            message = (
                "The Host header must be an IP address or localhost; for other names, start the server with "
                "a token or with --public."
            )
            raise HTTPError(403, "wrong_host", message)
        origin = request.headers.get("origin")
        if method == "POST" and origin and origin.partition("://")[2] != request.headers.get("host"):
            message = "Requests from other web pages are not allowed; open the page of this server."
            raise HTTPError(403, "wrong_origin", message)

    # ---- routes; those of a model are in served_model.py ---------------------------------------

    async def list_models(self, request: Request) -> Response:
        rows = [
            {"name": name, "url": f"{request.mount}/v1/models/{name}", "default": one is self.default}
            for name, one in self.models.items()
        ]
        return as_json(rows)

    async def of_a_model(self, route: str, request: Request) -> Response:
        """A route of one of the models."""
        name = request.path.split("/")[-2]
        if name not in self.models:
            raise HTTPError(404, "no_such_model", "There is no model of this name; see /v1/models.")
        return await self.models[name].routes[route].handler(request)

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
        return Response(200, self.metrics.text(), "text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return as_json(build_openapi(self.settings, several=len(self.models) > 1, mount=request.mount))

    async def file(self, request: Request) -> Response:
        kind, data = self.page[request.path]
        return Response(200, data, kind, (("Cache-Control", "no-cache"),))


def _template_of(path: str) -> str:
    """The template of a path that has a part of its own."""
    if path.startswith("/v1/examples/"):
        return "/v1/examples/{number}"
    if match := _OF_A_MODEL.fullmatch(path):
        return f"/v1/models/{{model}}/{match[1]}"
    return path


def _not_found() -> HTTPError:
    return HTTPError(404, "not_found", "There is no such route; see /openapi.json.")
