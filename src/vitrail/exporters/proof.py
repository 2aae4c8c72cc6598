"""Write an exported file, which gets its name only after its outputs have been compared with the model's.

`x.onnx.proof.json` beside it holds every comparison, the versions, both speeds and the checksum. A file
whose outputs differ from the model's is not written.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.base.errors import FileError, InputError, VitrailError, printable
from vitrail.base.safe_files import atomic_file, check_new, write_text
from vitrail.exporters.graph import Plan
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT, surgery
from vitrail.model.config import format_sides
from vitrail.predict.engine import output_names
from vitrail.weights.bundle.bundle import Bundle, golden_inputs, versions
from vitrail.weights.bundle.golden import LOGIT_TOLERANCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

Run = Callable[[Any], "dict[str, NDArray[np.float32]]"]
"""Runs a batch through the file; returns its outputs by name."""

BATCHES = (1, 3, 4)
REPEATS = 21  # timed runs of each
SECONDS = 10.0  # stop earlier after this time, but not before three runs


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison."""

    what: str
    inputs: int
    difference: float
    """The largest difference between outputs of the file and of the model, given the same pixels."""
    limit: float
    """1e-4 times the largest output, or times 1 if that is larger; as in `vitrail verify`."""
    same_class: int
    """The number of inputs for which the argmax agrees."""
    pixels: int = 0
    """With preprocessing in the graph: the number of resized pixel values that were compared."""
    different_pixels: int = 0
    """How many of them differ from those of `Preprocess`."""
    largest_pixel_difference: int = 0
    """The largest of these differences."""
    end_to_end_difference: float = 0.0
    """The largest difference between outputs when each side resizes the images itself."""

    @property
    def holds(self) -> bool:
        near = self.difference <= self.limit and self.largest_pixel_difference <= 1
        return near and self.same_class == self.inputs


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The median of n runs of one image, in milliseconds, alternating, with the same number of threads."""

    runtime: str
    n: int
    threads: int
    eager: float
    exported: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All comparisons of an exported file with its model, and what identifies the file."""

    checks: list[Check]
    speed: Speed
    file: str = ""
    bytes: int = 0
    sha256: str = ""
    form: str = ""
    opset: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    gate: Mapping[str, Any] | None = None
    """For int8: how near the answers are to fp32, see `vitrail.fast.gate`."""

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


# ---- writing ------------------------------------------------------------------------------------


def check_output(path: Path, suffix: str) -> None:
    """Check that the file and its proof are new, and that their folder exists."""
    if path.suffix != suffix:
        raise InputError(f"The name of this file must end in {suffix}, and {printable(path)} does not.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {printable(path.parent)}; create it, or choose another path.")
    for new in (path, _proof_path(path)):
        check_new(new, "an export")


def _proof_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.proof.json")


def write_checked(
    path: Path,
    data: bytes,
    prove: Callable[[Path], Proof],
    form: str,
    *,
    opset: int | None = None,
    packages: Sequence[str] = (),
) -> Proof:
    """Write a temporary file, check it with `prove`, and only then give it its name."""
    with atomic_file(path) as partial:
        partial.write_bytes(data)
        try:
            proof = prove(partial)
        except VitrailError:
            raise
        except Exception as error:  # any error of a runtime means that the file cannot be used
            raise check_failed(f"{type(error).__name__}: {error}") from error
        if proof.failed:
            worst = proof.failed[0]
            raise check_failed(
                f"{worst.what}: a difference of {worst.difference:.2g} (limit {worst.limit:.2g}), pixels "
                f"off by {worst.largest_pixel_difference}, same class: {worst.same_class} of {worst.inputs}"
            )
        proof = replace(
            proof,
            file=path.name,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            form=form,
            opset=opset,
            versions=versions()
            | {name: importlib.metadata.version(name) for name in ("numpy", "pillow", *packages)},
        )
    try:
        write_text(_proof_path(path), json.dumps(asdict(proof), indent=2) + "\n")
    except BaseException:
        path.unlink()
        raise
    return proof


# ---- comparing ----------------------------------------------------------------------------------


def prove(bundle: Bundle, plan: Plan, run: Run, *, runtime: str) -> Proof:
    """Compare on golden inputs in batches of 1, 3 and 4, and on other sizes or images if the plan allows."""
    spec = bundle.preprocess
    assert spec is not None  # plan_for has checked
    model = copy.deepcopy(bundle.model).to(device="cpu", dtype=torch.float32).eval()
    golden = golden_inputs(model.config).permute(0, 2, 3, 1).numpy()  # (4, H, W, C)
    raw = plan.with_preprocess
    checks = [
        _compare(f"golden inputs, batch of {count}", model, spec, run, golden[:count], raw=raw)
        for count in BATCHES
    ]
    if raw and spec.resize != "none":
        for high, wide in _image_sizes(spec):
            images = np.stack([_draw_scene(high, wide, spec.channels, seed) for seed in range(2)])
            checks.append(_compare(f"images of {high}x{wide}", model, spec, run, images, raw=True))
    if plan.any_size:
        for size in _other_sizes(model):
            other = surgery.resize(model, size, **plan.resample)
            pixels = golden_inputs(other.config).permute(0, 2, 3, 1).numpy()
            fitted = replace(spec, size=size, resize_to=None)
            checks.append(_compare(f"golden inputs of {format_sides(size)}", other, fitted, run, pixels))
    normalized = _normalize(golden[:1], spec)
    first = golden[:1] if raw else normalized.numpy()
    return Proof(checks=checks, speed=measure_speed(model, normalized, run, first, runtime))


