"""Options of commands that open a weight file: what the file does not contain, given by the user."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.base.errors import DeviceWarning, InputError, printable, suggest
from vitrail.cli.completion import family_names

Family = Annotated[
    str | None, typer.Option(help="Read the file as one of this family.", autocompletion=family_names)
]
Keys = Annotated[
    Path | None,
    typer.Option(
        help='A JSON file with a key table of your own: [["their.{i}.name", "our.{i}.name"], ...]; '
        '["decoder.*", null] ignores tensors.'
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="What the file does not contain: heads=6, activation=relu, eps=1e-5, block=post-norm; "
        "preprocess=deit (a published preprocessing), preprocess.mean=0.485,0.456,0.406 and other fields of "
        "it; checkpoint_key=model_ema.",
    ),
]
WorkersOption = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Processes that decode files (threads for fewer than 400 images); auto chooses by the cores, 0 "
        "decodes in the main thread.",
    ),
]
Native = Annotated[
    bool | None,
    typer.Option(
        "--native/--no-native",
        help="Keep the aspect ratio of each image, or resize all to one shape; native is for models that "
        "were trained so.",
        show_default="as the model was trained",
    ),
]


def _hide_device_lines(quiet: bool) -> bool:
    if quiet:
        warnings.filterwarnings("ignore", category=DeviceWarning)
    return quiet


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        callback=_hide_device_lines,
        help="Show results and errors only: no progress and no notes.",
    ),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Download nothing: hf:owner/name must be in the cache.")
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda|cuda:1|mps",
        help="Where the model is computed; auto is a GPU if one can be used, and the CPU otherwise.",
    ),
]
TrainingDevice = Annotated[
    str | None, typer.Option(metavar="cpu|cuda|cuda:1|mps", help="Where to compute.", show_default="auto")
]
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...|FILE",
        help="Zero-shot: the classes of a model with a text tower, or a file with one on each line.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT|FILE",
        help='Zero-shot: "a photo of a {}", may be repeated; or a file with the classes, one on each line, '
        "or a JSON object of classes with their texts.",
    ),
]
Templates = Annotated[
    Path | None,
    typer.Option(help='Zero-shot: a file with a text such as "a photo of a {}" on each line.'),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="auto|fp32|bf16|fp8|int8",
        help="Accelerate the model; fp8 (GPU) and int8 (CPU) need --calibration. See docs/performance.md.",
        show_default="bf16 on a GPU, the model as it is on a CPU",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="For int8 and fp8: images like those to come; 512 of them are used at most."
    ),
]
MinAgreement = Annotated[
    float,
    typer.Option(
        help="For int8 and fp8: the fraction of held-out calibration images that must get the class of fp32."
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        metavar="LAYERS|auto",
        help="For int8 and fp8: layers to leave in higher precision, separated by commas; auto finds the "
        "fewest that are needed.",
    ),
]
Size = Annotated[str | None, typer.Option(help="The image size: a side, or HxW.")]


def load_arguments(
    family: str | None = None,
    keys: Path | None = None,
    given: Iterable[str] | None = None,
    size: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The keyword arguments of `vitrail.load`, from a command's options; without a device if it is auto."""
    if more.get("device") == "auto":
        del more["device"]
    arguments = {"family": family, "size": parse_sides(size) if size else None, **more}
    if keys is not None:
        arguments["keys"] = _read_keys(keys)
    arguments |= parse_settings(given or [])
    return {name: value for name, value in arguments.items() if value is not None}


def parse_settings(given: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments of `vitrail.load`, from FIELD=VALUE options.

    A field is a field of ViTConfig, "preprocess" or "preprocess." with a field of it, or checkpoint_key.
    """
    from vitrail.base.fields import type_hints
    from vitrail.images.preprocess import Preprocess
    from vitrail.model.config import ViTConfig

    model, images = type_hints(ViTConfig), type_hints(Preprocess)
    names = [*model, "preprocess", *(f"preprocess.{name}" for name in images), "checkpoint_key"]
    settings: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            raise InputError(
                "--set takes FIELD=VALUE with a field of the model or its preprocessing, not "
                f"{printable(text)!r}. {suggest(name, names)}"
            )
        field = name.removeprefix("preprocess.")
        if name in ("checkpoint_key", "preprocess"):
            settings[name] = value
        elif field != name and isinstance(settings.get("preprocess"), str):
            raise InputError(
                f"--set preprocess={settings['preprocess']} and {printable(name)} exclude each other."
            )
        elif field != name:
            settings.setdefault("preprocess", {})[field] = _parse_field(value, images[field])
        else:
            settings[name] = _parse_field(value, model[name])
    return settings


def _parse_field(text: str, hint: Any) -> Any:
    """One of the field's allowed values, even "none"; comma-separated numbers; or a plain value."""
    from vitrail.base.fields import literal_values

    if text in literal_values(hint):
        return text
    parts = tuple(parse_value(part.strip()) for part in text.split(","))
    numbers = len(parts) > 1 and all(isinstance(part, (int, float)) for part in parts)
    return parts if numbers else parse_value(text)


def parse_speedup(
    precision: str | None,
    calibration: Path | None,
    min_agreement: float,
    keep: str | None,
) -> dict[str, Any]:
    """The arguments of `Speedup`; empty if the model is computed as it is."""
    if precision is None:
        for option, value in (("--calibration", calibration), ("--keep", keep)):
            if value is not None:
                raise InputError(f"{option} is for --precision int8 and fp8; add one, or remove it.")
        return {}
    known = ("auto", "fp32", "bf16", "fp8", "int8")
    if precision not in known:
        raise InputError(f"Unknown precision {printable(repr(precision))}. {suggest(precision, known)}")
    layers = (
        keep if keep == "auto" else tuple(name.strip() for name in (keep or "").split(",") if name.strip())
    )
    return {
        "precision": precision,
        "calibration": calibration,
        "min_agreement": min_agreement,
        "keep": layers,
    }


def parse_value(text: str) -> Any:
    """A number, true, false, none, HxW, or the text itself; the field checks the rest."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    parts = text.split("x")
    return tuple(map(int, parts)) if len(parts) > 1 and all(p.isdecimal() for p in parts) else text


def expect_files(inputs: list[str], workers: Any) -> None:
    """Let worker processes get ready while the model is loaded, if these paths have work for them."""
    from vitrail.images.workers import MIN_IMAGES
    from vitrail.images.workers import expect_files as expect
    from vitrail.predict.image_sources import expand_paths

    if "-" not in inputs:
        expect(workers, sum(1 for _ in islice(expand_paths(inputs), MIN_IMAGES)))


def parse_workers(text: str) -> Any:
    """A number of workers, or "auto"."""
    from vitrail.base.errors import ConfigError
    from vitrail.images.workers import check_workers

    try:
        return check_workers(parse_value(text))
    except ConfigError as error:
        raise InputError(f"--{error}") from error


def parse_sides(text: str) -> Any:
    """A side, or (H, W) from HxW."""
    sides = parse_value(text)
    if not isinstance(sides, (int, tuple)) or isinstance(sides, bool):
        raise InputError(f"--size must be a number or HxW, such as 224 or 256x128, not {printable(text)!r}.")
    return sides


def _read_keys(path: Path) -> list[Any]:
    """The rows of the user's key table."""
    from vitrail.weights.readers.folder import read_json

    rows = read_json(path)
    if not isinstance(rows, list):
        raise InputError(
            f"--keys needs a JSON file with a list of rows, and {printable(path)} is not one; see --help."
        )
    return rows
