"""The model of a command: opening it, and what the user must know about it, as notes on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import printable
from vitrail.cli.streams import print_error

if TYPE_CHECKING:
    from torch import nn

    from vitrail.model import ViT
    from vitrail.predict import Predictor
    from vitrail.weights.bundle.bundle import Bundle


def load_model(
    model: str, arguments: dict[str, Any], *, quiet: bool, precision: str | None = "fp32"
) -> Bundle:
    """`vitrail.load` on a GPU if one can be used, with a line that says so; and a note on a guess.

    Args:
        arguments: of `vitrail.load`; with a device, none is chosen.
        precision: what the command computes in; None if it prints the line itself.
    """
    from vitrail.weights.load import load

    bundle = load(model, **{"device": "auto", **arguments})
    if precision is not None:
        print_device(bundle.model, arguments, precision, quiet=quiet)
    print_guess(bundle.guess, quiet=quiet)
    return bundle


def print_device(model: nn.Module, arguments: Mapping[str, Any], precision: str, *, quiet: bool) -> None:
    """The GPU that was chosen, and how to choose otherwise; nothing for a device that was given, or a CPU."""
    device = next(model.parameters()).device
    if quiet or "device" in arguments or device.type != "cuda":
        return
    import torch

    name = torch.cuda.get_device_name(device)
    print(f"Computing on {name}, {precision}; --device cpu chooses otherwise.", file=sys.stderr, flush=True)


def usual_precision(model: ViT, requested: str | None, own_code: bool) -> str:
    """What `Predictor` and `evaluate` compute in.

    Args:
        own_code: whether the model's own code computes, as for probes.
    """
    from vitrail.fast.inference_routes import resolve

    device = next(model.parameters()).device
    return "fp32" if own_code else resolve(requested or "auto", device)


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
        arguments: of `vitrail.load`.
    """
    if labels is None and not prompts and templates is None:
        return None
    from vitrail.weights.text.prompts import bake_prompts, read_prompts

    wanted = read_prompts(labels, prompts, templates)
    bundle = bake_prompts(load_model(model, arguments, quiet=quiet, precision=None), wanted)
    if not quiet:
        print_error(bundle.notes[-1])
    return bundle


def check_classes(bundle: Bundle | None) -> None:
    """The outputs of a CLIP's image tower are no classes; words make some. An ONNX file is no bundle."""
    advice = "name some with --labels cat,dog, or save the embeddings of the images with vitrail embed."
    if bundle is not None:
        bundle.require_classes(advice)


def check_trained_native(predictor: Predictor, native: bool | None) -> None:
    """Refuse --native for a model that was trained on images of one shape."""
    if native:
        from vitrail.weights.bundle.own_shape import check_native

        check_native(predictor.bundle)


def print_guess(guess: str, *, quiet: bool = False) -> None:
    """That a preprocessing is a guess, and how to choose another; nothing if it is known."""
    if guess and not quiet:
        print(f"note: {printable(guess, 1000)}", file=sys.stderr)


def print_predictor_notes(predictor: Predictor, arguments: Mapping[str, Any], *, quiet: bool = False) -> None:
    """The device that was chosen, whether the preprocessing is a guess, and how the model is computed.

    Args:
        arguments: the options of the predictor.
    """
    done = predictor.acceleration
    if predictor.bundle is not None:
        print_device(predictor.bundle.model, arguments, done.precision if done else "fp32", quiet=quiet)
        print_guess(predictor.bundle.guess, quiet=quiet)
    if done is not None and not quiet:
        for sentence in done.sentences():
            print(f"note: {sentence}", file=sys.stderr)
