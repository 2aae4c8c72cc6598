"""Write the table of docs/scale.md by the cost model of `vitrail plan`: python -m docs.scale"""

from __future__ import annotations

from pathlib import Path

from vitrail.model.presets import preset
from vitrail.training.plan.cost import Cluster, step_cost

PAGE = Path(__file__).parent / "scale.md"
BEGIN, END = "<!-- costs -->", "<!-- end of costs -->"
MODELS = ("B/16", "L/16", "H/14", "g/14")
GPUS = (1, 8, 16, 64, 256, 1024)
PER_GPU, MOST, PER_NODE = 128, 32_768, 8
SMALL = 24 * 2**30  # bytes of a smaller GPU


def written() -> str:
    """The table, as Markdown."""
    lines = [
        "| model | GPUs | batch | mode | memory | step | images/s | all blocks recomputed: memory, step | "
        "mode on GPUs of 24 GiB, recomputed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(model, gpus) for model in MODELS for gpus in GPUS]
    return "\n".join(lines)


def _row(model: str, gpus: int) -> str:
    config, nodes, batch = preset(model), max(1, gpus // PER_NODE), min(PER_GPU * gpus, MOST)
    cost = step_cost(config, Cluster(gpus=gpus, nodes=nodes), batch)
    less = step_cost(config, Cluster(gpus=gpus, nodes=nodes), batch, checkpointed=config.depth)
    small = step_cost(config, Cluster(gpus=gpus, nodes=nodes, memory=SMALL), batch, checkpointed=config.depth)
    fits = small.mode if small.fits else f"{small.mode}, does not fit"
    return (
        f"| {model} | {gpus:,} | {batch:,} | {cost.mode} | {cost.memory / 2**30:.0f} GiB | "
        f"{cost.seconds * 1000:.0f} ms | {batch / cost.seconds:,.0f} | {less.memory / 2**30:.0f} GiB, "
        f"{less.seconds * 1000:.0f} ms | {fits} |"
    )


def page() -> str:
    """The page with the table of the code."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{written()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
