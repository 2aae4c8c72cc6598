"""What computes the answers: a model in torch, or an exported one in ONNX Runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import FileError, InputError, printable
from vitrail.evaluation.forward import inputs_of
from vitrail.model.modes import evaluating
from vitrail.predict.onnx_file import Described, read_onnx, refused
from vitrail.preprocess import Preprocess
from vitrail.telemetry import import_onnxruntime
from vitrail.weights.bundle import Bundle, Card
from vitrail.weights.load import load

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    Rows = tuple[NDArray[np.float32], NDArray[np.float32]]
    """Pooled vectors (B, D), and logits (B, K), which without a head are these again."""

PROGRAMS = (".pt2", ".ts", ".pkl", ".pickle")  # files that hold programs, by how their names end


class Engine(ABC):
    """Levels in, embeddings and logits out; and what has to be known about the model."""

    config: ViTConfig
    preprocess: Preprocess
    labels: list[str] | None
    card: Card
    bundle: Bundle | None = None
    """The model with its weights, where there is one to look into."""
    one_by_one = False
    """Whether levels of one picture have another shape than those of the next."""

    @abstractmethod
    def run(self, levels: Sequence[NDArray[np.uint8]]) -> Rows:
        """The answers to levels (H, W, C), as `preprocess.pixels` gives them."""


def open_engine(model: Bundle | str | Path, options: dict[str, Any]) -> Engine:
    """The engine for a bundle, for an ONNX file, or for what `vitrail.load` takes."""
    if isinstance(model, Bundle):
        if options:
            got = f"a bundle with {', '.join(options)}"
            raise InputError("A model that is loaded already takes no options.", got, "Give them to vt.load.")
        return TorchEngine(model)
    suffix = Path(model).suffix.lower()
    if suffix in PROGRAMS:
        raise FileError(
            "A predictor opens files that hold numbers: opening one with a program in it could run anything.",
            printable(model),
            "Give the vitrail file (.safetensors) it was made from, or that exported to .onnx.",
        )
    if suffix != ".onnx" or str(model).startswith("hf:"):
        return TorchEngine(load(model, **options))
    if options:
        got = f"{printable(model)} with {', '.join(options)}"
        raise InputError(
            "An ONNX file is taken as it is.", got, "Leave that out; a size is given to vitrail export."
        )
    return OnnxEngine(Path(model))


def batch_of(levels: Sequence[NDArray[np.uint8]], preprocess: Preprocess, like: Tensor) -> Tensor:
    """Levels (H, W, C) of several pictures as `evaluate` makes them an input, (B, C, H, W)."""
    return inputs_of(torch.from_numpy(np.stack(levels)).permute(0, 3, 1, 2), preprocess, like)


class TorchEngine(Engine):
    """The model itself, normalised and run as `evaluate` does it."""

    def __init__(self, bundle: Bundle) -> None:
        if bundle.preprocess is None:
            got = f"one that takes {bundle.model.config.input}"
            raise InputError("The model must take pictures.", got, "Use vt.load, and call its .model.")
        self.bundle, self.model = bundle, bundle.model
        self.config, self.preprocess = bundle.model.config, bundle.preprocess
        self.labels, self.card = bundle.labels, bundle.card

    def run(self, levels: Sequence[NDArray[np.uint8]]) -> Rows:
        images = batch_of(levels, self.preprocess, next(self.model.parameters()))
        with evaluating(self.model):
            pooled = self.model.encode(images).pooled
            logits = self.model.logits(self.model.head(pooled))
        return pooled.float().cpu().numpy(), logits.float().cpu().numpy()


class OnnxEngine(Engine):
    """A graph that `vitrail export` has written, in ONNX Runtime on the CPU."""

    def __init__(self, path: Path) -> None:
        onnxruntime = import_onnxruntime()
        found = read_onnx(path)
        self.path, self.config, self.labels, self.card = path, found.config, found.labels, found.card
        self.whole = self.one_by_one = found.whole
        self.preprocess = Whole(**asdict(found.preprocess)) if found.whole else found.preprocess
        try:
            self.session = session_of(onnxruntime, found.data)
        except Exception as error:  # of many classes, none of them public
            raise refused(path, f"ONNX Runtime says: {error}") from error
        self.input = check_ends(self.session, found, path)

    def run(self, levels: Sequence[NDArray[np.uint8]]) -> Rows:
        if not self.whole:
            return self.answers(batch_of(levels, self.preprocess, torch.zeros(())).contiguous().numpy())
        rows = [self.answers(picture[None]) for picture in levels]
        embeddings, logits = zip(*rows, strict=True)
        return np.concatenate(embeddings), np.concatenate(logits)

    def answers(self, batch: NDArray[Any]) -> Rows:
        names = names_of(self.config)
        try:
            found = dict(zip(names, self.session.run(names, {self.input: batch}), strict=True))
        except Exception as error:
            raise refused(self.path, f"ONNX Runtime says: {error}") from error
        rows = found["embedding"], found.get("logits", found["embedding"])
        widths = self.config.pooled_width, self.config.classes or self.config.pooled_width
        if [row.shape for row in rows] != [(len(batch), width) for width in widths]:
            raise refused(self.path, f"it gives {[row.shape for row in rows]} where its config says {widths}")
        return rows


@dataclass(frozen=True, kw_only=True)
class Whole(Preprocess):
    """For a graph that resizes by itself: `pixels` are those of the whole picture, upright and 8-bit."""

    def pixels(self, image: Image.Image | NDArray[np.uint8]) -> NDArray[np.uint8]:
        whole = self._array(image)
        self._resized(*whole.shape[:2])  # what cannot be resized is said here, in words
        return whole


def session_of(onnxruntime: Any, data: bytes) -> Any:
    """A session with as many threads as torch has, and no log of its own."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what is wrong comes as an error
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def names_of(config: ViTConfig) -> list[str]:
    """The outputs of a graph."""
    return ["logits", "embedding"] if config.classes else ["embedding"]


def check_ends(session: Any, found: Described, path: Path) -> str:
    """Whether the graph takes and gives what its config says; the name of its input."""
    inputs, outputs = session.get_inputs(), {one.name: one for one in session.get_outputs()}
    name, kind = ("pictures", "tensor(uint8)") if found.whole else ("images", "tensor(float)")
    good = [(one.name, one.type, len(one.shape)) for one in inputs] == [(name, kind, 4)]
    good = good and set(outputs) == set(names_of(found.config))
    good = good and all(one.type == "tensor(float)" for one in outputs.values())
    if good:
        channels = inputs[0].shape[3 if found.whole else 1]
        good = channels == found.config.channels
    if not good:
        took = [(one.name, one.type, one.shape) for one in inputs]
        raise refused(path, f"it takes {took} and gives {sorted(outputs)}, which its config does not say")
    return name
