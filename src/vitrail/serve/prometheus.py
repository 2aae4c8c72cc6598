"""The metrics of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """All metrics of a server, in a registry of its own: several can run in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"vitrail_{name}_total", doc, labels, registry=registry)

        def seconds(name: str, doc: str) -> Histogram:
            return Histogram(f"vitrail_{name}_seconds", doc, registry=registry)

        def sizes(name: str, doc: str) -> Histogram:
            return Histogram(f"vitrail_{name}_size", doc, registry=registry, buckets=SIZES)

        self.requests = counter("requests", "Responses sent.", "method", "route", "status")
        self.images = counter("images", "Images decoded.")
        self.bad = counter("bad_images", "Images that could not be decoded.")
        self.rejected = counter("rejected", "Requests rejected because the queue was full.")
        self.expired = counter("expired", "Requests that exceeded their deadline.")
        self.abandoned = counter("abandoned", "Requests whose client disconnected.")
        self.dropped = counter("dropped", "Jobs dropped from the queue without being run.")
        self.killed = counter("killed_decodes", "Decoder processes that ended, by reason.", "reason")
        self.latency = seconds("request", "From the head of a request to the end of its response.")
        self.decoding = seconds("decode", "For decoding an image, including waiting.")
        self.forward = seconds("model", "For a forward pass.")
        self.batches = sizes("batch", "Images per forward pass.")
        self.pieces = sizes("text_batch", "Texts encoded together.")

    def gauge(self, name: str, doc: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is computed when it is read."""
        Gauge(f"vitrail_{name}", doc, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self.registry)
