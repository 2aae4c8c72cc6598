"""The server's metrics, in the Prometheus text format.

Each metric is updated by one thread only, the event loop's or the model's, so none needs a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Counter:
    """A counter with labels."""

    kind = "counter"

    def __init__(self, name: str, doc: str, *labels: str) -> None:
        self.name, self.doc, self.labels = name, doc, labels
        self.values: dict[tuple[str, ...], int] = {} if labels else {(): 0}

    def add(self, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0) + 1

    def lines(self) -> Iterator[str]:
        for labels, value in list(self.values.items()):
            yield f"{self.name}{_format_labels(zip(self.labels, labels, strict=True))} {value}"


class Gauge:
    """A gauge that calls a function for its value."""

    kind = "gauge"

    def __init__(self, name: str, doc: str, read: Callable[[], float]) -> None:
        self.name, self.doc, self.read = name, doc, read

    def lines(self) -> Iterator[str]:
        yield f"{self.name} {self.read()}"


class Histogram:
    """A histogram with cumulative buckets."""

    kind = "histogram"

    def __init__(self, name: str, doc: str, edges: Sequence[float] = SECONDS) -> None:
        self.name, self.doc, self.edges = name, doc, edges
        self.counts, self.sum = [0] * (len(edges) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def lines(self) -> Iterator[str]:
        below = 0
        for edge, count in zip((*self.edges, "+Inf"), list(self.counts), strict=True):
            below += count
            yield f"{self.name}_bucket{_format_labels([('le', str(edge))])} {below}"
        yield f"{self.name}_sum {self.sum}"
        yield f"{self.name}_count {below}"


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.requests = Counter("vitrail_requests_total", "Responses sent.", "method", "route", "status")
        self.latency = Histogram(
            "vitrail_request_seconds", "Seconds from the head of a request to the end of its response."
        )
        self.images = Counter("vitrail_images_total", "Images decoded.")
        self.bad = Counter("vitrail_bad_images_total", "Images that could not be decoded.")
        self.rejected = Counter("vitrail_rejected_total", "Requests rejected because the queue was full.")
        self.expired = Counter("vitrail_expired_total", "Requests that exceeded their deadline.")
        self.abandoned = Counter("vitrail_abandoned_total", "Requests whose client disconnected.")
        self.dropped = Counter("vitrail_dropped_total", "Jobs dropped from the queue without being run.")
        self.killed = Counter(
            "vitrail_killed_decodes_total", "Decoder processes that ended, by reason.", "reason"
        )
        self.decoding = Histogram("vitrail_decode_seconds", "Seconds to decode an image, including waiting.")
        self.batches = Histogram("vitrail_batch_size", "Images per forward pass.", SIZES)
        self.pieces = Histogram("vitrail_text_batch_size", "Texts encoded together.", SIZES)
        self.forward = Histogram("vitrail_model_seconds", "Seconds of a forward pass.")
        self.gauges: list[Gauge] = []

    def text(self) -> str:
        rows = []
        for one in [value for value in vars(self).values() if not isinstance(value, list)] + self.gauges:
            rows += [f"# HELP {one.name} {one.doc}", f"# TYPE {one.name} {one.kind}", *one.lines()]
        return "\n".join(rows) + "\n"


def _format_labels(labels: object) -> str:
    """Format labels; their values are our own words, so none needs escaping."""
    inside = ",".join(f'{name}="{value}"' for name, value in labels)  # type: ignore[attr-defined]
    return f"{{{inside}}}" if inside else ""
