"""`vitrail train`: train or fine-tune a model on labeled images."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.base.errors import InputError, printable
from vitrail.cli.completion import recipe_names
from vitrail.cli.console import training_process
from vitrail.cli.overrides import (
    Offline,
    Quiet,
    TrainingDevice,
    parse_settings,
    parse_sides,
    parse_value,
)
from vitrail.cli.streams import outlasting

_PARTS = ("model", "augment", "mixing")  # settings with fields of their own


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
    data: Annotated[
        str | None,
        typer.Argument(
            help="A folder with one folder of images per class, a .csv, .jsonl, .npz or packed file, or "
            '"digits"; '
            "not needed with --resume.",
            metavar="[DATA]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run directory, new or empty.")] = Path("runs/new"),
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Names for numbered classes: one per line, or a JSON list or object; classes.json or "
            "classes.txt in DATA is found without it.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where the default settings come from; auto chooses by data and device; see --recipes.",
            autocompletion=recipe_names,
            show_default="auto",
        ),
    ] = None,
    recipes: Annotated[
        bool,
        typer.Option("--recipes", is_eager=True, callback=_list_recipes, help="List the recipes and exit."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE/PATCH[@PIXELS]",
            help="Train a new model of this size, such as Ti/16 or S/16@128.",
            show_default="from the recipe",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE|hf:OWNER/NAME",
            help="Fine-tune these weights: a file of any family, or a model on the Hugging Face hub; see "
            "--pretrained.",
        ),
    ] = None,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained",
            is_eager=True,
            callback=_list_pretrained,
            help="List small pretrained models for --from, and exit.",
        ),
    ] = False,
    offline: Offline = False,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="PIXELS|HxW",
            help="Image size. The position embedding of --from is resampled.",
            show_default="from the recipe or --from",
        ),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="full|llrd|lora|head|bias",
            help="Weights to train: all; all, with layer-wise learning rate decay; LoRA and the head; "
            "the head only (linear probe); biases and the head.",
            show_default="from the recipe",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|hf:OWNER/NAME",
            help="Distill this model (--set distill=hard or soft, distill_weight=0.5).",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the training set.", show_default="from the recipe"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M", help="Reduce the number of epochs until training and evaluation fit in M minutes."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help='Images per step; "auto" for the largest batch that fits in memory.',
            show_default="from the recipe",
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="from the recipe")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Random seed; it does not change which images are held out.", show_default="0"
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2, help="Cross-validation: train one model per fold and report mean and spread.", metavar="K"
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Stop after N epochs without a better validation accuracy (early stopping).",
        ),
    ] = None,
    device: TrainingDevice = None,
    threads: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="CPU threads that compute.", show_default="auto"),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Loggers that get the metrics of every epoch, joined by commas: csv, tensorboard, mlflow, "
            "wandb.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the run in --out from its newest checkpoint; more --epochs extend it.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and every setting, then exit; no run is started."),
    ] = False,
    quiet: Quiet = False,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache", help="Decode and resize image files once, into the cache folder; see vitrail pack."
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change any setting, such as model.depth=4, augment.flip=0.5, ema=0.99 or preprocess=deit; "
            "may be repeated.",
        ),
    ] = None,
) -> None:
    """Train or fine-tune a model on labeled images.

    The run directory gets best.safetensors, last.safetensors, report.html, config.json, metrics.jsonl,
    log.txt and checkpoints/. Ctrl-C and SIGTERM save a checkpoint before the command stops;
    `vitrail train --out RUN --resume` continues exactly where it was. Training goes on if the terminal or the
    pipe it prints to is closed.
    """
    options = {"epochs": epochs, "batch": _parse_batch(batch), "lr": lr, "seed": seed, "tune": tune}
    options |= {"patience": patience, "device": device, "log": log}
    options["threads"] = threads and parse_value(threads)
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if cache:
        changes["cache"] = True
    if model is not None:
        changes["model"] = {"name": model}
    for text in settings or []:
        apply_setting(changes, text)
    changes |= {"classes": classes, "recipe": recipe, "from_": start, "teacher": teacher}
    changes["minutes"] = minutes
    changes["size"] = None if size is None else parse_sides(size)

    if offline:  # for the weights and the teacher, and in the processes of a distributed run
        os.environ["HF_HUB_OFFLINE"] = "1"
    if dry_run:
        if resume or folds is not None:
            other = "--resume" if resume else "--folds"
            raise InputError(f"--dry-run is for a new run; remove {other}.")
        _print_dry_run(data, out, changes, quiet)
        return
    changes["resume"] = resume
    if folds is not None:
        with outlasting(printable(out / "fold-*" / "log.txt")):
            _run_folds(data, out, folds, changes, quiet)
        return
    with outlasting(printable(out / "log.txt")):
        _run_training(data, out, changes, quiet)


def _print_dry_run(data: str | None, out: Path, changes: dict[str, Any], quiet: bool) -> None:
    """Print what a run would do: its plan, and its settings by the names that --set takes."""
    from vitrail.training.console_lines import print_rows
    from vitrail.training.start import dry_run

    with training_process(quiet=quiet) as (callback, is_main):
        settings = dry_run(data, out=out, callback=callback, **changes)
    if is_main:
        print_rows(settings)


def _run_training(data: str | None, out: Path, changes: dict[str, Any], quiet: bool) -> None:
    """Train; only the main process prints."""
    from vitrail.training.start import train as run_training

    with training_process(quiet=quiet) as (callback, is_main):
        run = run_training(data, out=out, callback=callback, verbose=False, **changes)
    if is_main:
        best, epochs = run.best, run.metrics[-1]["epoch"]
        accuracy = "Accuracy" if run.bundle.scores.thresholds is None else "Accuracy of single labels"
        print(
            f"{accuracy} {best['val_accuracy']:.2%} on {best['val_images']:,} held-out images, after epoch "
            f"{best['epoch']} of {epochs}: best.safetensors."
        )
        for name in ("best.safetensors", "last.safetensors", "report.html"):
            if (run.out / name).exists():
                print(f"Saved {printable(run.out / name)}")


def _run_folds(data: str | None, out: Path, folds: int, changes: dict[str, Any], quiet: bool) -> None:
    """Train a model for each fold; only the main process prints."""
    from vitrail.experiment.folds import cross_validate

    if data is None:
        raise InputError("--folds needs DATA, also with --resume: vitrail train DATA --folds 5 --out DIR.")
    with training_process(quiet=quiet) as (callback, is_main):
        result = cross_validate(data, out=out, folds=folds, callback=callback, verbose=False, **changes)
    if is_main:
        low, high = result.interval
        for fold in result.folds:
            print(f"fold {fold.number:>2}   accuracy {fold.accuracy:.2%} on {fold.val_images:,} images")
        print(
            f"Mean accuracy {result.mean:.2%}, standard deviation between folds {result.deviation:.2%}; 95% "
            f"confidence interval {low:.2%} to {high:.2%}."
        )
        for name in ("folds.json", "report.html"):
            if (out / name).exists():
                print(f"Saved {printable(out / name)}")


def check_options(arguments: list[str]) -> None:
    """For an unknown option that is a setting, or the name of one in another library, say how it is given."""
    known = {*inspect.signature(train).parameters, "from", "set", "help"}
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


def _parse_batch(text: str | None) -> int | str | None:
    value = None if text is None or text == "auto" else parse_value(text)
    if value is None:
        return text
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"--batch must be a number of images, at least 1, or auto, not {printable(text)!r}.")
    return value


def apply_setting(changes: dict[str, Any], text: str) -> None:
    """Add NAME=VALUE: a training setting, or a FIELD of model, augment, mixing or preprocess."""
    from vitrail.training.recipes.settings import TrainConfig, unknown_setting

    path, equals, value = text.partition("=")
    part, dot, name = path.rpartition(".")
    if equals and "preprocess" in (part, path):
        _apply_preprocess(changes, text)
        return
    if not equals or not name or path in _PARTS or part not in ("", *_PARTS):
        raise InputError(
            f"--set takes NAME=VALUE, such as model.depth=4, augment.flip=0.5 or ema=0.99, not {text!r}."
        )
    if not dot and name not in TrainConfig.__dataclass_fields__:
        raise InputError(unknown_setting(name))
    fields = changes.setdefault(part, {}) if dot else changes
    fields[name] = (
        tuple(map(parse_value, value.split(","))) if name == "betas" else _parse_field(part, name, value)
    )


def _apply_preprocess(changes: dict[str, Any], text: str) -> None:
    """Add preprocess=NAME or preprocess.FIELD=VALUE."""
    before, new = changes.get("preprocess"), parse_settings([text])["preprocess"]
    if before is not None and isinstance(before, str) | isinstance(new, str):
        raise InputError(f"--set {printable(text)} and another --set preprocess exclude each other.")
    changes["preprocess"] = new if before is None else {**before, **new}


def _parse_field(part: str, name: str, value: str) -> Any:
    """The text if it is one of the field's allowed values (some have "none"), else what it parses to."""
    from vitrail.base.fields import literal_values, type_hints
    from vitrail.images.augment.mixing import Mixing
    from vitrail.images.augment.pipeline import Augment
    from vitrail.model.config import ViTConfig
    from vitrail.training.recipes.settings import TrainConfig

    config = {"": TrainConfig, "model": ViTConfig, "augment": Augment, "mixing": Mixing}[part]
    return value if value in literal_values(type_hints(config).get(name)) else parse_value(value)
