"""A model made ready to be asked.

predict = vt.Predictor("pets.safetensors")
predict("cat.jpg").label                                 # a file, a PIL image or an array: one Prediction
predict(["cat.jpg", image]), predict("photos/")          # a list or a folder: a list of them
vt.Predictor("pets.onnx")                                # the same from an exported file
for found in predict.stream(["photos/"]): ...            # one after the other, however many there are
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.errors import InputError, printable
from vitrail.fields import show
from vitrail.memory import check_fits, forward_bytes, memory_limit
from vitrail.predict.engine import open_engine
from vitrail.predict.prediction import Prediction, scale_of
from vitrail.predict.sources import expand, levels, read_ahead, reason_of
from vitrail.weights.bundle import Bundle

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitrail.inspect.rollout import Method
    from vitrail.predict.engine import Rows
    from vitrail.predict.sources import Found

MOST_BATCH, MOST_THREADS = 1_000_000, 1024
AHEAD = 3  # batches that are read before the model wants them


class Predictor:
    """Asks a model about pictures. Neither `batch` nor `workers` changes an answer.

    Args:
        model: a bundle, an .onnx file of `vitrail export`, or what `vitrail.load` takes.
        batch: how many pictures go through the model at once.
        workers: threads that read files meanwhile; 0 reads them in between.
        options: of `vitrail.load`, such as device="cuda".
    """

    def __init__(
        self, model: Bundle | str | Path, *, batch: int = 32, workers: int = 2, **options: Any
    ) -> None:
        for name, value, least, most in (
            ("batch", batch, 1, MOST_BATCH),
            ("workers", workers, 0, MOST_THREADS),
        ):
            if not isinstance(value, int) or not least <= value <= most:
                raise InputError(
                    f"{name} must be a whole number from {least} to {most:,}, not {show(value)}."
                )
        self.engine = engine = open_engine(model, options)
        self.bundle = engine.bundle  # None for an ONNX file
        self.config, self.card, self.preprocess = engine.config, engine.card, engine.preprocess
        self.scale = scale_of(engine.config, engine.labels, engine.card)
        self.batch, self.workers = 1 if engine.one_by_one else batch, workers
        self.check_fits(1)

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
        ahead = min(AHEAD * self.batch, self.room())
        with closing(read_ahead(expand(given), self.preprocess, workers=self.workers, ahead=ahead)) as read:
            while some := list(islice(read, self.batch)):
                yield from self.answer(some)

    def answer(self, some: list[tuple[str, Found]]) -> Iterator[Prediction]:
        """A batch, of which the model sees what could be read."""
        readable = [found for _, found in some if not isinstance(found, str)]
        rows = self.judge(readable) if readable else iter(())
        for name, found in some:
            yield Prediction(name, error=found) if isinstance(found, str) else Prediction(name, **next(rows))

    def judge(self, pixels: Sequence[NDArray[np.uint8]]) -> Iterator[dict[str, Any]]:
        """What a Prediction holds, for each of some levels (H, W, C)."""
        for embedding, row in zip(*self.run(pixels), strict=True):
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

    def run(self, pixels: Sequence[NDArray[np.uint8]]) -> Rows:
        """Pooled vectors (B, D) and logits (B, K) of levels."""
        self.check_fits(len(pixels))
        return self.engine.run(pixels)

    def check_fits(self, count: int) -> None:
        """Refuse a batch that cannot be computed in this machine's memory."""
        if self.bundle is not None and next(self.bundle.model.parameters()).device.type == "cpu":
            do = "use a smaller batch or size" if count > 1 else "use a smaller size"
            check_fits(forward_bytes(self.config, count), self.config, count, "A prediction", do)

    def room(self) -> int:
        """How many pictures may wait for the model: those that fill a quarter of the memory."""
        one = math.prod(self.preprocess.target) * self.preprocess.channels
        return max(1, (memory_limit() or 2**62) // 4 // one)

    def parts(self) -> Bundle:
        """The model with its weights, to look into."""
        if self.bundle is None:
            got = "an ONNX file, which has a graph and no parts to look into"
            do = "Use the vitrail file (.safetensors) that it was exported from."
            raise InputError("To see where a model looked takes the model itself.", got, do)
        return self.bundle

    def explain(self, picture: Any, *, method: Method = "rollout") -> Figure:
        """The picture, and over it how much of each patch reached the answer: see vitrail.inspect.rollout."""
        from vitrail.inspect import rollout

        model = self.parts().model
        try:
            pixels = levels(picture, self.preprocess)
        except (OSError, ValueError) as error:
            got = reason_of(error).rstrip(".")
            raise InputError("The picture must be readable.", got, "Give another.") from error
        images = self.preprocess.normalise(pixels)[None].to(next(model.parameters()).dtype)
        return rollout.draw(rollout.compute(model, images, method=method), pixels[None])


def is_one(pictures: Any) -> bool:
    """Whether this is one picture, or one path, rather than many of them."""
    from PIL import Image

    alone = isinstance(pictures, (str, os.PathLike, Image.Image))
    return alone or (isinstance(pictures, np.ndarray) and pictures.ndim < 4)


def is_folder(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and os.path.isdir(path)
