"""`vitrail generate`: continue a text with a model of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.base.errors import InputError
from vitrail.cli.options import DEVICE, ModelOptions

_MAX_LENGTH = 100_000


def generate(
    model: Annotated[
        Path, typer.Argument(help="A model that `vitrail lab characters --save` wrote.", show_default=False)
    ],
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default="a new line")] = "\n",
    length: Annotated[int, typer.Option(help="The number of characters to generate.")] = 300,
    temperature: Annotated[
        float, typer.Option(help="Divides the logits; 0 always takes the most likely character.")
    ] = 0.8,
    seed: Annotated[
        int | None, typer.Option(help="For the same text again.", show_default="another text each time")
    ] = None,
    device: str = DEVICE,
) -> None:
    """Continue a text, character by character.

    `vitrail lab characters --data tinyshakespeare.txt --save shakespeare.safetensors` trains a model, and
    `vitrail generate shakespeare.safetensors "ROMEO:"` writes with it.
    """
    from vitrail_course.character_model import load_character_model

    if not 0 <= length <= _MAX_LENGTH:
        raise InputError(f"--length must be from 0 to {_MAX_LENGTH:,}, not {length:,}.")
    if seed is not None and not 0 <= seed < 2**63:
        raise InputError(f"--seed must be from 0 to 2^63 - 1, not {seed}.")
    opened = load_character_model(model)

    from vitrail.model.device import place

    place(opened.model, device)
    ModelOptions(device=device).print_device(opened.model, "fp32")
    print(opened.continue_text(prompt, length, temperature, seed).lstrip("\n"))
