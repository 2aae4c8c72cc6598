"""What a server counts, in the text that Prometheus reads.

Each number is written by one thread alone, the event loop's or the model's, so that none needs a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Counter:
    """How often something happened, by its labels."""

    kind = "counter"

    def __init__(self, name: str, doc: str, *labels: str) -> None:
        self.name, self.doc, self.labels = name, doc, labels
        self.values: dict[tuple[str, ...], int] = {} if labels else {(): 0}

    def add(self, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0) + 1

    def lines(self) -> Iterator[str]:
        for labels, value in list(self.values.items()):
            yield f"{self.name}{braces(zip(self.labels, labels, strict=True))} {value}"


class Gauge:
    """How much of something there is now."""

    kind = "gauge"

    def __init__(self, name: str, doc: str, read: Callable[[], float]) -> None:
        self.name, self.doc, self.read = name, doc, read

    def lines(self) -> Iterator[str]:
        yield f"{self.name} {self.read()}"


class Histogram:
    """How large something was, as counts below some sizes."""

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
            yield f"{self.name}_bucket{braces([('le', str(edge))])} {below}"
        yield f"{self.name}_sum {self.sum}"
        yield f"{self.name}_count {below}"


class Metrics:
    """Everything that is counted."""

    def __init__(self) -> None:
        self.requests = Counter("vitrail_requests_total", "Answers.", "method", "route", "status")
        self.latency = Histogram("vitrail_request_seconds", "From a request's head to the end of its answer.")
        self.pictures = Counter("vitrail_pictures_total", "Pictures that could be read.")
        self.bad = Counter("vitrail_bad_pictures_total", "Pictures that could not be read.")
        self.rejected = Counter("vitrail_rejected_total", "Requests for whose pictures there was no place.")
        self.expired = Counter("vitrail_expired_total", "Requests that were not answered in time.")
        self.abandoned = Counter("vitrail_abandoned_total", "Requests whose client left.")
        self.dropped = Counter("vitrail_dropped_total", "Jobs that left the queue without being run.")
        self.killed = Counter("vitrail_killed_decodes_total", "Decoder processes ended, by reason.", "reason")
        self.decoding = Histogram("vitrail_decode_seconds", "From a picture's bytes to levels, with waiting.")
        self.batches = Histogram("vitrail_batch_size", "Pictures in the model at once.", SIZES)
        self.thinking = Histogram("vitrail_model_seconds", "The model's time for a batch.")
        self.gauges: list[Gauge] = []

    def text(self) -> str:
        rows = []
        for one in [value for value in vars(self).values() if not isinstance(value, list)] + self.gauges:
            rows += [f"# HELP {one.name} {one.doc}", f"# TYPE {one.name} {one.kind}", *one.lines()]
        return "\n".join(rows) + "\n"


def braces(labels: object) -> str:
    """Label values are words of our own: none needs escaping."""
    inside = ",".join(f'{name}="{value}"' for name, value in labels)  # type: ignore[attr-defined]
    return f"{{{inside}}}" if inside else ""
