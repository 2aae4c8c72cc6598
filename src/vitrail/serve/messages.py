"""Requests, responses and errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Headers = tuple[tuple[str, str], ...]

MAX_HEAD = 16 * 2**10  # bytes of a request's head, and of any line between the chunks of a body


@dataclass(eq=False)
class Client:
    """A connection, as the decode queue sees it."""

    address: str
    slow: bool | None = None
    """Whether its last image was slow to decode; None before the first one."""


@dataclass
class Request:
    """A request. The route reads the body, once, when it needs it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    read: Callable[[], Awaitable[bytes]]
    client: Client
    mount: str = ""
    """The path below which the app is mounted in another one; `path` is without it."""
    route: str = field(default="unknown", init=False)
    """The template of its route, for log and metrics, which must not contain text from clients."""
    images: int = field(default=0, init=False)


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes = b""
    kind: str = "application/json"
    headers: Headers = (("Cache-Control", "no-store"),)


def as_json(value: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(value, allow_nan=False).encode())


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


def busy(limit: str) -> HTTPError:
    """The error for a full server; `limit` is a clause that says what is full."""
    return HTTPError(503, "busy", f"{limit}; try again in a moment.", (("Retry-After", "1"),))


def too_large(limit: int) -> HTTPError:
    return HTTPError(413, "too_large", f"A request may have at most {limit:,} bytes; send less at once.")


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
