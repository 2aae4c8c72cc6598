"""The model of a command: opening it, and what the user must know about it, as notes on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vitrail.base.errors import printable
from vitrail.cli.option_values import parse_workers
from vitrail.cli.options import ModelOptions, SpeedOptions, WordOptions
from vitrail.cli.streams import print_error

if TYPE_CHECKING:
    from torch import nn

    from vitrail.predict import Predictor
    from vitrail.weights.bundle.bundle import Bundle

_AS_IT_IS = SpeedOptions()


def load_model(
    model: str, opening: ModelOptions, *, precision: str | None = "fp32", channels: int | None = None
) -> Bundle:
    """`vitrail.load` on a GPU if one can be used, with a line that says so; and a note on a guess.

    Args:
        precision: what the command computes in; None if it prints the line itself.
        channels: of the images, which --set can override.
    """
    from vitrail.weights.load import load

    bundle = load(model, **{"device": "auto", "channels": channels, **opening.arguments()})
    if precision is not None:
        print_device(bundle.model, opening.device, precision, quiet=opening.quiet)
    print_guess(bundle.guess, opening.quiet)
    return bundle


def open_zero_shot(model: str, words: WordOptions, opening: ModelOptions) -> Bundle | None:
    """The model with a head from words, if there are any; None without."""
    prompts = words.read()
    if prompts is None:
        return None
    from vitrail.weights.text.zero_shot import bake_prompts

    bundle = bake_prompts(load_model(model, opening, precision=None), prompts)
    if not opening.quiet:
        print_error(bundle.notes[-1])
    return bundle


def open_predictor(
    model: str | Bundle,
    opening: ModelOptions,
    speed: SpeedOptions = _AS_IT_IS,
    *,
    batch: int = 32,
    workers: str = "auto",
    native: bool | None = None,
) -> Predictor:
    """The predictor of a command, with notes on the device, a guessed preprocessing and the acceleration."""
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
        **(opening.arguments() if isinstance(model, str) else {}),
    )
    print_notes(predictor, opening)
    return predictor


def print_notes(predictor: Predictor, opening: ModelOptions) -> None:
    """The device that was chosen, whether the preprocessing is a guess, and how the model is computed."""
    done = predictor.acceleration
    if predictor.bundle is not None:
        precision = done.precision if done else "fp32"
        print_device(predictor.bundle.model, opening.device, precision, quiet=opening.quiet)
        print_guess(predictor.bundle.guess, opening.quiet)
    if done is not None and not opening.quiet:
        for sentence in done.sentences():
            print(f"note: {sentence}", file=sys.stderr)


def print_device(model: nn.Module, requested: str, precision: str, *, quiet: bool) -> None:
    """The GPU that was chosen, and how to choose otherwise; nothing for a device that was given, or a CPU."""
    device = next(model.parameters()).device
    if quiet or requested != "auto" or device.type != "cuda":
        return
    import torch

    name = torch.cuda.get_device_name(device)
    print(f"Computing on {name}, {precision}; --device cpu chooses otherwise.", file=sys.stderr, flush=True)


def print_guess(guess: str, quiet: bool) -> None:
    """That a preprocessing is a guess, and how to choose another; nothing if it is known."""
    if guess and not quiet:
        print(f"note: {printable(guess, 1000)}", file=sys.stderr)


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
