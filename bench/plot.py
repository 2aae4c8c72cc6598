"""Draw the figure of docs/benchmarks.md from the results: python -m bench.plot"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bench.table import PAGE, RESULTS
from vitrail.views.canvas import LINES, new_figure, save_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, PEER = LINES[0], "0.65"
_INFERENCE = {
    "timm": "timm, compiled",
    "timm-max": "timm, max-autotune",
    "bf16": "vitrail, bf16",
    "fp8": "vitrail, fp8",
}
_LATENCY = {"timm": "timm, compiled", "timm-reduce": "timm, reduce-overhead", "latency": "vitrail, bf16"}


def read(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a result by name."""
    return {row["row"]: row for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]}


def panels() -> dict[str, dict[str, float]]:
    """What each panel shows: numbers by row."""
    inference, latency = read("inference-gpu-B16"), read("latency-gpu-B16")
    steps, files = read("steps-B16"), read("train-transformers")
    return {
        "inference, images/s": {name: inference[row]["images_per_s"] for row, name in _INFERENCE.items()},
        "one image, ms (less is better)": {
            name: latency[row]["latency"]["batch 1"]["p50_ms"] for row, name in _LATENCY.items()
        },
        "training step, images/s": {
            row.replace("vitrail, bf16 residual", "vitrail"): found["images_per_s"]
            for row, found in sorted(steps.items())
        },
        "from JPEG files, images/s": {
            row.removesuffix(", files"): files[row]["images_per_s"] for row in sorted(files)
        },
    }


@styled
def draw() -> Figure:
    figure = new_figure(8.4, 4.2)
    for axis, (title, rows) in zip(figure.subplots(2, 2).flat, panels().items(), strict=True):
        values = list(rows.values())
        colors = [OURS if name.startswith("vitrail") else PEER for name in rows]
        bars = axis.barh(list(rows), values, color=colors, height=0.65)
        axis.bar_label(bars, [f"{v:,.0f}" if v > 100 else f"{v:.3f}" for v in values], padding=3, fontsize=8)
        axis.set(xlim=(0, 1.2 * max(values)), xticks=[])
        axis.invert_yaxis()
        axis.set_title(f"B/16, {title}", loc="left")
        axis.spines[["bottom"]].set_visible(False)
    return figure


def main() -> None:
    _, svg = save_figure(draw(), PAGE.parent / "images" / "benchmarks")
    svg.unlink()  # the page shows the PNG


if __name__ == "__main__":
    main()
