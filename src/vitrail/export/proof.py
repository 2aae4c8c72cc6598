"""The proof beside an exported file: the same inputs through the model and through the file.

What is compared, and how fast both are; keep.py writes it down.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.config import by
from vitrail.errors import FileError, printable
from vitrail.export.graph import Plan
from vitrail.model import ViT, surgery
from vitrail.predict.engine import names_of
from vitrail.preprocess import Preprocess
from vitrail.weights.bundle import Bundle, golden_inputs
from vitrail.weights.verify import LIMIT

if TYPE_CHECKING:
    from numpy.typing import NDArray

Run = Callable[[Any], "dict[str, NDArray[np.float32]]"]
"""A batch through the file: its outputs by name."""

BATCHES = (1, 3, 4)
TURNS = 21  # how often the clock is read for each of the two
SECONDS = 10.0  # or as long as this, at least three times


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison."""

    what: str
    inputs: int
    difference: float
    """The largest between an output of the file and of the model, given the same levels."""
    limit: float
    """1e-4 of the largest output, or of 1: that of `vitrail verify`."""
    same_class: int
    """For how many inputs the largest output is the same one."""
    levels: int = 0
    """With preprocessing inside: how many levels the model got,"""
    other_levels: int = 0
    """how many of them are not those of `Preprocess`,"""
    largest_step: int = 0
    """by how much at most,"""
    all_in_all: float = 0.0
    """and the largest difference of an output because of that."""

    @property
    def holds(self) -> bool:
        near = self.difference <= self.limit and self.largest_step <= 1
        return near and self.same_class == self.inputs


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Milliseconds for one picture, in turns, with as many threads: the median of n."""

    runtime: str
    n: int
    threads: int
    eager: float
    exported: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What is known about an exported file."""

    checks: list[Check]
    speed: Speed
    file: str = ""
    bytes: int = 0
    sha256: str = ""
    form: str = ""
    opset: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


# ---- comparing ----------------------------------------------------------------------------------


def prove(bundle: Bundle, plan: Plan, run: Run, *, runtime: str) -> Proof:
    """Golden inputs in batches of 1, 3 and 4; other sizes, or other pictures, where the plan allows them."""
    spec = bundle.preprocess
    assert spec is not None  # plan_for has looked
    model = copy.deepcopy(bundle.model).to(device="cpu", dtype=torch.float32).eval()
    golden = golden_inputs(model.config).permute(0, 2, 3, 1).numpy()  # (4, H, W, C)
    see = compare_pictures if plan.whole else compare_images
    checks = [see(f"golden inputs, {count} at once", model, spec, run, golden[:count]) for count in BATCHES]
    if plan.whole and spec.resize != "none":
        for high, wide in picture_sizes(spec):
            pictures = np.stack([drawn(high, wide, spec.channels, seed) for seed in range(2)])
            checks.append(compare_pictures(f"pictures of {high}x{wide}", model, spec, run, pictures))
    if plan.any_size:
        for size in other_sizes(model):
            other = surgery.resize(model, size, **plan.how)
            levels = golden_inputs(other.config).permute(0, 2, 3, 1).numpy()
            fitted = replace(spec, size=size, resize_to=None)
            checks.append(compare_images(f"golden inputs of {by(size)}", other, fitted, run, levels))
    first = golden[:1] if plan.whole else inputs(golden[:1], spec).numpy()
    return Proof(checks=checks, speed=race(model, inputs(golden[:1], spec), run, first, runtime))


def inputs(levels: NDArray[np.uint8], spec: Preprocess) -> torch.Tensor:
    return torch.stack([spec.normalise(one) for one in levels])


def outputs(model: ViT, images: torch.Tensor) -> dict[str, NDArray[np.float32]]:
    """What the model itself gives, under the file's names."""
    with torch.no_grad():
        embedding = model.encode(images).pooled
        found = {"logits": model.head(embedding), "embedding": embedding}
    return {name: found[name].numpy() for name in names_of(model.config)}


def compare_images(what: str, model: ViT, spec: Preprocess, run: Run, levels: NDArray[np.uint8]) -> Check:
    """Levels normalised outside, through both."""
    images = inputs(levels, spec)
    return compared(what, outputs(model, images), run(images.numpy()))


