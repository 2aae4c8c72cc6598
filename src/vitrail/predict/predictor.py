"""Predictions from images, files and folders.

predict = vt.Predictor("pets.safetensors")
predict("cat.jpg").label                       # a file, a PIL image, an array or a tensor: one Prediction
predict(["cat.jpg", image]), predict("photos/")          # a list or a folder: a list of them
vt.Predictor("pets.onnx")                                # the same from an exported file
for prediction in predict.stream(["photos/"]): ...       # one at a time, in constant memory
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.base.fields import short_repr
from vitrail.base.machine import memory_limit
from vitrail.fast.accelerate import Speedup
from vitrail.fast.gate import MIN_AGREEMENT
from vitrail.fast.inference_routes import Acceleration
from vitrail.images.decode import read_pixels
from vitrail.images.pixels import check_pixel_range
from vitrail.images.workers import check_workers, in_background
from vitrail.model import ViT
from vitrail.model.model_memory import check_fits, forward_bytes
from vitrail.predict.engine import open_engine
from vitrail.predict.image_sources import describe_error, expand_paths, prefetch
from vitrail.predict.prediction import Prediction
from vitrail.weights.bundle.bundle import Bundle

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from PIL.Image import Image

    from vitrail.predict.engine import Outputs
    from vitrail.predict.image_sources import PixelsOrReason
    from vitrail.views.rollout import Method

MAX_BATCH = 1_000_000
PREFETCH = 3  # batches that are read ahead of the model


class Predictor:
    """Predict labels, scores and embeddings. `workers` does not change them, `batch` by rounding only.

    A Predictor is safe in threads: several may use it, or its model, at the same time, and each answer is
    what it is alone. Only a training step of the model must wait until no other thread predicts with it.

    Args:
        model: a bundle, a ViT (with default preprocessing), an .onnx file written by `vitrail export`, or
            what `vitrail.load` takes.
        batch: images per forward pass.
        workers: processes that read files ahead (threads for fewer than 400 files); "auto" chooses by the
            cores that this process may use, 0 reads in the calling thread.
        precision: "auto", "fp32", "bf16", "fp8" or "int8" accelerates the model, see `vitrail.accelerate`;
            None computes in bf16 on a GPU, without measuring, and as it is on a CPU.
        calibration: for int8 and fp8: a folder of images like those to come, or a list of them.
        min_agreement, keep: as in `vitrail.accelerate`.
        native: whether images keep their aspect ratio: each is resized to as many whole patches as the
            model's own size has, and images of different shapes share a batch. The model then accepts any
            size (`ViT.accept_any_size`). None is as the model was trained.
        options: passed to `vitrail.load`, such as device="cpu". A file is computed on a GPU if one can be
            used, a bundle or a ViT where it is.
    """

    def __init__(
        self,
        model: Bundle | ViT | str | Path,
        *,
        batch: int = 32,
        workers: int | Literal["auto"] = "auto",
        precision: str | None = None,
        calibration: Any = None,
        min_agreement: float = MIN_AGREEMENT,
        keep: Collection[str] | Literal["auto"] = (),
        native: bool | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
            raise InputError(f"batch must be an integer from 1 to {MAX_BATCH:,}, not {short_repr(batch)}.")
        speedup = None
        calibration = Path(calibration) if isinstance(calibration, str) else calibration
        if precision is not None:
            speedup = Speedup(
                precision=precision, calibration=calibration, min_agreement=min_agreement, keep=keep
            )
        self.engine = engine = open_engine(model, options, speedup, native=native)
        self.bundle = engine.bundle  # None for an ONNX file
        self.config, self.card, self.preprocess = engine.config, engine.card, engine.preprocess
        self.scale = engine.scores.calibrated(engine.labels, engine.config.classes, engine.card.metrics)
        self.batch, self.workers = 1 if engine.one_by_one else batch, check_workers(workers)
        self.check_fits(1)

    @property
    def acceleration(self) -> Acceleration | None:
        """What was done to compute the model faster; None if it is computed as it is."""
        return None if self.engine.accelerated is None else self.engine.accelerated.report

    def __repr__(self) -> str:
        return f"<Predictor of {self.config.classes:,} classes, batch {self.batch}>"

    @overload
    def __call__(self, images: Image) -> Prediction: ...
    @overload
    def __call__(self, images: Sequence[Any]) -> list[Prediction]: ...
    @overload
    def __call__(self, images: str | Path | NDArray[Any] | Tensor) -> Prediction | list[Prediction]: ...

    def __call__(self, images: Any) -> Prediction | list[Prediction]:
        """One Prediction for one image; a list of them for a list, a folder or many in one array.

        An image is a path, a PIL image, an array (h, w, C) or a tensor (C, h, w): uint8, or floats from 0 to
        1. Many are an array (N, h, w, C) or a tensor (N, C, h, w). A single image that cannot be read raises
        an error; in a list it has a reason in `.error`.
        """
        is_path = isinstance(images, (str, os.PathLike))
        if not _is_single(images) or (is_path and os.path.isdir(images)):
            return list(self.stream(images))
        prediction = next(self.stream(images))
        if prediction.error is not None:
            name = printable(prediction.name)
            raise InputError(prediction.error if name in prediction.error else f"{name}: {prediction.error}")
        return prediction

    def stream(self, images: Iterable[Any]) -> Iterator[Prediction]:
        """Predictions in the order of the images, in constant memory; `images` may be a generator."""
        self._check_given(images)
        given = [images] if _is_single(images) else images
        one = math.prod(self.preprocess.target) * self.preprocess.channels
        most = (memory_limit() or 2**62) // 4 // one  # as many as fill a quarter of the memory
        ahead = max(1, min(PREFETCH * self.batch, most))
        read = prefetch(
            expand_paths(given), self.preprocess, workers=self.workers, ahead=ahead, busy=self.on_cpu
        )
        batches = _batches(read, self.batch)
        if not self.on_cpu:  # pixels are copied while the GPU computes
            batches = in_background(batches, 1)
        with closing(batches):
            for batch in batches:
                yield from self.predict_batch(batch)

    def _check_given(self, images: Any) -> None:
        """One error for what holds no images at all, rather than one for each row."""
        if isinstance(images, (np.ndarray, Tensor)) and images.ndim > 3 and len(images):
            check_pixel_range(images, "A batch of images")
            self.preprocess.to_array(images[0])
        elif isinstance(images, (bytes, Mapping)) or not (_is_single(images) or hasattr(images, "__iter__")):
            raise InputError(
                "Predictor takes a path, a PIL image, an array (h, w, C), a tensor (C, h, w), or a list of "
                f"them, not {short_repr(images)}."
            )

    def predict_batch(self, batch: list[tuple[str, PixelsOrReason]]) -> Iterator[Prediction]:
        """Predictions for names with pixels (H, W, C), or with the reason why there are none."""
        readable = [pixels for _, pixels in batch if not isinstance(pixels, str)]
        fields = self._predict_pixels(readable) if readable else iter(())
        for name, pixels in batch:
            if isinstance(pixels, str):
                yield Prediction(name, error=pixels)
            else:
                yield Prediction(name, **next(fields))

    def _predict_pixels(self, pixels: Sequence[NDArray[np.uint8]]) -> Iterator[dict[str, Any]]:
        """The fields of a Prediction for each image."""
        embeddings, all_logits = self.run(pixels)
        statistics = self.engine.statistics
        distances = None if statistics is None else statistics.scores(embeddings)
        for row, (embedding, logits) in enumerate(zip(embeddings, all_logits, strict=True)):
            if not np.isfinite(logits).all():
                yield {
                    "error": "The model's output is NaN or infinite; check its parameters for such values."
                }
                continue
            fields: dict[str, Any] = {"embedding": embedding.copy()}  # a view would keep the batch in memory
            if distances is not None:
                fields["ood_score"] = float(distances[row])
            if self.scale.labels:
                scores = self.scale.compute(logits[None])[0]
                predicted = self.scale.predicted(scores)
                fields["label"] = self.scale.labels[predicted[0]] if predicted else None
                fields |= {"score": float(scores.max()), "logits": logits.copy(), "scale": self.scale}
            yield fields

    def run(self, pixels: Sequence[NDArray[np.uint8]]) -> Outputs:
        """Pooled vectors (B, D) and logits (B, K) for uint8 pixels (H, W, C) each."""
        self.check_fits(len(pixels))
        return self.engine.run(pixels)

    def check_fits(self, count: int) -> None:
        """Refuse a batch that cannot be computed in this machine's memory."""
        if self.bundle is not None and self.on_cpu:
            do = "use a smaller batch or size" if count > 1 else "use a smaller size"
            check_fits(forward_bytes(self.config, count), self.config, count, "A prediction", do)

    @property
    def on_cpu(self) -> bool:
        """Whether the model is computed on the CPU; ONNX files always are."""
        return self.bundle is None or next(self.bundle.model.parameters()).device.type == "cpu"

    @property
    def needs_words(self) -> bool:
        """Whether the classes must be given as words; an ONNX file has no text tower."""
        return self.bundle is not None and self.bundle.needs_words

    def require_bundle(self) -> Bundle:
        """The model with its weights, which explanations need."""
        if self.bundle is None:
            raise InputError(
                "An ONNX file has no weights to explain a prediction with; use the vitrail file "
                "(.safetensors) it was exported from."
            )
        return self.bundle

    def explain(self, image: Any, *, method: Method = "rollout") -> Figure:
        """The image with its attention rollout, see `vitrail.views.rollout`."""
        from vitrail.views import rollout

        bundle = self.require_bundle()
        model, preprocess = bundle.model, bundle.preprocess or self.preprocess  # at the model's own size
        try:
            pixels = read_pixels(image, preprocess, limit_memory=True)
        except (OSError, ValueError) as error:
            raise InputError(describe_error(error)) from error
        images = preprocess.normalize(pixels)[None].to(next(model.parameters()).dtype)
        return rollout.draw(rollout.compute(model, images, method=method), pixels[None])


def _batches(
    read: Generator[tuple[str, PixelsOrReason]], size: int
) -> Generator[list[tuple[str, PixelsOrReason]]]:
    with closing(read):
        while batch := list(islice(read, size)):
            yield batch


def _is_single(images: Any) -> bool:
    """Whether this is one image or one path, rather than many."""
    from PIL import Image

    alone = isinstance(images, (str, os.PathLike, Image.Image))
    return alone or (isinstance(images, (np.ndarray, Tensor)) and images.ndim < 4)
