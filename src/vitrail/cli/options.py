"""The options that commands share: how a model is opened, classes from words, precision."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from typer import Argument, Option

from vitrail.base.errors import DeviceWarning, InputError, printable, suggest
from vitrail.cli.option_groups import options
from vitrail.cli.option_values import parse_settings, parse_sides, parse_workers

if TYPE_CHECKING:
    from vitrail.fast.accelerate import Speedup
    from vitrail.weights.text.prompts import Prompts


def _hide_device_lines(quiet: bool) -> bool:
    if quiet:
        warnings.filterwarnings("ignore", category=DeviceWarning)
    return quiet


def _complete_family(incomplete: str) -> list[str]:
    from vitrail.weights.families import FAMILIES

    return [family.name for family in FAMILIES if family.name.startswith(incomplete)]


MODEL = Argument(..., help="A weight file, a model folder, or hf:owner/name.")
MODEL_OR_ONNX = Argument(..., help="A weight file, a model folder, hf:owner/name, or an .onnx file.")
DATA = Argument(
    ...,
    help='A folder with one folder of images per class, a .csv, .jsonl, .npz or packed file, or "digits".',
)
Batch = Annotated[
    int, Option(min=1, max=1_000_000, help="Images per forward pass; results differ by rounding only.")
]
WORKERS = Option(
    "auto",
    metavar="N|auto",
    help="Processes that decode files (threads for fewer than 400 images); auto chooses by the cores, 0 "
    "decodes in the main thread.",
)
NATIVE = Option(
    None,
    "--native/--no-native",
    help="Keep the aspect ratio of each image, or resize all to one shape; native is for models that were "
    "trained so.",
    show_default="as the model was trained",
)
QUIET = Option(
    False,
    "--quiet",
    "-q",
    callback=_hide_device_lines,
    help="Show results and errors only: no progress and no notes.",
)
OFFLINE = Option(False, "--offline", help="Download nothing: hf:owner/name must be in the cache.")
DEVICE = Option(
    "auto",
    metavar="auto|cpu|cuda|cuda:1|mps",
    help="Where the model is computed; auto is a GPU if one can be used, and the CPU otherwise.",
)


@options
class FileOptions:
    """How a weight file is read, and what it does not contain."""

    size: str | None = Option(None, help="The image size: a side, or HxW.")
    family: str | None = Option(
        None, help="Read the file as one of this family.", autocompletion=_complete_family
    )
    keys: Path | None = Option(
        None,
        help='A JSON file with a key table of your own: [["their.{i}.name", "our.{i}.name"], ...]; '
        '["decoder.*", null] ignores tensors.',
    )
    settings: list[str] | None = Option(
        None,
        "--set",
        metavar="FIELD=VALUE",
        help="What the file does not contain: heads=6, activation=relu, eps=1e-5, block=post-norm; "
        "preprocess=deit (a published preprocessing), preprocess.mean=0.485,0.456,0.406 and other fields of "
        "it; checkpoint_key=model_ema.",
    )
    offline: bool = OFFLINE

    def named(self) -> dict[str, object]:
        """The values by the names of their options, for messages."""
        names = {"--size": self.size, "--family": self.family, "--keys": self.keys, "--set": self.settings}
        return {name: value for name, value in names.items() if value}

    def overrides(self) -> dict[str, Any]:
        """The keyword arguments of `vitrail.load` that are given and that change the model."""
        values = {"family": self.family, "size": parse_sides(self.size) if self.size else None}
        values |= {
            "keys": _read_keys(self.keys) if self.keys else None,
            **parse_settings(self.settings or []),
        }
        return {name: value for name, value in values.items() if value is not None}


@options
class ModelOptions(FileOptions):
    """How a model is opened, and where it is computed."""

    device: str = DEVICE
    quiet: bool = QUIET

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `vitrail.load`; without a device if it is auto."""
        values = self.overrides()
        if self.device != "auto":
            values["device"] = self.device
        return values | {"offline": True} if self.offline else values

    def for_precision(self, precision: str | None) -> Self:
        """On the CPU for int8, which GPUs do not compute."""
        return replace(self, device="cpu") if precision == "int8" and self.device == "auto" else self


