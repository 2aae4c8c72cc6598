"""Classes that a request names by words, for a model with a text tower (CLIP, SigLIP).

The vectors of the words are computed in the model's thread, and those used last are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vitrail.errors import InputError
from vitrail.evaluation.scale import Scale
from vitrail.predict.index import Embedder
from vitrail.predict.prediction import Prediction
from vitrail.serve.messages import HTTPError
from vitrail.weights.prompts import fill_templates
from vitrail.weights.zero_shot import embedding_projection, prompt_vectors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.predict import Predictor

MAX_LABELS = 100  # in a request
MAX_LABEL = 100  # characters
_KEPT = 256  # lists of classes whose vectors are kept

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """The vectors of some classes (K, E), and how their products become scores."""

    labels: Labels
    rows: NDArray[np.float32]
    bias: float
    scale: Scale


class ZeroShot:
    """Predictions for classes named by words."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.embed = predictor, Embedder(predictor)
        self.kept: OrderedDict[Labels, Words] = OrderedDict()

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

    def vectors(self, labels: Labels) -> Words:
        """The vectors of these classes, as `vitrail predict --labels` computes them."""
        if labels not in self.kept:
            bundle = self.predictor.require_bundle()
            try:
                embedding_projection(bundle)  # texts and images must be in one space
                rows = prompt_vectors(bundle, fill_templates(labels)).float().cpu().numpy()
            except InputError as error:
                message = "The text tower of this model cannot be used here; see vitrail predict --labels."
                raise HTTPError(400, "no_text_tower", message) from error
            text = bundle.text
            scale = Scale(labels, activation=text.activation)
            self.kept[labels] = Words(labels, np.float32(text.scale) * rows, float(text.bias or 0), scale)
            if len(self.kept) > _KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(labels)
        return self.kept[labels]

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
