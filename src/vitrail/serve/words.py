"""Classes that a request names by words, for a model with a text tower (CLIP, SigLIP).

Texts are encoded in the model's thread, the texts of a few classes at a time, so that other requests run in
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

from vitrail.errors import VitrailError
from vitrail.evaluation.scale import Scale
from vitrail.predict.index import Embedder
from vitrail.predict.prediction import Prediction
from vitrail.serve.batcher import Batcher
from vitrail.serve.messages import Client, HTTPError, busy
from vitrail.weights.prompts import TEMPLATES, fill_templates
from vitrail.weights.zero_shot import embedding_projection, prompt_vectors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.predict import Predictor

    Vector = NDArray[np.float32]

MAX_LABELS = 100  # in a request
MAX_LABEL = 100  # characters
_KEPT = 4096  # classes whose vectors are kept
_MAX_PIECE = 8  # classes whose texts are encoded at once
_PIECE_SECONDS = 0.05  # for the texts of several classes; those of one are always encoded together

MAX_TEXTS = _MAX_PIECE * len(TEMPLATES)
"""The most texts that are encoded at once."""

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """The vectors of some classes (K, E), and how their products become scores."""

    labels: Labels
    rows: NDArray[np.float32]
    bias: float
    scale: Scale


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
        self.kept: OrderedDict[str, Vector] = OrderedDict()
        self.turn = asyncio.Lock()  # so that the batcher has at most one piece of this model
        self.waiting: WeakValueDictionary[str, _Waiting] = WeakValueDictionary()
        self.piece = 1  # classes to encode next

    @property
    def available(self) -> bool:
        return self.predictor.needs_words

    def parse(self, text: str | None) -> Labels | None:
        """The classes of a parameter such as "cat,dog"; None for the model's own."""
        if text is None and self.available:
            message = (
                "This model has no classes of its own; name some with the request, such as labels=cat,dog."
            )
            raise HTTPError(400, "no_labels", message)
        if text is None:
            return None
        if not self.available:
            message = "This model has no text tower, so it takes no labels; leave them out."
            raise HTTPError(400, "no_text_tower", message)
        labels = tuple(label.strip() for label in text.split(","))
        bad = [one for one in labels if not one or len(one) > MAX_LABEL or not one.isprintable()]
        if bad or not 2 <= len(set(labels)) == len(labels) <= MAX_LABELS:
            message = (
                f"labels must be 2 to {MAX_LABELS} different names between commas, each of 1 to {MAX_LABEL} "
                "characters, such as cat,dog."
            )
            raise HTTPError(400, "bad_labels", message)
        return labels

    # ---- texts ------------------------------------------------------------------------------

    async def vectors(self, labels: Labels, client: Client, deadline: float) -> Words:
        """The vectors of these classes, as `vitrail predict --labels` computes them.

        After each piece it is the turn of another client, and of another request of this one. What has been
        encoded is kept even if the deadline passes, so that the request succeeds when it is repeated.
        """
        texts = dict(zip(labels, fill_templates(labels).texts, strict=True))
        waiting = self.waiting.setdefault(client.address, _Waiting())
        if waiting.requests >= self.batcher.capacity:
            self.batcher.metrics.rejected.add()
            raise busy(
                f"The server encodes the labels of at most {self.batcher.capacity} requests of a client"
            )
        waiting.requests += 1
        try:
            rows = self._find(labels)
            while len(rows) < len(labels):
                async with waiting.turn, self.turn:
                    rows |= self._find(labels)  # other requests may have needed the same
                    if piece := [label for label in labels if label not in rows][: self.piece]:
                        encode = partial(self._encode, [texts[label] for label in piece])
                        found = await self.batcher.call(encode, deadline)
                        rows |= self._keep(dict(zip(piece, found, strict=True)))
        finally:
            waiting.requests -= 1
        text = self.predictor.require_bundle().text
        scaled = np.float32(text.scale) * np.stack([rows[label] for label in labels])
        return Words(labels, scaled, float(text.bias or 0), Scale(labels, activation=text.activation))

    def _find(self, labels: Labels) -> dict[str, Vector]:
        """The vectors that are kept already."""
        found = {label: self.kept[label] for label in labels if label in self.kept}
        for label in found:
            self.kept.move_to_end(label)
        return found

    def _keep(self, found: Mapping[str, Vector]) -> Mapping[str, Vector]:
        self.kept.update(found)
        while len(self.kept) > _KEPT:
            self.kept.popitem(last=False)
        return found

    def _encode(self, texts: Sequence[Sequence[str]]) -> NDArray[np.float32]:
        """A vector (K, E) for the texts of each class, in the model's thread."""
        bundle, start = self.predictor.require_bundle(), time.perf_counter()
        try:
            embedding_projection(bundle)  # texts and images must be in one space
            rows = prompt_vectors(bundle, texts).float().cpu().numpy()
        except VitrailError as error:
            message = "The text tower of this model cannot be used here; see vitrail predict --labels."
            raise HTTPError(400, "no_text_tower", message) from error
        seconds = time.perf_counter() - start
        self.piece = max(1, min(_MAX_PIECE, int(len(texts) * _PIECE_SECONDS / seconds)))
        self.batcher.metrics.pieces.add(len(texts))
        return rows

    # ---- images -----------------------------------------------------------------------------

    def predict(self, prediction: Prediction, words: Words) -> Prediction:
        """The prediction for these classes, from that of the image tower."""
        logits = self.vector(prediction) @ words.rows.T + np.float32(words.bias)
        scores = words.scale.scores(logits[None])[0]
        best = int(scores.argmax())
        return Prediction(
            prediction.name,
            label=words.labels[best],
            score=float(scores[best]),
            embedding=prediction.embedding,
            logits=logits,
            scale=words.scale,
        )

    def vector(self, prediction: Prediction) -> NDArray[np.float32]:
        """The unit vector of an image, (E,): the one that `vitrail embed` writes."""
        assert prediction.embedding is not None  # a prediction without an error has one
        logits = prediction.embedding if prediction.logits is None else prediction.logits
        return self.embed(prediction.embedding[None], logits[None])[0]
