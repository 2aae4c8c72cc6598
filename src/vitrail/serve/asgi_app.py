"""The same server as an ASGI application, to run under uvicorn or to mount in FastAPI.

Routes, answers, checks and limits of the work are those of `vitrail serve`. What belongs to the connection
(timeouts of head and body, the number of connections) is the other server's.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.serve.app import App
from vitrail.serve.http import SECURITY, BodyCount, check_headers, client_network
from vitrail.serve.messages import Client, HTTPError, Request, Response, timed_out
from vitrail.serve.served_models import build_app, close_decoders, warm_up
from vitrail.serve.server import page_files
from vitrail.serve.server_settings import ServeConfig

if TYPE_CHECKING:
    from vitrail.predict import Predictor

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def build_asgi(
    models: Predictor | str | Path | Mapping[str, Predictor | str | Path],
    settings: ServeConfig | None = None,
    **options: Any,
) -> AsgiApp:
    """See `vitrail.serve.asgi`."""
    from vitrail.predict import Predictor

    named = models if isinstance(models, Mapping) else {"": models}
    predictors = {
        name: model if isinstance(model, Predictor) else Predictor(model, **options)
        for name, model in named.items()
    }
    if "" in predictors:
        predictor = predictors.pop("")
        given = models if isinstance(models, (str, Path)) else ""
        predictors = {predictor.card.name or Path(given).stem or "model": predictor}
    app = build_app(
        predictors,
        settings or ServeConfig(),
        page=page_files(),
        examples=(),
        log=lambda line: print(line, file=sys.stderr),
    )
    return AsgiApp(app)


class AsgiApp:
    """An ASGI application. It starts with the server; mounted in another app, with its first request."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.thread: threading.Thread | None = None
        self.starting = asyncio.Lock()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._live(receive, send)
            case "http":
                await self.start()
                await self._answer(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1000})

    # ---- start and stop ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start the model's thread and the decoders, once."""
        async with self.starting:
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self.app.batcher.run, args=[self._on_crash], name="model", daemon=True
                )
                self.thread.start()
                await warm_up(self.app)

    async def stop(self) -> None:
        """End the decoders and the model's thread."""
        self.app.stopping = True
        if self.thread is not None:
            await close_decoders(self.app)
            self.app.batcher.close()

    def _on_crash(self, error: BaseException) -> None:
        self.app.ready = False
        self.app.internal_error(error)

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

    # ---- one request ------------------------------------------------------------------------

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        start, body = clock(), _Body(self.app, receive)
        request = None
        try:
            request = _request(scope, body)
            response = await self._respond(request, body)
        except ClientGone:
            self.app.record_response(request, 499, clock() - start)
            return
        except HTTPError as error:
            response = error.response()
        except Exception as error:
            response = self.app.internal_error(error).response()
        finally:
            body.count.release()
        await _send(response, send, with_body=scope["method"] != "HEAD")
        self.app.record_response(request, response.status, clock() - start)

    async def _respond(self, request: Request, body: _Body) -> Response:
        """The response of the app, unless the client disconnects first."""
        work = asyncio.ensure_future(self.app.respond(request))
        gone = asyncio.ensure_future(body.wait_for_disconnect())
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            return work.result()
        finally:
            work.cancel()
            gone.cancel()


class ClientGone(Exception):
    """The client has disconnected."""


class _Body:
    """Reads the body of a request, within the limits of the server."""

    def __init__(self, app: App, receive: Receive) -> None:
        self.settings, self.receive, self.count = app.settings, receive, BodyCount(app)
        self.length = 0  # as the request has it
        self.complete = asyncio.Event()

    async def read(self) -> bytes:
        parts: list[bytes] = []
        self.count.check(self.length)
        try:
            async with asyncio.timeout(self.settings.body_time):
                more = True
                while more:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    self.count.add(len(parts[-1]))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise timed_out("body", self.settings.body_time) from None
        self.complete.set()
        return b"".join(parts)

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has left; nothing else can come after the body."""
        await self.complete.wait()
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _request(scope: Message, body: _Body) -> Request:
    """A request in our own words; the path starts where the app is mounted."""
    rows = [(name.lower(), value) for name, value in scope["headers"]]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in rows}
    check_headers([name for name, _ in rows], headers)
    length = headers.get("content-length", "0")
    body.length = int(length) if length.isascii() and length.isdigit() else 0
    mount = scope.get("root_path", "")
    path = scope["path"].removeprefix(mount) or "/"
    client = Client(client_network(scope.get("client")))
    query = scope.get("query_string", b"").decode("latin-1")
    return Request(scope["method"], path, query, headers, body.read, client, mount)


async def _send(response: Response, send: Send, *, with_body: bool) -> None:
    headers = [("Content-Type", response.kind), ("Content-Length", str(len(response.body)))]
    rows = [
        (name.lower().encode(), value.encode()) for name, value in (*headers, *SECURITY, *response.headers)
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": rows})
    await send({"type": "http.response.body", "body": response.body if with_body else b""})
