"""Run a model: in PyTorch, or an exported one in ONNX Runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import FileError, InputError, printable
from vitrail.base.telemetry import import_onnxruntime
from vitrail.fast.accelerate import Speedup, accelerate_bundle
from vitrail.fast.halving import FittingBatches
from vitrail.fast.inference_routes import Accelerated
from vitrail.fast.onnx_graph import open_session
from vitrail.images.normalize import normalize_batch
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.device import eval_mode
from vitrail.predict.onnx_file import OnnxDescription, bad_onnx, read_onnx
from vitrail.weights.bundle.bundle import Bundle, Card
from vitrail.weights.bundle.feature_statistics import FeatureStatistics
from vitrail.weights.bundle.own_shape import reading_preprocess
from vitrail.weights.bundle.scores import Scores
from vitrail.weights.load import as_bundle

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    Outputs = tuple[NDArray[np.float32], NDArray[np.float32]]
    """Pooled vectors (B, D) and logits (B, K); without a head, the pooled vectors twice."""

_PROGRAM_SUFFIXES = (".pt2", ".ts", ".pkl", ".pickle")  # files that can run code when opened


class Engine(ABC):
    """uint8 pixels in, embeddings and logits out, with the model's config and metadata."""

    config: ViTConfig
    preprocess: Preprocess
    labels: list[str] | None
    scores: Scores
    statistics: FeatureStatistics | None
    card: Card
    bundle: Bundle | None = None
    """The model with its weights; None for an ONNX file."""
    accelerated: Accelerated | None = None
    """What computes instead of the model's own code."""
    one_by_one = False
    """Whether images may differ in size, so that they cannot share a batch."""

    @abstractmethod
    def run(self, pixels: Sequence[NDArray[np.uint8]]) -> Outputs:
        """Embeddings and logits for pixels (H, W, C), as `preprocess.pixels` returns them."""


def open_engine(
    model: Bundle | ViT | str | Path,
    options: dict[str, Any],
    speedup: Speedup | None = None,
    *,
    native: bool | None = None,
) -> Engine:
    """Open a bundle, a model, an ONNX file, or anything that `vitrail.load` takes.

    Args:
        speedup: how a model that is no ONNX file shall be accelerated; by default in bf16 on a GPU.
        native: whether images keep their shape; None as the model was trained.
    """
    if native and speedup is not None:
        raise InputError(
            "An accelerated model takes images of one shape, so native and precision exclude each other; "
            "remove one of them."
        )
    suffix = Path(model).suffix.lower() if isinstance(model, (str, Path)) else ""
    if suffix in _PROGRAM_SUFFIXES:
        raise FileError(
            f"{printable(model)} holds a program, and opening it could run any code; use the vitrail file "
            "(.safetensors) it was made from, or export that file to .onnx."
        )
    if suffix == ".onnx" and not str(model).startswith("hf:"):
        _check_onnx_options(model, options, speedup, native)
        return OnnxEngine(Path(model))  # type: ignore[arg-type]
    if speedup is not None and speedup.precision == "int8" and isinstance(model, (str, Path)):
        options = {"device": "cpu", **options}
    bundle = as_bundle(model, default_device="auto", **options)
    if native is None and bundle.native is not None and speedup is not None:
        raise InputError(
            "The model was trained on images in their own shape, and an accelerated model takes one "
            "shape; remove precision, or set native to false."
        )
    return TorchEngine(bundle, speedup, native=bundle.native is not None if native is None else native)


def _check_onnx_options(
    model: object, options: dict[str, Any], speedup: Speedup | None, native: bool | None
) -> None:
    """Refuse what an exported graph cannot change."""
    if native:
        raise InputError(
            f"{printable(model)} is a graph for images of one shape; give native the vitrail file "
            "(.safetensors) it was exported from."
        )
    if speedup is not None:
        raise InputError(
            f"An ONNX file has the precision that it was exported with, so {printable(model)} takes none; "
            "remove it, or use the vitrail file (.safetensors)."
        )
    if options:
        raise InputError(
            f"An ONNX file takes no options, but {printable(model)} came with {', '.join(options)}; remove "
            "them, and set the size when you run vitrail export."
        )


def _build_batch(pixels: Sequence[NDArray[np.uint8]], preprocess: Preprocess, like: Tensor) -> Tensor:
    """Normalized images (B, C, H, W), as `evaluate` computes them from pixels (H, W, C)."""
    return normalize_batch(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), preprocess, like)


