"""A route, and the clock of a request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from vitrail.serve.messages import Request, Response

MODEL_ROUTES = ("predict", "embed", "explain", "model", "filters", "positions")
"""What each of several models has under /v1/models/NAME/."""
_OF_A_MODEL = re.compile(rf"/v1/models/[^/]+/({'|'.join(MODEL_ROUTES)})")


@dataclass(frozen=True)
class Route:
    """A path template, its method and its handler."""

    template: str
    method: str
    handler: Callable[[Request], Awaitable[Response]]

    @property
    def guarded(self) -> bool:
        """Whether it needs the token, if there is one, and otherwise a trusted Host header."""
        return self.template.startswith("/v1/") or self.template == "/metrics"


def template_of(path: str) -> str:
    """The template of a path that has a part of its own."""
    if path.startswith("/v1/examples/"):
        return "/v1/examples/{number}"
    if match := _OF_A_MODEL.fullmatch(path):
        return f"/v1/models/{{model}}/{match[1]}"
    return path


class RequestTimer:
    """The time of a request, split into texts, decoding and model, each including waiting."""

    def __init__(self) -> None:
        self.time = asyncio.get_running_loop().time
        self.start = self.encoded = self.decoded = self.time()

    def texts_encoded(self) -> None:
        """The labels of the request have their vectors, and decoding starts."""
        self.encoded = self.decoded = self.time()

    def seconds(self) -> dict[str, float]:
        """Seconds for the texts of labels, until the last image was decoded, from there to the prediction,
        and in total."""
        end = self.time()
        return {
            "text": self.encoded - self.start,
            "decode": self.decoded - self.encoded,
            "model": end - self.decoded,
            "total": end - self.start,
        }
