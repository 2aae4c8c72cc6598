"""`vitrail sweep`: search for a better learning rate, weight decay and augmentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from vitrail.base.errors import printable
from vitrail.base.progress import ProgressBars
from vitrail.cli.train import RunOptions

if TYPE_CHECKING:
    from vitrail.experiment.halving_sweep import Sweep


def sweep(
    data: str = Argument(..., help="What `vitrail train` takes: a folder, a table, an array file."),
    out: Path = Option(
        Path("runs/sweep"), help="The output folder: new, empty, or that of a sweep to resume."
    ),
    trials: int = Option(9, min=2, help="Candidates of the first round."),
    processes: int = Option(1, min=1, help="Runs at a time, one thread each."),
    lr_only: bool = Option(
        False,
        "--lr-only",
        help="Only a learning rate range test: 150 steps with a growing learning rate, a figure of the "
        "loss, and a suggestion.",
    ),
    *,
    options: RunOptions,
) -> None:
    """Search for a better learning rate, weight decay and augmentation.

    Nine candidates are trained for a ninth of the epochs, the best three for a third, and the best one to
    the end (successive halving): together about three runs. The first candidate is the recipe itself. Run the
    same command again to resume. The output folder gets sweep.json and all runs; the command that trains the
    best candidate is printed.
    """
    changes = {**options.changes(), "seed": options.seed or 0, "recipe": options.recipe or "auto"}
    with ProgressBars(enabled=not options.quiet) as bars:
        if lr_only:
            _find_lr(data, out, changes, bars)
            return
        from vitrail.experiment.halving_sweep import sweep as run_sweep

        result = run_sweep(
            data,
            out=out,
            trials=trials,
            processes=processes,
            progress=lambda done, total: bars("runs", done, total),
            **changes,
        )
    _print_result(result)


def _find_lr(data: str, out: Path, changes: dict[str, Any], bars: ProgressBars) -> None:
    from vitrail.experiment.lr_finder import find_lr

    curve = find_lr(data, out=out, progress=lambda done, total: bars("steps", done, total), **changes)
    bars.close()
    print(
        f"Suggested learning rate {curve.lr:g}: a tenth of where the loss is lowest on a ramp of "
        f"{len(curve.lrs)} steps from {curve.lrs[0]:g} to {curve.lrs[-1]:.2g}. The recipe's is "
        f"{curve.recipe_lr:g}."
    )
    for ending in ("json", "png", "svg"):
        print(f"Saved {printable(out / f'lr.{ending}')}")


def _print_result(result: Sweep) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("candidate")
    for name in ("lr", "weight decay", "augmentation", *(f"{one.epochs} ep." for one in result.rounds)):
        table.add_column(name, justify="right")
    scores_of = {
        one.name: [a.scores[one.name] for a in result.rounds if one.name in a.scores]
        for one in result.candidates
    }
    order = sorted(result.candidates, key=lambda one: (-len(scores_of[one.name]), -scores_of[one.name][-1]))
    for one in order:
        scores = [f"{score:.1%}" for score in scores_of[one.name]]
        scores += [""] * (len(result.rounds) - len(scores))
        table.add_row(one.name, f"{one.lr:g}", f"{one.weight_decay:g}", f"x {one.strength:g}", *scores)
    Console(highlight=False).print(table)
    print(
        f"Best: {result.best.name}, {result.score:.2%} on the held-out images that it was selected on; "
        "expect a little less on new ones."
    )
    print(
        f"Saved {printable(result.out / 'sweep.json')} and the model {printable(result.out / result.model)}"
    )
    print(f"Train it again with: {printable(result.command, 2000)}")
