"""An index of images: their embeddings and names in one file, for exact search.

    index = build_index(Predictor("clip.safetensors"), ["photos/"])
    index.save("photos.safetensors")
    for hit in index.search(vector, top=20): ...

Embeddings have length 1, so that a product is a cosine. Of a model with a text tower they are the projected
ones, which words can be compared with; of others, the pooled vectors. Every row is compared, in blocks, so
that no image is missed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitrail.base.errors import FileError, InputError, option, printable
from vitrail.base.fields import as_tuples, short_repr
from vitrail.base.safe_files import parse_json, write_array, write_text
from vitrail.predict.prediction import Prediction
from vitrail.predict.predictor import Predictor
from vitrail.weights.bundle.bundle import golden_inputs
from vitrail.weights.readers.files import open_weights, write_safetensors
from vitrail.weights.readers.folder import INDEX_KEY

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMAT = 1
_MANY = 500_000  # rows, from which on faiss saves more time than importing it takes
_BLOCK = 1 << 24  # products in memory at once
_TOLERANCE = 0.05  # between unit vectors of the same golden input: bf16 on a GPU moves them by about 0.01


class Hit(NamedTuple):
    """An image that was found, with the cosine of its embedding and the query."""

    name: str
    score: float
    row: int


@dataclass(eq=False)
class Index:
    """Embeddings (N, E) of length 1, with the names of their images."""

    embeddings: NDArray[np.float32]
    names: list[str]
    model: str = ""
    """The path of the model, as it was given."""
    folder: str = ""
    """The folder that relative names start from."""
    golden: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """The embeddings of the model's golden inputs: another model would have others."""
    native: bool = False
    """Whether images kept their shape."""
    errors: dict[str, str] = field(default_factory=dict)
    """Images that could not be read, with the reason. They have no row, and are not saved."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What the model was loaded with: arguments of `vitrail.load`, such as its size."""

    def search(self, query: NDArray[np.floating], top: int = 20) -> list[Hit]:
        """The images whose embeddings are nearest to a vector (E,), best first."""
        if query.shape != self.embeddings.shape[1:]:
            raise InputError(
                f"The query has {query.shape[-1]} numbers and the index has rows of "
                f"{self.embeddings.shape[1]}; use the model that made the index."
            )
        scores, rows = nearest(unit(query[None]), self.embeddings, top)
        return [Hit(self.names[r], float(s), int(r)) for s, r in zip(scores[0], rows[0], strict=True)]

    def path(self, name: str) -> Path:
        """The file of an image."""
        here = Path(name)
        return here if here.exists() or not self.folder else Path(self.folder) / name

    def model_path(self) -> str:
        """The path of the model that made the index, absolute if it is still there."""
        there = Path(self.folder) / self.model
        return str(there) if self.folder and there.exists() else self.model

    def check_model(self, predictor: Predictor) -> None:
        """Refuse a model that did not make the index: its vectors would mean nothing here."""
        golden = Embedder(predictor).golden()
        same = golden.shape == self.golden.shape
        given = ", ".join(f"{name}={short_repr(value)}" for name, value in self.arguments.items())
        loaded = f" with {given}" if given else ""
        if not same or np.linalg.norm(golden - self.golden, axis=-1).max(initial=0) > _TOLERANCE:
            raise InputError(
                "The index was made by another model or with other settings, so embeddings cannot be "
                f"compared: by {printable(self.model_path())}{loaded}. Give that model "
                f"with {option('model')} and its settings with {option('set')}, or make the index again."
            )

    def save(self, path: str | Path) -> None:
        """Write one .safetensors file, or a .npy file of the embeddings with a .json file beside it."""
        about: dict[str, Any] = {"format": _FORMAT, "model": self.model, "folder": self.folder}
        about |= {"native": True} if self.native else {}
        about |= {"arguments": self.arguments} if self.arguments else {}
        if Path(path).suffix == ".npy":
            write_array(path, self.embeddings, overwrite=True)
            about |= {"golden": self.golden.tolist(), "names": self.names}
            write_text(Path(path).with_suffix(".json"), json.dumps(about) + "\n", overwrite=True)
            return
        import torch

        names = json.dumps(self.names).encode()
        tensors = {
            "embeddings": torch.from_numpy(self.embeddings),
            "golden": torch.from_numpy(self.golden),
            "names": torch.frombuffer(bytearray(names), dtype=torch.uint8),
        }
        write_safetensors(path, tensors, {INDEX_KEY: json.dumps(about)})


def read_index(path: str | Path) -> Index:
    """Read an index that `Index.save` wrote: a .safetensors file, or a .npy file with its .json."""
    shown, is_npy = printable(path), Path(path).suffix == ".npy"
    about, names, embeddings, golden = (_read_npy if is_npy else _read_safetensors)(Path(path))
    embeddings = embeddings.astype(np.float32)
    valid = isinstance(about, dict) and isinstance(names, list) and embeddings.ndim == 2
    if not valid or len(names) != len(embeddings) or not all(isinstance(name, str) for name in names):
        raise FileError(f"{shown} is damaged: its names and embeddings do not fit. Make it again.")
    if about.get("format") != _FORMAT:
        raise FileError(f"{shown} has another format; make it again with vitrail embed.")
    if not np.isfinite(embeddings).all():
        raise FileError(f"{shown} holds NaN or infinity; make it again with vitrail embed.")
    arguments = about.get("arguments", {})
    if not isinstance(arguments, dict):
        raise FileError(f"{shown} is damaged: its arguments are no object. Make it again.")
    return Index(
        embeddings,
        names,
        model=str(about.get("model", "")),
        folder=str(about.get("folder", "")),
        golden=golden.astype(np.float32),
        native=about.get("native") is True,
        arguments={
            name: as_tuples(value) if isinstance(value, dict) else value
            for name, value in as_tuples(arguments).items()
        },
    )


