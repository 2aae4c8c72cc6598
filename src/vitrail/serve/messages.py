"""Requests, responses and errors, and their form in ASGI."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vitrail.serve.app import App

Headers = tuple[tuple[str, str], ...]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_HEAD = 16 * 2**10  # bytes of a request's head, and of any line between the chunks of a body
SECURITY = (
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"),
    ("Referrer-Policy", "no-referrer"),
)
SINGLE = (b"host", b"authorization", b"origin", b"content-type")  # must not be repeated


@dataclass(eq=False)
class Client:
    """A connection, as the decode queue sees it."""

    address: str
    slow: bool | None = None
    """Whether its last image was slow to decode; None before the first one."""


def client_network(peer: tuple[str, int] | None) -> str:
    """The address of a client; of IPv6 the first 64 bits, since a client can choose the rest."""
    if not peer:
        return ""  # it has disconnected already
    address = ip_address(peer[0].partition("%")[0])
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or address.exploded[:19])
    return str(address)


class ClientLeft(Exception):
    """The client has disconnected."""


@dataclass(eq=False)
class Request:
    """A request, whose body its route reads once, within the limits of the server."""

    app: App = field(repr=False)
    receive: Receive
    method: str
    path: str
    query: str
    headers: dict[str, str]
    client: Client
    mount: str = ""
    """The path below which the app is mounted in another one; `path` is without it."""
    route: str = field(default="unknown", init=False)
    """The template of its route, for log and metrics, which must not contain text from clients."""
    images: int = field(default=0, init=False)
    body_bytes: int = field(default=0, init=False)
    """In memory."""
    complete: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def read(self) -> bytes:
        """Read the body, counting its bytes: Content-Length may be wrong or missing."""
        settings, parts = self.app.settings, []
        length = self.headers.get("content-length", "0")
        self._check(int(length) if length.isascii() and length.isdigit() else 0)
        try:
            async with asyncio.timeout(settings.body_time):
                more = True
                while more:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part, more = message.get("body", b""), message.get("more_body", False)
                    self._check(len(part))
                    self.body_bytes += len(part)
                    self.app.body_bytes += len(part)
                    parts.append(part)
        except TimeoutError:
            raise timed_out("body", settings.body_time) from None
        self.complete.set()
        return b"".join(parts)

    def _check(self, more: int) -> None:
        settings = self.app.settings
        if self.body_bytes + more > settings.body:
            raise HTTPError(
                413, "too_large", f"A request may have at most {settings.body:,} bytes; send less at once."
            )
        if self.app.body_bytes + more > settings.bodies:
            raise busy("The server has no memory left for request bodies")

    def release(self) -> None:
        self.app.body_bytes -= self.body_bytes
        self.body_bytes = 0

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has left; nothing else can come after the body."""
        await self.complete.wait()
        while (await self.receive())["type"] != "http.disconnect":
            pass


def check_headers(names: list[bytes], headers: dict[str, str]) -> None:
    """Refuse headers that proxies and servers may interpret differently."""
    for name in SINGLE:
        if names.count(name) > 1:
            message = f"The header {name.decode().title()} appears more than once; send it once."
            raise HTTPError(400, "repeated_header", message)
    if not headers.get("host", "-").strip():
        raise HTTPError(400, "no_host", "The Host header is empty; send the name of the server.")
    if {"content-length", "transfer-encoding"} <= headers.keys():  # request smuggling
        raise malformed(400)


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes = b""
    kind: str = "application/json"
    headers: Headers = (("Cache-Control", "no-store"),)


def as_json(value: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(value, allow_nan=False).encode())


class Route(NamedTuple):
    """What answers the requests of a path template."""

    method: str
    handler: Callable[[Request], Awaitable[Response]]


async def send_response(response: Response, send: Send, *, with_body: bool = True) -> None:
    """Send a response, without its body for HEAD."""
    rows = [("Content-Type", response.kind), ("Content-Length", str(len(response.body)))]
    headers = [
        (name.lower().encode(), value.encode()) for name, value in (*rows, *SECURITY, *response.headers)
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body if with_body else b""})


class HTTPError(Exception):
    """An error response with a message for people and a code for programs.

    Messages contain no paths, no reprs, no text of a library and nothing that a client sent.
    """

    def __init__(self, status: int, code: str, message: str, headers: Headers = ()) -> None:
        super().__init__(code)
        self.status, self.headers = status, headers
        self.error = {"code": code, "message": message}

    def __str__(self) -> str:
        return self.error["message"]

    def response(self) -> Response:
        plain = as_json({"error": self.error}, self.status)
        return Response(plain.status, plain.body, headers=plain.headers + self.headers)


def internal_error(error: BaseException, log: Callable[[str], None]) -> HTTPError:
    """The response to an unexpected exception; the log says where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name}, line {frames[-1].lineno}" if frames else "asyncio"
    log(f"internal error: {type(error).__name__} in {where}")
    return HTTPError(500, "internal_error", "Internal error; see the log of the server.")


def busy(limit: str) -> HTTPError:
    """The error for a full server; `limit` is a clause that says what is full."""
    return HTTPError(503, "busy", f"{limit}; try again in a moment.", (("Retry-After", "1"),))


def timed_out(part: str, seconds: float) -> HTTPError:
    message = f"The {part} of the request did not arrive within {seconds:g} seconds; send it faster."
    return HTTPError(408, f"slow_{part}", message)


def malformed(status: int) -> HTTPError:
    """The error for a request that is not valid HTTP, with the status that h11 suggests."""
    if status == 431:
        message = f"The head of a request may have at most {MAX_HEAD:,} bytes; send fewer or shorter headers."
        return HTTPError(status, "long_head", message)
    if status == 501:
        message = "Unknown Transfer-Encoding; send a Content-Length, or use chunked encoding."
        return HTTPError(status, "unknown_encoding", message)
    return HTTPError(
        status, "malformed", "This is not a valid HTTP/1.0 or HTTP/1.1 request; use an HTTP client."
    )
