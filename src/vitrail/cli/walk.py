"""`vitrail walk`: one picture through a model, stage by stage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli.facts import Set, settings
from vitrail.cli.places import check_new, write_new
from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from vitrail.config import ViTConfig
    from vitrail.model import ViT
    from vitrail.preprocess import Preprocess
    from vitrail.walkthrough import Stage

WEIGHTS = (".safetensors", ".npz", ".pt", ".pth", ".bin")
MOST_TOKENS = 5_000  # every head's scores are written down: T x T numbers each
MOST_VALUES = 4_096  # larger tensors are in the JSON as a summary alone
MOST_COLUMNS = 36  # of a map in the terminal, where a value without colour takes two characters


def walk(
    model: Annotated[str, typer.Argument(help='A weight file, or a size such as "mu/4" or "B/16@384".')],
    image: Annotated[
        Path, typer.Argument(help="A picture: JPEG, PNG, WebP, BMP, GIF or TIFF. Alpha is laid over white.")
    ],
    block: Annotated[int, typer.Option(help="Which block to show in detail, from 0.")] = 0,
    head: Annotated[int, typer.Option(help="Which of its heads, from 0.")] = 0,
    token: Annotated[int, typer.Option(help="Which token to follow, from 0: class token, patches.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="A new file for the stages and their numbers.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="A new file for the stages with small pictures.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Draws the weights of a size.", show_default="0"),
    ] = None,
    given: Set = None,
) -> None:
    """Take one picture through a model and see every step: equation, shape, meaning, numbers.

    A weight file is shown with its own preprocessing. A size has random weights: what is shown is
    then how a ViT works, not what it has learned.
    """
    for option, path in (("--json", json_file), ("--html", html_file)):
        if path is not None:
            check_new(option, path)
    if json_file is not None and json_file == html_file:
        raise InputError("--json and --html need a file each.", printable(json_file), "Name another file.")

    from rich.console import Console

    from vitrail import walkthrough as steps

    vit, preprocess, weights = load_model(model, seed, settings(given or []))
    pixels = read_picture(image, preprocess)
    stages = steps.walk(vit, pixels, block=block, head=head, token=token)
    facts: dict[str, Any] = {"model": model, "weights": weights, "picture": printable(image)}
    facts |= {"block": block, "head": head, "token": token, "token_name": steps.token_name(vit.config, token)}
    show(stages, facts, vit.config, Console(highlight=False))
    if json_file is not None:
        write_new(json_file, as_json(stages, facts))
    if html_file is not None:
        from vitrail.cli.walk_page import page

        write_new(html_file, page(stages, facts, vit.config))


def load_model(name: str, seed: int | None, facts: dict[str, Any]) -> tuple[ViT, Preprocess | None, str]:
    """The model, its preprocessing, and a sentence on its weights."""
    import torch

    from vitrail.model import ViT
    from vitrail.preprocess import Preprocess
    from vitrail.presets import preset
    from vitrail.weights.preprocessing import overridden

    if name.startswith("hf:") or Path(name).exists() or Path(name).suffix in WEIGHTS:
        from vitrail.weights.load import load

        if seed is not None:
            raise InputError(f"--seed draws the weights of a size, and {printable(name)} has its own.")
        bundle = load(name, **facts)
        check_tokens(name, bundle.model.config)
        return bundle.model, bundle.preprocess, f"The weights of {printable(name)}."
    given = facts.pop("preprocess", None)
    if "checkpoint_key" in facts:
        raise InputError(f"checkpoint_key is for a torch.save file, and {name} is a size; leave it out.")
    config = preset(name, **facts)
    check_tokens(name, config)
    seed = seed or 0
    torch.manual_seed(seed)
    half = (0.5,) * config.channels
    squash = Preprocess(size=config.pixels, interpolation="bicubic", mean=half, std=half)  # type: ignore[arg-type]
    words = "nothing learned: shapes and equations are real, the answer is not."
    return ViT(config), overridden(squash, given, config, []), f"Random weights (seed {seed}), {words}"


def check_tokens(name: str, config: ViTConfig) -> None:
    if config.tokens > MOST_TOKENS:
        raise InputError(
            f"A walk shows a score for every pair of tokens, and takes at most {MOST_TOKENS:,} tokens.",
            f"{printable(name)} with {config.tokens:,}",
            "Use a larger patch or a smaller picture.",
        )


def read_picture(path: Path, preprocess: Preprocess | None) -> Tensor:
    """A picture file as the model takes it: (C, H, W)."""
    from vitrail.data.decode import open_picture

    if preprocess is None or preprocess.channels not in (1, 3, 4):
        raise InputError(
            "A picture file has 1, 3 or 4 channels.",
            "a model for other things",
            "Use a model for pictures, or vitrail.walk with a tensor.",
        )
    return preprocess(open_picture(path))


# ---- the terminal ---------------------------------------------------------------------------


def show(stages: list[Stage], facts: dict[str, Any], config: ViTConfig, console: Console) -> None:
    """A table that fits 80 columns, and where the chosen token looks."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"\n{facts['picture']} through {facts['model']}, stage by stage", style="bold"))
    console.print(Text(facts["weights"]))
    console.print(Text(f"In detail: block {facts['block']}, head {facts['head']}, {facts['token_name']}.\n"))
    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("stage\nshape", width=27, overflow="fold")
    table.add_column("equation\nmeaning", overflow="fold")
    table.add_column("mean, std\nmin, max", width=15, overflow="fold")
    for stage in stages:
        shown = stage.tensor.tolist() if stage.tensor.numel() <= 2 else summary(stage.tensor).values()
        numbers = [*(short(number) for number in shown), "", "", ""]  # two numbers say more than their mean
        table.add_row(
            Text.assemble((stage.name, "bold cyan"), f"\n{' x '.join(map(str, stage.shape))}"),
            Text.assemble((stage.equation, "bold"), f"\n{stage.meaning}"),
            Text(f"{numbers[0]:>7} {numbers[1]:>7}\n{numbers[2]:>7} {numbers[3]:>7}"),
        )
    console.print(table)
    console.print()
    show_row(stages, facts, config, console)


