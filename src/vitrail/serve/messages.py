"""What goes to and fro between a client and the routes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Headers = tuple[tuple[str, str], ...]

HEAD = 16 * 2**10  # bytes of a request's head, and of any line between the chunks of a body


@dataclass(eq=False)
class Client:
    """A connection, as the decoders' queue knows it."""

    address: str
    slow: bool | None = None
    """Whether its last image took long to decode; None before there was any."""


@dataclass
class Request:
    """What a client asks. Its body is read when a route wants it, and then once."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    read: Callable[[], Awaitable[bytes]]
    client: Client
    route: str = field(default="unknown", init=False)
    """Its template, for log and metrics: whatever the client made up stays out of these."""
    pictures: int = field(default=0, init=False)


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes = b""
    kind: str = "application/json"
    headers: Headers = (("Cache-Control", "no-store"),)


def as_json(value: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(value, allow_nan=False).encode())


class Refusal(Exception):
    """An answer that is an error, with the three parts that all errors have here and a word for programs.

    Its texts are ours alone: no paths, no reprs, no words of a library, nothing that a client sent.
    """

    def __init__(
        self, status: int, code: str, message: str, got: str = "", do: str = "", headers: Headers = ()
    ) -> None:
        super().__init__(code)
        self.status, self.headers = status, headers
        self.error = {"code": code, "message": f"{message} Got {got}. {do}" if do else message}

    def __str__(self) -> str:
        return self.error["message"]

    def response(self) -> Response:
        plain = as_json({"error": self.error}, self.status)
        return Response(plain.status, plain.body, headers=plain.headers + self.headers)


def busy(must: str, got: str) -> Refusal:
    """There are others; come again."""
    return Refusal(503, "busy", must, got, "Try again in a moment.", (("Retry-After", "1"),))


def too_large(most: int) -> Refusal:
    return Refusal(413, "too_large", f"A request may have {most:,} bytes.", "more", "Send less at once.")


def slow(what: str, seconds: float) -> Refusal:
    must = f"The {what} of a request must come within {seconds:g} seconds."
    return Refusal(408, f"slow_{what}", must, "a part of it", "Send it faster.")


def malformed(status: int) -> Refusal:
    """Not HTTP as we know it: 400, or what HTTP has for it."""
    if status == 431:
        must = f"The head of a request may have {HEAD:,} bytes."
        return Refusal(status, "long_head", must, "more", "Send fewer or shorter headers.")
    if status == 501:
        must, got = "A body must have a Content-Length, or come in chunks.", "another Transfer-Encoding"
        return Refusal(status, "unknown_encoding", must, got, "Use one of these.")
    return Refusal(status, "malformed", "A request must be HTTP/1.1 or 1.0.", "none", "Use an HTTP client.")
