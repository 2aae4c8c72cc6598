"""The options that commands share: how a model is opened, its precision, classes from words."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from typer import Argument, Option

from vitrail.base.errors import DeviceWarning, InputError, printable, suggest
from vitrail.cli.option_groups import options
from vitrail.cli.option_values import parse_settings, parse_sides, parse_workers, refuse_given
from vitrail.cli.streams import print_error

if TYPE_CHECKING:
    from torch import nn

    from vitrail.fast.accelerate import Speedup
    from vitrail.predict import Predictor
    from vitrail.weights.bundle.bundle import Bundle
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
        named = {"--size": self.size, "--family": self.family, "--keys": self.keys}
        return named | {"--set": self.settings or None}

    def overrides(self) -> dict[str, Any]:
        """The keyword arguments of `vitrail.load` that are given and that change the model."""
        values = {"family": self.family, "size": parse_sides(self.size) if self.size else None}
        values |= {
            "keys": _read_keys(self.keys) if self.keys else None,
            **parse_settings(self.settings or ()),
        }
        return {name: value for name, value in values.items() if value is not None}


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
        if self.precision is None:
            lossy = {"--calibration": self.calibration, "--keep": self.keep}
            refuse_given(lossy, "OPTION is for --precision int8 and fp8; add one, or remove it.")
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

    def load(self, model: str, *, precision: str | None = "fp32", channels: int | None = None) -> Bundle:
        """Load a model on a GPU if one can be used, with a line that says so; and a note on a guess.

        Args:
            precision: what the command computes in; None if it prints the line itself.
            channels: of the images, which --set can override.
        """
        from vitrail.weights.load import load

        bundle = load(model, **{"device": "auto", "channels": channels, **self.arguments()})
        if precision is not None:
            self.print_device(bundle.model, precision)
        self.print_guess(bundle.guess)
        return bundle

    def predictor(
        self,
        model: str | Bundle,
        speed: SpeedOptions,
        *,
        batch: int = 32,
        workers: str = "auto",
        native: bool | None = None,
    ) -> Predictor:
        """Open a predictor, with notes on the device, a guessed preprocessing and the acceleration."""
        from vitrail.predict import Predictor

        predictor = Predictor(
            model,
            batch=batch,
            workers=parse_workers(workers),
            native=native,
            precision=speed.precision,
            calibration=speed.calibration,
            min_agreement=speed.min_agreement,
            keep=speed.layers,
            **(self.arguments() if isinstance(model, str) else {}),
        )
        self.print_notes(predictor)
        return predictor

    def print_notes(self, predictor: Predictor) -> None:
        """Print the device that was chosen, whether the preprocessing is a guess, and the acceleration."""
        done = predictor.acceleration
        if predictor.bundle is not None:
            self.print_device(predictor.bundle.model, done.precision if done else "fp32")
            self.print_guess(predictor.bundle.guess)
        for sentence in done.sentences() if done is not None and not self.quiet else ():
            print(f"note: {sentence}", file=sys.stderr)

    def print_device(self, model: nn.Module, precision: str) -> None:
        """Print which GPU was chosen, and how to choose otherwise; nothing for a given device or a CPU."""
        device = next(model.parameters()).device
        if self.quiet or self.device != "auto" or device.type != "cuda":
            return
        import torch

        name = torch.cuda.get_device_name(device)
        line = f"Computing on {name}, {precision}; --device cpu chooses otherwise."
        print(line, file=sys.stderr, flush=True)

    def print_guess(self, guess: str) -> None:
        """Print that a preprocessing is a guess, and how to choose another; nothing if it is known."""
        if guess and not self.quiet:
            print(f"note: {printable(guess, 1000)}", file=sys.stderr)


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

    def open(self, model: str, opening: ModelOptions) -> Bundle | None:
        """The model with a head from words; None if no option is given."""
        prompts = self.read()
        if prompts is None:
            return None
        from vitrail.weights.text.prompts import bake_prompts

        bundle = bake_prompts(opening.load(model, precision=None), prompts)
        if not opening.quiet:
            print_error(bundle.notes[-1])
        return bundle

    def read(self) -> Prompts | None:
        """The texts of each class; None if no option is given."""
        if self.labels is None and not self.prompts and self.templates is None:
            return None
        from vitrail.weights.text.prompts import read_prompts

        return read_prompts(self.labels, self.prompts, self.templates)


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


def usual_precision(bundle: Bundle, requested: str | None = None, *, own_code: bool = False) -> str:
    """What `evaluate` computes in.

    Args:
        own_code: whether the model's own code computes anyway, as for probes.
    """
    from vitrail.fast.inference_routes import resolve

    device = next(bundle.model.parameters()).device
    return "fp32" if own_code or bundle.native is not None else resolve(requested or "auto", device)


def check_classes(bundle: Bundle | None) -> None:
    """The outputs of a CLIP's image tower are no classes; words make some. An ONNX file is no bundle."""
    advice = "name some with --labels cat,dog, or save the embeddings of the images with vitrail embed."
    if bundle is not None:
        bundle.require_classes(advice)