def _read_safetensors(path: Path) -> tuple[Any, Any, NDArray[Any], NDArray[Any]]:
    """The description, the names, the embeddings, and those of the golden inputs; not checked yet."""
    with open_weights(path) as file:
        if INDEX_KEY not in file.metadata:
            raise _no_index(path)
        about = parse_json(file.metadata[INDEX_KEY], f"the description in {path}")
        arrays = {name: file.tensor(name).numpy() for name in ("embeddings", "golden", "names")}
    names = parse_json(arrays["names"].tobytes(), f"the names in {path}")
    return about, names, arrays["embeddings"], arrays["golden"]


def _read_npy(path: Path) -> tuple[Any, Any, NDArray[Any], NDArray[Any]]:
    """The same from two files."""
    beside = path.with_suffix(".json")
    try:
        embeddings = np.load(path, mmap_mode="r")  # a map is never larger than the file; no pickles
        about = parse_json(beside.read_bytes(), str(beside))
        golden = np.array(about["golden"], np.float32)
    except FileNotFoundError as error:
        raise FileError(
            f"{printable(error.filename)} does not exist; an index is a .npy file with its .json beside it."
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _no_index(path) from error
    return about, about.get("names"), np.atleast_1d(embeddings), golden


def _no_index(path: Path) -> FileError:
    return FileError(
        f"{printable(path)} is not an index of images; make one with: vitrail embed MODEL FOLDER -o "
        f"index{path.suffix}."
    )


# ---- building -------------------------------------------------------------------------------


class Embedder:
    """From a model's outputs to unit vectors, in the space of the texts if the model has one."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, config, bundle = predictor, predictor.config, predictor.bundle
        has_text = bundle is not None and bundle.has_text and bundle.labels is None
        # CLIP's image tower has its projection as a head; SigLIP's has none and needs none.
        self.projects = has_text and config.classes > 0
        self.head: Any = bundle.model.head if bundle and config.head == "cosine" and config.classes else None

    def __call__(self, pooled: NDArray[np.floating], logits: NDArray[np.floating]) -> NDArray[np.float32]:
        """Unit vectors (B, E), of pooled vectors (B, D) and logits (B, K)."""
        if self.projects:
            return unit(logits)
        if self.head is None:
            return unit(pooled)
        import torch

        with torch.no_grad():
            return self.head.embed(torch.from_numpy(pooled).to(self.head.fc2.weight)).float().cpu().numpy()

    def of(self, prediction: Prediction) -> NDArray[np.float32]:
        """The vector of one image, (E,)."""
        pooled = prediction.embedding
        logits = pooled if prediction.logits is None else prediction.logits
        return self(pooled[None], logits[None])[0]  # type: ignore[index]

    def golden(self) -> NDArray[np.float32]:
        """The vectors of inputs that are the same everywhere."""
        pixels = golden_inputs(self.predictor.config).permute(0, 2, 3, 1).numpy()
        return self(*self.predictor.run(list(pixels)))


def build_index(
    predictor: Predictor,
    images: Iterable[Any],
    *,
    model: str = "",
    arguments: dict[str, Any] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Index:
    """Embed images, files and folders. Images that cannot be read are in `.errors`.

    Args:
        model, arguments: what the predictor was opened with, to be saved in the index.
    """
    rows, names, errors, embed = [], [], {}, Embedder(predictor)
    golden = embed.golden()
    for done, prediction in enumerate(predictor.stream(images), 1):
        if prediction.embedding is None:
            errors[prediction.name] = prediction.error or "it has no embedding"
        else:
            rows.append(embed.of(prediction))
            names.append(prediction.name)
        progress(done)
    embeddings = np.stack(rows) if rows else golden[:0]
    native = predictor.preprocess.keeps_shape
    return Index(embeddings, names, model, os.getcwd(), golden, native, errors, arguments or {})


# ---- searching ------------------------------------------------------------------------------


def unit(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Vectors (N, E), each divided by its length; zeros stay zeros."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


def nearest(
    queries: NDArray[np.float32], rows: NDArray[np.float32], top: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Cosines and indices of the `top` nearest rows of each query, (Q, top) each, best first.

    Exact: in blocks by NumPy, or for many rows by faiss, where it is installed.
    """
    top = min(top, len(rows))
    if len(rows) >= _MANY:
        with suppress(ImportError):
            import faiss

            scores, found = faiss.knn(queries, rows, top, metric=faiss.METRIC_INNER_PRODUCT)
            return scores, found.astype(np.int64)
    best_scores = np.full((len(queries), 0), -np.inf, np.float32)
    best_rows = np.zeros((len(queries), 0), np.int64)
    step = max(1, _BLOCK // max(1, len(queries)))
    for at in range(0, len(rows), step):
        scores = queries @ rows[at : at + step].T
        count = min(top, scores.shape[1])
        some = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        best_scores = np.concatenate([best_scores, np.take_along_axis(scores, some, 1)], axis=1)
        best_rows = np.concatenate([best_rows, some + at], axis=1)
        order = np.argsort(-best_scores, axis=1, kind="stable")[:, :top]
        best_scores = np.take_along_axis(best_scores, order, 1)
        best_rows = np.take_along_axis(best_rows, order, 1)
    return best_scores, best_rows
