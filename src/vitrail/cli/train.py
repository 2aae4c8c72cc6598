"""`vitrail train`: train or fine-tune a model on labeled images."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Argument, Option

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import run_folder
from vitrail.cli.option_groups import flatten, options
from vitrail.cli.option_values import apply_setting, parse_batch, parse_sides, parse_value
from vitrail.cli.options import OFFLINE, QUIET
from vitrail.cli.streams import outlasting

if TYPE_CHECKING:
    from vitrail.training.callbacks import Callback


def _complete_recipe(incomplete: str) -> list[str]:
    from vitrail.training.recipes import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


@options
class RunOptions:
    """The settings that `vitrail train` and `vitrail sweep` share."""

    recipe: str | None = Option(
        None,
        metavar="NAME",
        help="Where the default settings come from; auto chooses by data and device; see --recipes.",
        autocompletion=_complete_recipe,
        show_default="auto",
    )
    start: str | None = Option(
        None,
        "--from",
        metavar="FILE|hf:OWNER/NAME",
        help="Fine-tune these weights: a file of any family, or a model on the Hugging Face hub; see "
        "--pretrained.",
    )
    offline: bool = OFFLINE
    size: str | None = Option(
        None,
        metavar="PIXELS|HxW",
        help="Image size. The position embedding of --from is resampled.",
        show_default="from the recipe or --from",
    )
    epochs: int | None = Option(
        None, min=1, help="Passes over the training set.", show_default="from the recipe"
    )
    seed: int | None = Option(
        None, min=0, help="Random seed; it does not change which images are held out.", show_default="0"
    )
    device: str | None = Option(
        None, metavar="cpu|cuda|cuda:1|mps", help="Where to compute.", show_default="auto"
    )
    settings: list[str] | None = Option(
        None,
        "--set",
        metavar="NAME=VALUE",
        help="Change any setting, such as model.depth=4, augment.flip=0.5, ema=0.99 or preprocess=deit; "
        "may be repeated.",
    )
    quiet: bool = QUIET

    def changes(self) -> dict[str, Any]:
        """The settings that are given, as `vitrail.train` takes them."""
        if self.offline:  # for the weights and the teacher, and in the processes of a distributed run
            os.environ["HF_HUB_OFFLINE"] = "1"
        given = {"epochs": self.epochs, "seed": self.seed, "device": self.device, **self._own()}
        changes = {name: value for name, value in given.items() if value is not None}
        for text in self.settings or []:
            apply_setting(changes, text)
        size = None if self.size is None else parse_sides(self.size)
        return {**changes, "recipe": self.recipe, "from_": self.start, "size": size}

    def _own(self) -> dict[str, Any]:
        """The settings that only a subclass has."""
        return {}


@options
class TrainOptions(RunOptions):
    """The settings of `vitrail train`."""

    model: str | None = Option(
        None,
        metavar="SIZE/PATCH[@PIXELS]",
        help="Train a new model of this size, such as Ti/16 or S/16@128.",
        show_default="from the recipe",
    )
    tune: str | None = Option(
        None,
        metavar="full|llrd|lora|head|bias",
        help="Weights to train: all; all, with layer-wise learning rate decay; LoRA and the head; the head "
        "only (linear probe); biases and the head.",
        show_default="from the recipe",
    )
    batch: str | None = Option(
        None,
        metavar="N|auto",
        help='Images per step; "auto" for the largest batch that fits in memory.',
        show_default="from the recipe",
    )
    lr: float | None = Option(None, help="Peak learning rate.", show_default="from the recipe")
    patience: int | None = Option(
        None,
        min=1,
        metavar="N",
        help="Stop after N epochs without a better validation accuracy (early stopping).",
    )
    threads: str | None = Option(
        None, metavar="N|auto", help="CPU threads that compute.", show_default="auto"
    )
    log: str | None = Option(
        None,
        metavar="NAMES",
        help="Loggers that get the metrics of every epoch, joined by commas: csv, tensorboard, mlflow, "
        "wandb.",
    )
    cache: bool = Option(
        False,
        "--cache",
        help="Decode and resize image files once, into the cache folder; see vitrail pack.",
    )

    def _own(self) -> dict[str, Any]:
        names = ("tune", "lr", "patience", "log")
        return {name: getattr(self, name) for name in names} | {
            "batch": parse_batch(self.batch),
            "threads": self.threads and parse_value(self.threads),
            "cache": self.cache or None,
            "model": None if self.model is None else {"name": self.model},
        }


def _list_recipes(requested: bool) -> None:
    """Print each recipe with the first line of its docstring."""
    if not requested:
        return
    from vitrail.training.recipes import recipes

    functions = recipes()
    longest = max(map(len, functions))
    for name, function in functions.items():
        print(f"{name:{longest}}  {(function.__doc__ or '').strip().splitlines()[0]}")
    raise typer.Exit


def _list_pretrained(requested: bool) -> None:
    """Print the small models on the hub with size and license; nothing is downloaded."""
    if not requested:
        return
    from vitrail.weights.readers.pretrained import PRETRAINED

    for one in PRETRAINED:
        print(one.name)  # on a line of its own, to be copied
        print(f"    {one.megabytes:.1f} MB, {one.license}; {one.pretraining}; {one.advice}")
    print("Any other ViT that `vitrail info hf:owner/name` reads works as well.")
    raise typer.Exit


def train(
    options: TrainOptions,
    data: str | None = Argument(
        None,
        help="A folder with one folder of images per class, a .csv, .jsonl, .npz or packed file, or "
        '"digits"; not needed with --resume.',
        metavar="[DATA]",
        show_default=False,
    ),
    out: Path | None = Option(
        None, help="The run directory, new or empty.", show_default="runs/NAME, or runs/NAME-2 and so on"
    ),
    classes: Path | None = Option(
        None,
        metavar="FILE",
        help="Names for numbered classes: one per line, or a JSON list or object; classes.json or "
        "classes.txt in DATA is found without it.",
    ),
    recipes: bool = Option(
        False, "--recipes", is_eager=True, callback=_list_recipes, help="List the recipes and exit."
    ),
    pretrained: bool = Option(
        False,
        "--pretrained",
        is_eager=True,
        callback=_list_pretrained,
        help="List small pretrained models for --from, and exit.",
    ),
    teacher: str | None = Option(
        None,
        metavar="FILE|hf:OWNER/NAME",
        help="Distill this model (--set distill=hard or soft, distill_weight=0.5).",
    ),
    minutes: float | None = Option(
        None, metavar="M", help="Reduce the number of epochs until training and evaluation fit in M minutes."
    ),
    folds: int | None = Option(
        None, min=2, metavar="K", help="Cross-validation: train one model per fold, report mean and spread."
    ),
    resume: bool = Option(
        False, "--resume", help="Resume the run in --out from its newest checkpoint; more --epochs extend it."
    ),
    dry_run: bool = Option(
        False, "--dry-run", help="Print the plan and every setting, then exit; no run is started."
    ),
) -> None:
    """Train or fine-tune a model on labeled images.

    The run directory gets best.safetensors, last.safetensors, report.html, config.json, metrics.jsonl,
    log.txt and checkpoints/. Ctrl-C and SIGTERM save a checkpoint before the command stops;
    `vitrail train --out RUN --resume` continues exactly where it was. Training goes on if the terminal or the
    pipe it prints to is closed.
    """
    changes = {**options.changes(), "classes": classes, "teacher": teacher, "minutes": minutes}
    if dry_run:
        if resume or folds is not None:
            other = "--resume" if resume else "--folds"
            raise InputError(f"--dry-run is for a new run; remove {other}.")
        _print_dry_run(data, out, changes, options.quiet)
        return
    if resume and out is None:
        raise InputError("--resume needs --out, the run directory, such as --out runs/photos.")
    changes["resume"] = resume
    with run_folder(out, data) as folder:
        note = f"The run directory is {printable(folder)}." if out is None else ""
        if folds is not None:
            with outlasting(printable(folder / "fold-*" / "log.txt")):
                _run_folds(data, folder, folds, changes, options.quiet, note)
        else:
            with outlasting(printable(folder / "log.txt")):
                _run_training(data, folder, changes, options.quiet, note)


def _print_dry_run(data: str | None, out: Path | None, changes: dict[str, Any], quiet: bool) -> None:
    """Print what a run would do: its plan, and its settings by the names that --set takes."""
    from vitrail.training.console_lines import print_rows
    from vitrail.training.start import dry_run

    with _training_process(quiet) as (callback, is_main):
        settings = dry_run(data, out=out, callback=callback, **changes)
    if is_main:
        print_rows(settings)


def _run_training(data: str | None, out: Path, changes: dict[str, Any], quiet: bool, note: str) -> None:
    """Train; only the main process prints."""
    from vitrail.training.start import train as run_training

    with _training_process(quiet) as (callback, is_main):
        if note:
            callback.on_message(note)
        run = run_training(data, out=out, callback=callback, verbose=False, **changes)
    if is_main:
        best, epochs = run.best, run.metrics[-1]["epoch"]
        accuracy = "Accuracy" if run.bundle.scores.thresholds is None else "Accuracy of single labels"
        print(
            f"{accuracy} {best['val_accuracy']:.2%} on {best['val_images']:,} held-out images, after epoch "
            f"{best['epoch']} of {epochs}: best.safetensors."
        )
        _print_saved(run.out, "best.safetensors", "last.safetensors", "report.html")


def _run_folds(
    data: str | None, out: Path, folds: int, changes: dict[str, Any], quiet: bool, note: str
) -> None:
    """Train a model for each fold; only the main process prints."""
    from vitrail.experiment.folds import cross_validate

    if data is None:
        raise InputError("--folds needs DATA, also with --resume: vitrail train DATA --folds 5 --out DIR.")
    with _training_process(quiet) as (callback, is_main):
        if note:
            callback.on_message(note)
        result = cross_validate(data, out=out, folds=folds, callback=callback, verbose=False, **changes)
    if is_main:
        low, high = result.interval
        for fold in result.folds:
            print(f"fold {fold.number:>2}   accuracy {fold.accuracy:.2%} on {fold.val_images:,} images")
        print(
            f"Mean accuracy {result.mean:.2%}, standard deviation between folds {result.deviation:.2%}; 95% "
            f"confidence interval {low:.2%} to {high:.2%}."
        )
        _print_saved(out, "folds.json", "report.html")


def _print_saved(folder: Path, *names: str) -> None:
    for name in names:
        if (folder / name).exists():
            print(f"Saved {printable(folder / name)}")


@contextmanager
def _training_process(quiet: bool) -> Iterator[tuple[Callback, bool]]:
    """The callback of this process, and whether it is the main one, which alone prints.

    Processes of torchrun are joined while the block runs. A signal that stops a run becomes the exit code.
    """
    from vitrail.training.signals import Interrupted, stop_early

    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with stop_early(lambda: "nothing has begun; start it again."):
            from vitrail.training.callbacks import NullCallback
            from vitrail.training.console_lines import ConsoleCallback
            from vitrail.training.parallel import destroy_process_group, init_process_group

            try:
                is_main = init_process_group().is_main
                with ConsoleCallback() as console:
                    yield (console if is_main and not quiet else NullCallback()), is_main
            finally:
                destroy_process_group()
    except Interrupted as stop:
        if is_main and not stop.saved:
            print(stop)
        sys.stdout.flush()
        raise typer.Exit(128 + stop.signal) from None


def check_options(arguments: list[str]) -> None:
    """For an unknown option that is a setting, or the name of one in another library, say how it is given."""
    known = {*inspect.signature(flatten(train)).parameters, "from", "set", "help"}
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if not argument.startswith("--") or name in known:
            continue
        from vitrail.base.fields import FOREIGN_NAMES
        from vitrail.training.recipes.settings import TrainConfig

        ours = FOREIGN_NAMES.get(name, name)
        if ours in TrainConfig.__dataclass_fields__:
            use = f"--{ours}" if ours in known else f"--set {ours}=VALUE"
            raise InputError(f"there is no option {printable(argument.partition('=')[0])}; use {use}.")