def _normalize(images: NDArray[np.uint8], spec: Preprocess) -> torch.Tensor:
    return torch.stack([spec.normalize(image) for image in images])


def _model_outputs(model: ViT, images: torch.Tensor) -> dict[str, NDArray[np.float32]]:
    """The outputs of the model, under the names used in the file."""
    with torch.no_grad():
        embedding = model.encode(images).pooled
        tensors = {"logits": model.head(embedding), "embedding": embedding}
    return {name: tensors[name].numpy() for name in output_names(model.config)}


def _compare(
    what: str, model: ViT, spec: Preprocess, run: Run, images: NDArray[np.uint8], *, raw: bool = False
) -> Check:
    """Compare on images (B, H, W, C).

    Args:
        raw: whether the graph resizes them; then the model runs on the pixels of the graph and on its own.
    """
    if not raw:
        normalized = _normalize(images, spec)
        return _compare_outputs(what, _model_outputs(model, normalized), run(normalized.numpy()))
    theirs = run(images)
    graph_pixels = theirs["pixels"].transpose(0, 2, 3, 1)  # (B, H, W, C)
    pixels = np.stack([spec.pixels(image) for image in images])
    differences = np.abs(graph_pixels - pixels.astype(np.float32))
    same_pixels = _model_outputs(model, _normalize(graph_pixels.astype(np.uint8), spec))
    end_to_end = _compare_outputs(what, _model_outputs(model, _normalize(pixels, spec)), theirs)
    return replace(
        _compare_outputs(what, same_pixels, theirs),
        same_class=end_to_end.same_class,
        pixels=differences.size,
        different_pixels=int((differences > 0).sum()),
        largest_pixel_difference=int(np.ceil(differences.max())),
        end_to_end_difference=end_to_end.difference,
    )


def _compare_outputs(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    """Compare every output and report the worst; NaN counts as an infinite difference."""
    difference, limit = 0.0, LOGIT_TOLERANCE
    for name, array in ours.items():
        if theirs[name].shape != array.shape:
            raise check_failed(f"{what}: {name} has shape {theirs[name].shape}, the model's {array.shape}")
        apart = np.abs(theirs[name] - array).max()
        allowed = LOGIT_TOLERANCE * max(1.0, float(np.abs(array).max()))
        if not apart / allowed <= difference / limit:
            difference = float(np.nan_to_num(apart, nan=np.inf))
            limit = float(np.nan_to_num(allowed, nan=LOGIT_TOLERANCE))
    first = next(iter(ours))
    same = int((theirs[first].argmax(1) == ours[first].argmax(1)).sum())
    return Check(what=what, inputs=len(ours[first]), difference=difference, limit=limit, same_class=same)


def check_failed(reason: str) -> FileError:
    """The error for an export that does not compute what the model computes."""
    return FileError(
        f"The exported file does not give the outputs of the model ({printable(reason, 300).rstrip('.')}), "
        "so it was not written; use the vitrail file itself, and please report this."
    )


def measure_speed(model: ViT, images: torch.Tensor, run: Run, batch: Any, runtime: str) -> Speed:
    """Time both alternately, so that other load on the machine affects both."""
    times: tuple[list[float], list[float]] = [], []
    started = time.perf_counter()
    while len(times[0]) < REPEATS and (len(times[0]) < 3 or time.perf_counter() - started < SECONDS):
        for which, call in enumerate((lambda: _model_outputs(model, images), lambda: run(batch))):
            start = time.perf_counter()
            call()
            times[which].append(1000 * (time.perf_counter() - start))
    eager, exported = (round(statistics.median(values), 3) for values in times)
    n, threads = len(times[0]), torch.get_num_threads()
    return Speed(runtime=runtime, n=n, threads=threads, eager=eager, exported=exported)


# ---- images -----------------------------------------------------------------------------------


def _other_sizes(model: ViT) -> list[tuple[int, int]]:
    """More patches each way, fewer (but at least two), and twice as wide."""
    (down, across), (h, w) = model.config.patch_pixels, model.config.grid
    grids = [(h + 1, w + 2), (max(2, h - 1), max(2, w - 1)), (max(2, h), 2 * w)]
    return [(rows * down, columns * across) for rows, columns in grids]


def _image_sizes(spec: Preprocess) -> list[tuple[int, int]]:
    """Sizes larger and smaller than the model's, wide, tall and odd."""
    H, W = spec.target
    return [(2 * H + 1, 3 * W), (H // 2 + 1, W // 2 + 3), (H + 5, 4 * W + 1), (5 * H + 3, W // 2 + 1)]


def _draw_scene(high: int, wide: int, channels: int, seed: int) -> NDArray[np.uint8]:
    """Blocks of color with noise, (high, wide, channels): edges and texture, as in a photograph."""
    rng = np.random.default_rng(seed)
    blocks = rng.uniform(0, 255, (high // 8 + 1, wide // 8 + 1, channels)).repeat(8, 0).repeat(8, 1)
    scene = blocks[:high, :wide] + rng.normal(0, 8, (high, wide, channels))
    return scene.round().clip(0, 255).astype(np.uint8)