def show_row(stages: list[Stage], facts: dict[str, Any], config: ViTConfig, console: Console) -> None:
    """The chosen token's attention where the patches lie, beside the picture itself."""
    from rich.text import Text
    from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

    from vitrail.cli.picture import gallery, picture
    from vitrail.walkthrough import token_name

    named = {stage.name: stage.tensor for stage in stages}
    row = named[f"blocks.{facts['block']}.attention.row"]
    h, w = (min(side, MOST_COLUMNS) for side in config.grid)
    ink = adaptive_avg_pool2d(named["pixels"].mean(0)[None, None], (h, w))[0, 0] / 2 + 0.5
    light = adaptive_max_pool2d(row[config.prefix :].reshape(1, 1, *config.grid), (h, w))[0, 0]
    light = light / light.max().clamp_min(1e-12)
    colour = console.color_system is not None
    where = f"Where {facts['token_name']} looks: block {facts['block']}, head {facts['head']}"
    console.print(Text(where, style="bold"))
    front = [f"{token_name(config, token)} {row[token].item():.3f}" for token in range(config.prefix)]
    console.print(Text(f"{', '.join([*front, f'all patches {row[config.prefix :].sum().item():.3f}'])}\n"))
    shown = [picture(ink.clamp(0, 1).tolist(), colour=colour)]
    shown.append(picture(ink.clamp(0, 1).tolist(), light.tolist(), colour=colour))
    gallery([shown], console)
    console.print()


def short(number: float | None) -> str:
    """At most seven characters."""
    if number is None:
        return "-"
    return f"{number:.3g}" if len(f"{number:.3g}") <= 7 else f"{number:.0e}"


# ---- files ----------------------------------------------------------------------------------


def summary(tensor: Tensor) -> dict[str, float | None]:
    """Mean, deviation, least and most; None for what is no number."""
    values = tensor.double()
    numbers = {
        "mean": values.mean(),
        "std": values.std(correction=0),
        "min": values.min(),
        "max": values.max(),
    }
    return {name: finite(number.item()) for name, number in numbers.items()}


def finite(values: Any) -> Any:
    """The same numbers, None for those that JSON cannot write."""
    if isinstance(values, list):
        return [finite(value) for value in values]
    return values if math.isfinite(values) else None


def as_json(stages: list[Stage], facts: dict[str, Any]) -> str:
    listed = []
    for stage in stages:
        entry: dict[str, Any] = {"name": stage.name, "equation": stage.equation, "meaning": stage.meaning}
        entry |= {"shape": stage.shape, "summary": summary(stage.tensor)}
        if stage.tensor.numel() <= MOST_VALUES:
            entry["values"] = finite(stage.tensor.tolist())
        listed.append(entry)
    return json.dumps({**facts, "stages": listed}, allow_nan=False)
