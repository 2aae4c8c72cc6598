"""A model made ready to be asked.

predict = vt.Predictor("pets.safetensors")
predict("cat.jpg").label                                 # a file, a PIL image or an array: one Prediction
predict(["cat.jpg", image]), predict("photos/")          # a list or a folder: a list of them
for found in predict.stream(["photos/"]): ...            # one after the other, however many there are
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import InputError, printable
from vitrail.evaluation.forward import inputs_of
from vitrail.model.modes import evaluating
from vitrail.predict.prediction import Prediction, scale_of
from vitrail.predict.sources import expand, levels, read_ahead, reason_of
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.inspect.rollout import Method
    from vitrail.predict.sources import Found

AHEAD = 3  # batches that are read before the model wants them


class Predictor:
    """Asks a model about pictures. Neither `batch` nor `workers` changes an answer.

    Args:
        model: a bundle, or what `vitrail.load` takes.
        batch: how many pictures go through the model at once.
        workers: threads that read files meanwhile; 0 reads them in between.
        options: of `vitrail.load`, such as device="cuda".
    """

    def __init__(
        self, model: Bundle | str | Path, *, batch: int = 32, workers: int = 2, **options: Any
    ) -> None:
        for name, value, least in (("batch", batch, 1), ("workers", workers, 0)):
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a number from {least} on.", repr(value), "Such as 2.")
        if isinstance(model, Bundle) and options:
            got = f"a bundle with {', '.join(options)}"
            raise InputError("A model that is loaded already takes no options.", got, "Give them to vt.load.")
        self.bundle = model if isinstance(model, Bundle) else load(model, **options)
        self.batch, self.workers = batch, workers
        if self.bundle.preprocess is None:
            got = f"one that takes {self.bundle.model.config.input}"
            raise InputError("The model must take pictures.", got, "Use vt.load, and call its .model.")
        self.preprocess = self.bundle.preprocess
        self.config, self.card = self.bundle.model.config, self.bundle.card
        self.scale = scale_of(self.bundle)

    def __call__(self, pictures: Any) -> Any:
        """A Prediction for one picture; a list of them for a list, a folder, or an array (N, h, w, C).

        One picture that cannot be read is an error; in a list it has its reason in `.error`.
        """
        if not is_one(pictures) or is_folder(pictures):
            return list(self.stream(pictures))
        found = next(self.stream(pictures))
        if found.error is not None:
            got = found.error.rstrip(".")
            got = got if printable(found.name) in got else f"{printable(found.name)}: {got}"
            raise InputError("The picture must be readable.", got, "Give another.")
        return found

    def stream(self, pictures: Iterable[Any]) -> Iterator[Prediction]:
        """Predictions in the order of the pictures, in constant memory; `pictures` may be a generator."""
        given = [pictures] if is_one(pictures) else pictures
        ahead = AHEAD * self.batch
        with closing(read_ahead(expand(given), self.preprocess, workers=self.workers, ahead=ahead)) as read:
            while some := list(islice(read, self.batch)):
                yield from self.answer(some)

    def answer(self, some: list[tuple[str, Found]]) -> Iterator[Prediction]:
        """A batch, of which the model sees what could be read."""
        readable = [found for _, found in some if not isinstance(found, str)]
        rows = self.judge(np.stack(readable)) if readable else iter(())
        for name, found in some:
            yield Prediction(name, error=found) if isinstance(found, str) else Prediction(name, **next(rows))

    def judge(self, pixels: np.ndarray) -> Iterator[dict[str, Any]]:
        """What a Prediction holds, for each of some levels (B, H, W, C)."""
        embeddings, logits = (tensor.float().cpu().numpy() for tensor in self.run(pixels))
        for embedding, row in zip(embeddings, logits, strict=True):
            if not np.isfinite(row).all():
                yield {"error": "The model's answer is not a number: look for such in its parameters."}
                continue
            held = {"embedding": embedding.copy()}  # a view would keep the whole batch in memory
            yield held | self.label(row.copy()) if self.scale.labels else held

    def label(self, logits: np.ndarray) -> dict[str, Any]:
        """The answer that logits (K,) stand for."""
        best = int(logits.argmax())
        score = float(self.scale.scores(logits[None])[0, best])
        sure = self.scale.threshold is None or score >= self.scale.threshold
        label = self.scale.labels[best] if sure else None
        return {"label": label, "score": score, "logits": logits, "scale": self.scale}

    def run(self, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
        """Pooled vectors (B, D) and logits (B, K) of levels, which are normalised as `evaluate` does it."""
        model = self.bundle.model
        levels = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        images = inputs_of(levels, self.preprocess, next(model.parameters()))
        with evaluating(model):
            pooled = model.encode(images).pooled
            return pooled, model.logits(model.head(pooled))

    def explain(self, picture: Any, *, method: Method = "rollout") -> Figure:
        """The picture, and over it how much of each patch reached the answer: see vitrail.inspect.rollout."""
        from vitrail.inspect import rollout

        try:
            pixels = levels(picture, self.preprocess)
        except (OSError, ValueError) as error:
            got = reason_of(error).rstrip(".")
            raise InputError("The picture must be readable.", got, "Give another.") from error
        model = self.bundle.model
        images = self.preprocess.normalise(pixels)[None].to(next(model.parameters()).dtype)
        return rollout.draw(rollout.compute(model, images, method=method), pixels[None])


def is_one(pictures: Any) -> bool:
    """Whether this is one picture, or one path, rather than many of them."""
    from PIL import Image

    alone = isinstance(pictures, (str, os.PathLike, Image.Image))
    return alone or (isinstance(pictures, np.ndarray) and pictures.ndim < 4)


def is_folder(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and os.path.isdir(path)
