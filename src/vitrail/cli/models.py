"""The model of a command: opening it, and what the user must know about it, as notes on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.streams import print_error
from vitrail.errors import printable

if TYPE_CHECKING:
    from vitrail.predict import Predictor
    from vitrail.weights.bundle import Bundle


def load_model(model: str, arguments: dict[str, Any], *, quiet: bool) -> Bundle:
    """`vitrail.load`, with a note if the preprocessing is a guess."""
    from vitrail.weights.load import load

    bundle = load(model, **arguments)
    print_guess(bundle.guess, quiet=quiet)
    return bundle


def open_zero_shot(
    model: str,
    labels: str | None,
    prompts: list[str] | None,
    templates: Path | None,
    arguments: dict[str, Any],
    *,
    quiet: bool,
) -> Bundle | None:
    """The model with a head from words, if there are any; None without.

    Args:
        arguments: of `vitrail.load`; they are used up if the model is opened here.
    """
    if labels is None and not prompts and templates is None:
        return None
    from vitrail.weights.prompts import read_prompts
    from vitrail.weights.zero_shot import bake_prompts

    wanted = read_prompts(labels, prompts, templates)
    bundle = bake_prompts(load_model(model, arguments, quiet=quiet), wanted)
    arguments.clear()
    if not quiet:
        print_error(bundle.notes[-1])
    return bundle


def check_classes(bundle: Bundle | None) -> None:
    """The outputs of a CLIP's image tower are no classes; words make some. An ONNX file is no bundle."""
    from vitrail.weights import zero_shot

    advice = "name some with --labels cat,dog, or save the embeddings of the images with vitrail embed."
    if bundle is not None:
        zero_shot.check_classes(bundle, advice)


def check_trained_native(predictor: Predictor, native: bool | None) -> None:
    """Refuse --native for a model that was trained on images of one shape."""
    if native:
        from vitrail.weights.native import check_native

        check_native(predictor.bundle)


def print_guess(guess: str, *, quiet: bool = False) -> None:
    """That a preprocessing is a guess, and how to choose another; nothing if it is known."""
    if guess and not quiet:
        print(f"note: {printable(guess, 1000)}", file=sys.stderr)


def print_predictor_notes(predictor: Predictor, *, quiet: bool = False) -> None:
    """Whether the preprocessing is a guess, and how the model is computed, if not by its own code."""
    if predictor.bundle is not None:
        print_guess(predictor.bundle.guess, quiet=quiet)
    if predictor.acceleration is not None and not quiet:
        for sentence in predictor.acceleration.sentences():
            print(f"note: {sentence}", file=sys.stderr)