class TorchEngine(Engine):
    """A PyTorch model, run as `evaluate` runs it, or accelerated.

    Args:
        native: keep the shape of each image: all are packed into one sequence (`ViT.encode_packed`).
    """

    def __init__(self, bundle: Bundle, speedup: Speedup | None, *, native: bool) -> None:
        if bundle.preprocess is None:
            raise InputError(
                f"Predictor needs a model of images, but this one takes {bundle.model.config.input}; load it "
                "with vt.load and call its .model."
            )
        self.bundle, self.model, self.native = bundle, bundle.model, native
        self.config, self.preprocess = bundle.model.config, bundle.preprocess
        self.labels, self.scores, self.card = bundle.labels, bundle.scores, bundle.card
        self.statistics = bundle.statistics
        if native:
            self.preprocess = reading_preprocess(bundle, native=True)
        else:
            self.accelerated = accelerate_bundle(bundle, speedup)
        self.fitting = FittingBatches()

    def run(self, pixels: Sequence[NDArray[np.uint8]]) -> Outputs:
        parts = [
            (pooled.float().cpu().numpy(), logits.float().cpu().numpy())
            for pooled, logits in self.fitting(self.forward, pixels)
        ]
        if len(parts) == 1:
            return parts[0]
        embeddings, logits = zip(*parts, strict=True)
        return np.concatenate(embeddings), np.concatenate(logits)

    def forward(self, pixels: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
        """Pooled vectors and logits, on the device of the model."""
        like = next(self.model.parameters())
        if self.accelerated is not None:
            return self.accelerated.outputs(_build_batch(pixels, self.preprocess, like))
        with eval_mode(self.model):
            if self.native:
                images = [_build_batch([image], self.preprocess, like)[0] for image in pixels]
                pooled = self.model.encode_packed(images)
            else:
                pooled = self.model.encode(_build_batch(pixels, self.preprocess, like)).pooled
            return pooled, self.model.logits(self.model.head(pooled))


class OnnxEngine(Engine):
    """A graph written by `vitrail export`, run by ONNX Runtime on the CPU."""

    def __init__(self, path: Path) -> None:
        import_onnxruntime()  # a missing package is said before the file is read
        file = read_onnx(path)
        self.path, self.config, self.labels = path, file.config, file.labels
        self.scores, self.statistics, self.card = file.scores, file.statistics, file.card
        self.resizes = self.one_by_one = file.resizes
        self.preprocess = _FullSize(**asdict(file.preprocess)) if file.resizes else file.preprocess
        try:
            self.session = open_session(file.data)
        except Exception as error:  # ONNX Runtime has no public exception class
            raise bad_onnx(path, f"ONNX Runtime reports: {error}") from error
        self.input = _check_signature(self.session, file, path)

    def run(self, pixels: Sequence[NDArray[np.uint8]]) -> Outputs:
        if not self.resizes:
            return self._forward(_build_batch(pixels, self.preprocess, torch.zeros(())).contiguous().numpy())
        rows = [self._forward(image[None]) for image in pixels]
        embeddings, logits = zip(*rows, strict=True)
        return np.concatenate(embeddings), np.concatenate(logits)

    def _forward(self, batch: NDArray[Any]) -> Outputs:
        names = output_names(self.config)
        try:
            outputs = dict(zip(names, self.session.run(names, {self.input: batch}), strict=True))
        except Exception as error:
            raise bad_onnx(self.path, f"ONNX Runtime reports: {error}") from error
        rows = outputs["embedding"], outputs.get("logits", outputs["embedding"])
        widths = self.config.pooled_width, self.config.classes or self.config.pooled_width
        if [row.shape for row in rows] != [(len(batch), width) for width in widths]:
            shapes = [row.shape for row in rows]
            raise bad_onnx(self.path, f"its outputs have shapes {shapes}, but its config has widths {widths}")
        return rows


@dataclass(frozen=True, kw_only=True)
class _FullSize(Preprocess):
    """For a graph that resizes by itself: `pixels` returns the full image, upright and 8-bit."""

    def pixels(self, image: Image.Image | NDArray[np.uint8]) -> NDArray[np.uint8]:
        pixels = self.to_array(image)
        self.resized_size(*pixels.shape[:2])  # raises a clear error if the image cannot be resized
        return pixels


def output_names(config: ViTConfig) -> list[str]:
    """The names of a graph's outputs."""
    return ["logits", "embedding"] if config.classes else ["embedding"]


def _check_signature(session: Any, file: OnnxDescription, path: Path) -> str:
    """Check that inputs and outputs match the config; return the name of the input."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    name, kind, channels = (
        ("raw_images", "tensor(uint8)", 3) if file.resizes else ("images", "tensor(float)", 1)
    )
    if (
        [(one.name, one.type, len(one.shape)) for one in inputs] != [(name, kind, 4)]
        or {one.name for one in outputs} != set(output_names(file.config))
        or any(one.type != "tensor(float)" for one in outputs)
        or inputs[0].shape[channels] != file.config.channels
    ):
        actual = [(one.name, one.type, one.shape) for one in inputs]
        names = sorted(one.name for one in outputs)
        raise bad_onnx(path, f"its inputs {actual} and outputs {names} do not match its config")
    return name
