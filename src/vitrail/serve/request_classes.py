"""Classes that a request names by words, for a model with a text tower (CLIP, SigLIP).

Texts are encoded in the model's thread, a few at a time, so that other requests run in
between and nothing more is encoded for a client that has left. The vectors of the classes used last are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from vitrail.base.errors import VitrailError
from vitrail.predict.index import Embedder, unit
from vitrail.predict.prediction import Prediction
from vitrail.serve.batcher import Batcher
from vitrail.serve.messages import Client, HTTPError, busy
from vitrail.weights.bundle.scores import Scores
from vitrail.weights.text.prompts import embedding_projection, fill_templates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.predict import Predictor

MAX_LABELS = 100  # in a request
MAX_LABEL = 100  # characters
_KEPT = 4096  # classes whose vectors are kept
_PIECE_SECONDS = 0.05  # for the texts that are encoded at once
MAX_TEXTS = 64  # encoded at once, however fast they are

Labels = tuple[str, ...]


@dataclass(frozen=True)
class RequestClasses:
    """The vectors of some classes (K, E), and how their products become scores."""

    labels: Labels
    rows: NDArray[np.float32]
    bias: float
    scale: Scores


@dataclass(eq=False)
class _Class:
    """A class, some of whose texts have been encoded. Its vector is the mean of theirs, normalized."""

    left: list[str]
    """The other texts."""
    sum: NDArray[np.float32] | float = 0.0
    """Of the unit vectors, (E,)."""


@dataclass(eq=False)
class _Waiting:
    """The requests of one address that wait for texts; its requests take turns."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    requests: int = 0


class ZeroShot:
    """Predictions for classes named by words. Only the model's thread runs `_encode`; the rest is the event
    loop's."""

    def __init__(self, predictor: Predictor, batcher: Batcher) -> None:
        self.predictor, self.embed, self.batcher = predictor, Embedder(predictor), batcher
        self.kept: OrderedDict[str, _Class] = OrderedDict()
        self.turn = asyncio.Lock()  # so that the batcher has at most one piece of this model
        self.waiting: WeakValueDictionary[str, _Waiting] = WeakValueDictionary()
        self.piece = 1  # texts to encode next

    def parse(self, text: str | None) -> Labels | None:
        """The classes of a parameter such as "cat,dog"; None for the model's own."""
        if self.predictor.needs_words == (text is None):
            code, message = (
                (
                    "no_labels",
                    "has no classes of its own; name some with the request, such as labels=cat,dog.",
                )
                if text is None
                else ("no_text_tower", "has no text tower, so it takes no labels; leave them out.")
            )
            raise HTTPError(400, code, f"This model {message}")
        if text is None:
            return None
        labels = tuple(label.strip() for label in text.split(","))
        bad = [
            one
            for one in labels
            if not one or len(one) > MAX_LABEL or not one.isprintable() or "\ufffd" in one
        ]
        if bad or not 2 <= len(set(labels)) == len(labels) <= MAX_LABELS:
            message = (
                f"labels must be 2 to {MAX_LABELS} different names between commas, each of 1 to {MAX_LABEL} "
                "characters, such as cat,dog."
            )
            raise HTTPError(400, "bad_labels", message)
        return labels

    # ---- texts ------------------------------------------------------------------------------

    async def vectors(self, labels: Labels, client: Client, deadline: float) -> RequestClasses:
        """The vectors of these classes, as `vitrail predict --labels` computes them.

        After each piece it is the turn of another client, and of another request of this one. What has been
        encoded is kept even if the deadline passes, so that the request gets further when it is repeated.
        """
        waiting, limit = self.waiting.setdefault(client.address, _Waiting()), self.batcher.capacity
        if waiting.requests >= limit:
            self.batcher.metrics.rejected.inc()
            raise busy(f"The server encodes the labels of at most {limit} requests of a client")
        texts = fill_templates(labels).texts
        classes = {label: _Class(some) for label, some in zip(labels, texts, strict=True)}
        classes |= self._find(labels)
        waiting.requests += 1
        try:
            while any(one.left for one in classes.values()):
                async with waiting.turn, self.turn:
                    classes |= self._find(labels)  # other requests may have needed the same
                    await self._encode_piece(classes, deadline)
        finally:
            waiting.requests -= 1
        text = self.predictor.require_bundle().text
        rows = np.float32(text.scale) * unit(np.stack([one.sum for one in classes.values()]))
        return RequestClasses(
            labels, rows, float(text.bias or 0), Scores(labels=labels, activation=text.activation)
        )

    async def _encode_piece(self, classes: Mapping[str, _Class], deadline: float) -> None:
        piece = [(label, text) for label, one in classes.items() for text in one.left][: self.piece]
        if not piece:
            return
        encode = partial(self._encode, [text for _, text in piece])
        vectors = await self.batcher.call(encode, deadline)
        for (label, text), vector in zip(piece, vectors, strict=True):
            one = self.kept[label] = classes[label]
            one.left.remove(text)
            one.sum = one.sum + vector
            self.kept.move_to_end(label)
        while len(self.kept) > _KEPT:
            self.kept.popitem(last=False)

    def _find(self, labels: Labels) -> dict[str, _Class]:
        """The classes that are kept already."""
        found = {label: self.kept[label] for label in labels if label in self.kept}
        for label in found:
            self.kept.move_to_end(label)
        return found

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """A unit vector for each text (B, E), in the model's thread."""
        bundle, start = self.predictor.require_bundle(), time.perf_counter()
        try:
            embedding_projection(bundle)  # texts and images must be in one space
            vectors = bundle.text(texts).float().cpu().numpy()
        except VitrailError as error:
            message = "The text tower of this model cannot be used here; see vitrail predict --labels."
            raise HTTPError(400, "no_text_tower", message) from error
        seconds = time.perf_counter() - start
        self.piece = max(1, min(MAX_TEXTS, int(len(texts) * _PIECE_SECONDS / seconds)))
        self.batcher.metrics.pieces.observe(len(texts))
        return vectors

    # ---- images -----------------------------------------------------------------------------

    def predict(self, prediction: Prediction, classes: RequestClasses) -> Prediction:
        """The prediction for these classes, from that of the image tower."""
        logits = self.vector(prediction) @ classes.rows.T + np.float32(classes.bias)
        scores = classes.scale.compute(logits[None])[0]
        best = int(scores.argmax())
        return Prediction(
            prediction.name,
            label=classes.labels[best],
            score=float(scores[best]),
            embedding=prediction.embedding,
            logits=logits,
            scale=classes.scale,
        )

    def vector(self, prediction: Prediction) -> NDArray[np.float32]:
        """The unit vector of an image, (E,): the one that `vitrail embed` writes."""
        assert prediction.embedding is not None  # a prediction without an error has one
        logits = prediction.embedding if prediction.logits is None else prediction.logits
        return self.embed(prediction.embedding[None], logits[None])[0]
