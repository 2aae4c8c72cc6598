"""The terminal output of `vitrail walk`: the stages by equation, one attention map, and the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.base.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitrail.model.config import ViTConfig
    from vitrail.views.walk import Stage

_MAX_COLUMNS = 36  # of an attention map; without color a value takes two characters
_TITLES = {1: "from pixels to tokens", 2: "attention", 3: "MLP", 4: "to one vector", None: "The head"}


def show_walk(stages: list[Stage], summary: dict[str, Any], config: ViTConfig, console: Console) -> None:
    """A table that fits 80 columns, the attention of the chosen token, and the most likely classes."""
    from rich.text import Text

    from vitrail.views.walk.overview import NUMBERING

    console.print(Text(f"\n{summary['image']} through {summary['model']}, stage by stage", style="bold"))
    console.print(Text(summary["weights"]))
    chosen = f"block {summary['block']}, head {summary['head']}, {summary['token_name']}"
    console.print(Text(f"In detail: {chosen}.\n{NUMBERING.replace('ℓ', 'l')}\n"))
    console.print(_stage_table(stages, summary["block"], config))
    console.print()
    _show_attention(stages, summary, config, console)
    _show_answer(summary["answer"], console)


# ---- stages ---------------------------------------------------------------------------------


def _stage_table(stages: list[Stage], block: int, config: ViTConfig) -> Table:
    """The stages under their equation; blocks that are not shown in detail are folded into one row."""
    from rich.table import Table
    from rich.text import Text

    from vitrail.views.walk.overview import paper_equations

    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column("stage\nshape", width=27, overflow="fold")
    table.add_column("equation\nmeaning", overflow="fold")
    table.add_column("mean, std\nmin, max", width=15, overflow="fold")
    equations, current, others = paper_equations(config), object(), []
    for stage in stages:
        if stage.name.startswith("blocks.") and not stage.name.startswith(f"blocks.{block}."):
            others.append(stage)
            continue
        if others:
            table.add_row(*_other_blocks(others, block))
            others.clear()
        if stage.number != current:
            current = stage.number
            title = f"Eq. ({stage.number}): " if stage.number else ""
            equation = equations.get(stage.number or 0, "").replace("_{ℓ−1}", "_l-1").replace("_ℓ", "_l")
            table.add_row(Text(f"{title}{_TITLES[stage.number]}", style="bold"), Text(equation, style="bold"))
        table.add_row(*_row(stage.name, stage, stage.equation, stage.meaning))
    return table


def _other_blocks(others: list[Stage], block: int) -> list[Text]:
    """One row for the blocks before or after the one in detail."""
    first, last = (int(stage.name.split(".")[1]) for stage in (others[0], others[-1]))
    inner = others[0].equation.partition(" = ")[2]
    if first == last:
        name, equation, which = f"blocks.{first}", f"z_{last + 1} = {inner}", f"Block {first}"
    else:
        name, which = f"blocks.{first} ... blocks.{last}", f"Blocks {first} to {last}"
        equation = f"z_{last + 1} = Block_{last}( ... {inner} ... )"
    return _row(name, others[-1], equation, f"{which}, with the stages of block {block}.")


def _row(name: str, stage: Stage, equation: str, meaning: str) -> list[Text]:
    """The cells of a stage: name and shape, equation and meaning, and its numbers: of one or two, all."""
    from rich.text import Text

    from vitrail.views.walk.stage import format_number, summarize

    values = stage.tensor.tolist() if stage.tensor.numel() <= 2 else summarize(stage.tensor).values()
    numbers = [*(format_number(number) for number in values), "", "", ""]
    return [
        Text.assemble((name, "bold cyan"), f"\n{' x '.join(map(str, stage.shape))}"),
        Text.assemble((equation, "bold"), f"\n{meaning}"),
        Text(f"{numbers[0]:>7} {numbers[1]:>7}\n{numbers[2]:>7} {numbers[3]:>7}"),
    ]


# ---- attention and answer -------------------------------------------------------------------


def _show_attention(
    stages: list[Stage], summary: dict[str, Any], config: ViTConfig, console: Console
) -> None:
    """The attention of the chosen token to the patches, beside the image."""
    from rich.text import Text
    from torch.nn.functional import adaptive_avg_pool2d, adaptive_max_pool2d

    from vitrail.cli.terminal_image import gallery, image
    from vitrail.views.walk import token_name

    named = {stage.name: stage.tensor for stage in stages}
    row = named[f"blocks.{summary['block']}.attention.row"]
    h, w = (min(side, _MAX_COLUMNS) for side in config.grid)
    gray = adaptive_avg_pool2d(named["pixels"].mean(0)[None, None], (h, w))[0, 0] / 2 + 0.5
    light = adaptive_max_pool2d(row[config.prefix :].reshape(1, 1, *config.grid), (h, w))[0, 0]
    light = light / light.max().clamp_min(1e-12)
    color = console.color_system is not None
    title = f"Attention of {summary['token_name']}: block {summary['block']}, head {summary['head']}"
    console.print(Text(title, style="bold"))
    prefix = [f"{token_name(config, token)} {row[token].item():.3f}" for token in range(config.prefix)]
    console.print(Text(f"{', '.join([*prefix, f'all patches {row[config.prefix :].sum().item():.3f}'])}\n"))
    pixels = gray.clamp(0, 1).tolist()
    gallery([[image(pixels, color=color), image(pixels, light.tolist(), color=color)]], console)
    console.print()


def _show_answer(answer: list[dict[str, Any]], console: Console) -> None:
    """The most likely classes; nothing for a model without a head."""
    from rich.text import Text

    if not answer:
        console.print(Text("This model has no head, so it predicts no class."))
        return
    console.print(Text("The answer", style="bold"))
    for place, entry in enumerate(answer):
        line = f"{100 * entry['probability']:6.2f} %  {printable(entry['label'], 60)}"
        console.print(Text(line, style="bold" if place == 0 else ""))
    console.print()