def compare_pictures(what: str, model: ViT, spec: Preprocess, run: Run, pictures: NDArray[np.uint8]) -> Check:
    """Pictures resized by `Preprocess` and by the graph; the model then gets the levels of each."""
    theirs = run(pictures)
    seen = theirs["pixels"].transpose(0, 2, 3, 1)  # (B, H, W, C)
    right = np.stack([spec.pixels(picture) for picture in pictures])
    steps = np.abs(seen - right.astype(np.float32))
    given_these = compared(what, outputs(model, inputs(seen.astype(np.uint8), spec)), theirs)
    all_in_all = compared(what, outputs(model, inputs(right, spec)), theirs)
    return replace(
        given_these,
        same_class=all_in_all.same_class,
        levels=steps.size,
        other_levels=int((steps > 0).sum()),
        largest_step=int(np.ceil(steps.max())),
        all_in_all=all_in_all.difference,
    )


def compared(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    """Every output, and what is said of the worst; NaN is a difference beyond any limit."""
    difference, limit = 0.0, LIMIT
    for name, array in ours.items():
        if theirs[name].shape != array.shape:
            raise unproven(f"{name} of {theirs[name].shape} where the model gives {array.shape}, {what}")
        apart, most = np.abs(theirs[name] - array).max(), LIMIT * max(1.0, float(np.abs(array).max()))
        if not apart / most <= difference / limit:
            difference, limit = float(np.nan_to_num(apart, nan=np.inf)), float(np.nan_to_num(most, nan=LIMIT))
    first = next(iter(ours))
    same = int((theirs[first].argmax(1) == ours[first].argmax(1)).sum())
    return Check(what=what, inputs=len(ours[first]), difference=difference, limit=limit, same_class=same)


def unproven(reason: str) -> FileError:
    return FileError(
        "An exported file must give the answers of its model; this one was not kept.",
        printable(reason, 300),
        "Use the vitrail file itself, and please report this.",
    )


def race(model: ViT, images: torch.Tensor, run: Run, batch: Any, runtime: str) -> Speed:
    """Both in turns, so that whatever else the machine does hits both."""
    times: tuple[list[float], list[float]] = [], []
    begun = time.perf_counter()
    while len(times[0]) < TURNS and (len(times[0]) < 3 or time.perf_counter() - begun < SECONDS):
        for which, call in enumerate((lambda: outputs(model, images), lambda: run(batch))):
            start = time.perf_counter()
            call()
            times[which].append(1000 * (time.perf_counter() - start))
    eager, exported = (round(statistics.median(found), 3) for found in times)
    n, threads = len(times[0]), torch.get_num_threads()
    return Speed(runtime=runtime, n=n, threads=threads, eager=eager, exported=exported)


# ---- pictures -----------------------------------------------------------------------------------


def other_sizes(model: ViT) -> list[tuple[int, int]]:
    """One patch more each way, one less (but never below two), and twice as wide."""
    (down, across), (h, w) = model.config.patch_pixels, model.config.grid
    grids = [(h + 1, w + 2), (max(2, h - 1), max(2, w - 1)), (max(2, h), 2 * w)]
    return [(rows * down, columns * across) for rows, columns in grids]


def picture_sizes(spec: Preprocess) -> list[tuple[int, int]]:
    """Larger and smaller than the model's, wide, tall, and odd."""
    H, W = spec.target
    return [(2 * H + 1, 3 * W), (H // 2 + 1, W // 2 + 3), (H + 5, 4 * W + 1), (5 * H + 3, W // 2 + 1)]


def drawn(high: int, wide: int, channels: int, seed: int) -> NDArray[np.uint8]:
    """A scene with slopes, edges and grain, as photographs have them: (high, wide, channels)."""
    chance = np.random.default_rng(seed)
    y, x = np.mgrid[0:high, 0:wide] / max(high, wide)
    scene = np.stack([255 * (a * x + b * y + c) / 3 for a, b, c in chance.random((channels, 3))], axis=-1)
    for _ in range(6):
        row, column, radius = chance.random(3)
        inside = (y - row * y.max()) ** 2 + (x - column * x.max()) ** 2 < (0.3 * radius) ** 2
        scene[inside] = 255 * chance.random(channels)
    scene += chance.normal(0, 8, scene.shape)
    return scene.round().clip(0, 255).astype(np.uint8)