@options
class WordOptions:
    """Classes from words, for a model with a text tower."""

    labels: str | None = Option(
        None,
        metavar="A,B,...|FILE",
        help="Zero-shot: the classes of a model with a text tower, or a file with one on each line.",
    )
    prompts: list[str] | None = Option(
        None,
        metavar="TEXT|FILE",
        help='Zero-shot: "a photo of a {}", may be repeated; or a file with the classes, one on each line, '
        "or a JSON object of classes with their texts.",
    )
    templates: Path | None = Option(
        None, help='Zero-shot: a file with a text such as "a photo of a {}" on each line.'
    )

    def read(self) -> Prompts | None:
        """The texts of each class; None if no option is given."""
        if self.labels is None and not self.prompts and self.templates is None:
            return None
        from vitrail.weights.text.prompts import read_prompts

        return read_prompts(self.labels, self.prompts, self.templates)


@options
class GateOptions:
    """What int8 and fp8 must keep."""

    min_agreement: float = Option(
        0.99,
        help="For int8 and fp8: the fraction of held-out calibration images that must get the class of fp32.",
    )
    keep: str | None = Option(
        None,
        metavar="LAYERS|auto",
        help="For int8 and fp8: layers to leave in higher precision, separated by commas; auto finds the "
        "fewest that are needed.",
    )

    @property
    def layers(self) -> tuple[str, ...] | Literal["auto"]:
        return "auto" if self.keep == "auto" else split_names(self.keep)


@options
class SpeedOptions(GateOptions):
    """How the model is accelerated."""

    precision: str | None = Option(
        None,
        metavar="auto|fp32|bf16|fp8|int8",
        help="Accelerate the model; fp8 (GPU) and int8 (CPU) need --calibration. See docs/performance.md.",
        show_default="bf16 on a GPU, the model as it is on a CPU",
    )
    calibration: Path | None = Option(
        None,
        metavar="FOLDER",
        help="For int8 and fp8: images like those to come; 512 of them are used at most.",
    )

    def __post_init__(self) -> None:
        known = ("auto", "fp32", "bf16", "fp8", "int8")
        for name, value in (("--calibration", self.calibration), ("--keep", self.keep)):
            if self.precision is None and value is not None:
                raise InputError(f"{name} is for --precision int8 and fp8; add one, or remove it.")
        if self.precision not in (None, *known):
            hint = suggest(self.precision or "", known)
            raise InputError(f"Unknown precision {printable(repr(self.precision))}. {hint}")

    def speedup(self) -> Speedup | None:
        """None if the model is computed as it is."""
        if self.precision is None:
            return None
        from vitrail.fast.accelerate import Speedup

        return Speedup(
            precision=self.precision,
            calibration=self.calibration,
            min_agreement=self.min_agreement,
            keep=self.layers,
        )


def split_names(text: str | None) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def start_workers(inputs: list[str], workers: str) -> None:
    """Let worker processes get ready while the model is loaded, if these paths have work for them."""
    from vitrail.images.workers import MIN_IMAGES, expect_files
    from vitrail.predict.image_sources import expand_paths

    if "-" not in inputs:
        expect_files(parse_workers(workers), sum(1 for _ in islice(expand_paths(inputs), MIN_IMAGES)))


def _read_keys(path: Path) -> list[Any]:
    """The rows of the user's key table."""
    from vitrail.weights.readers.folder import read_json

    rows = read_json(path)
    if not isinstance(rows, list):
        raise InputError(
            f"--keys needs a JSON file with a list of rows, and {printable(path)} is not one; see --help."
        )
    return rows
