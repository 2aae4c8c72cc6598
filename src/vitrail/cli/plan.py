"""`vitrail plan`: what a run would cost on so many GPUs, before there is one. torch is not imported."""

from __future__ import annotations

import json
from dataclasses import asdict

from typer import Option

from vitrail.base.errors import ConfigError

_ASSUMED = (
    "compute is measured on one H200 for B/16 and L/16, and extrapolated for other widths; links, latency, "
    "cores, 110 kB for an image file and the overlap of compute and traffic are not measured (docs/scale.md)"
)
_FEW_IMAGES = 32  # for each GPU, below which launches take longer than computing


def plan(
    model: str = Option("B/16", help="A model name, such as B/16, L/16@384 or g/14."),
    gpus: int = Option(8, min=1, max=1_000_000, help="GPUs over all nodes."),
    nodes: int = Option(1, min=1, max=1_000_000, help="Machines, with equally many GPUs."),
    batch: int | None = Option(
        None, min=1, help="Images per step, over all GPUs; by default 128 for each GPU."
    ),
    images: int = Option(1_281_167, min=1, help="Images of the training set."),
    epochs: int = Option(300, min=1, help="Passes over them."),
    accumulate: int = Option(1, min=1, help="Micro-batches per step."),
    checkpoint_blocks: int = Option(0, min=0, help="Blocks that are computed again for the gradient."),
    ema: bool = Option(False, "--ema", help="Keep an average of the weights."),
    tflops: float = Option(
        790.0, min=0.1, help="Of a GPU's bf16 matrix product; 790 was measured on an H200."
    ),
    memory: float = Option(139.0, min=1, help="GiB of a GPU."),
    link: float = Option(360.0, min=0.1, help="GB/s between the GPUs of a node, each way."),
    network: float = Option(40.0, min=0.01, help="GB/s between nodes for each GPU, each way."),
    cores: int = Option(14, min=1, help="Cores that decode, for each GPU."),
    as_json: bool = Option(False, "--json", help="Print JSON."),
) -> None:
    """Estimate time and memory of training on many GPUs.

    It names the bottleneck, and how the GPUs should share the model. A small cost model, not a measurement:
    `vitrail train DATA --dry-run` plans a run by the machine it is on.
    """
    from vitrail.model.presets import preset
    from vitrail.training.clock import format_seconds
    from vitrail.training.console_lines import print_rows
    from vitrail.training.plan.cost import Cluster, describe_cost, step_cost

    config = preset(model)
    cluster = Cluster(
        gpus=gpus,
        nodes=nodes,
        tflops=tflops,
        memory=memory * 2**30,
        link=link * 1e9,
        network=network * 1e9,
        cores=cores,
    )
    total = batch or 128 * gpus
    if total > images:
        raise ConfigError(
            f"the batch ({total:,}) must not exceed the {images:,} images; use a smaller --batch."
        )
    cost = step_cost(config, cluster, total, ema=ema, checkpointed=checkpoint_blocks, accumulate=accumulate)
    steps = epochs * (images // total)
    seconds = steps * cost.seconds
    if as_json:
        names = ("seconds", "memory", "sent", "bottleneck")
        figures = {name: getattr(cost, name) for name in names}
        print(json.dumps({**asdict(cost), **figures, "steps": steps, "run_seconds": seconds}, indent=2))
        return
    rows = describe_cost(model, config, cluster, total, cost)
    rows["run"] = (
        f"{steps:,} steps ({epochs:,} epoch{'s' * (epochs > 1)} of {images:,} images): "
        f"{format_seconds(seconds)}, {seconds * gpus / 3600:,.0f} GPU hours"
    )
    if total / gpus / accumulate < _FEW_IMAGES:
        rows["small"] = (
            f"fewer than {_FEW_IMAGES} images at a time on a GPU: the step will be slower than this"
        )
    print_rows({**rows, "assumed": _ASSUMED})
