"""A stage of the forward pass, the recording of activations, and numbers of a stage for people and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitrail.base.errors import InputError
from vitrail.model import record
from vitrail.model.config import ViTConfig

_OF_ATTENTION = (
    *("position", "norm1", "attention", "scale1", "residual1"),
    *("norm_cross", "cross", "residual_cross"),
)
NORM_NAMES = {"layer": "LN", "rms": "RMS", "none": ""}


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of the forward pass."""

    name: str
    """Its place in the model: the name of the tap, if there is one."""
    equation: str
    """What is computed, in the paper's letters."""
    meaning: str
    """The same in a sentence."""
    tensor: Tensor
    """The result for this input, without a batch axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def number(self) -> int | None:
        """Which of the paper's Eq. (1) to (4) the stage belongs to; None for the head, which follows them."""
        first, *rest = self.name.split(".")
        match first:
            case "blocks":
                return 2 if rest[1].startswith(_OF_ATTENTION) else 3
            case "encoded" | "pool" | "pooled":
                return 4
            case "logits" | "probabilities" | "next":
                return None
        return 1


def encoder_config(config: Any) -> ViTConfig:
    """The config of the tokens and blocks; a decoder's are those of a ViT for text."""
    own: ViTConfig = getattr(config, "as_vit_config", config)
    return own


def token_name(config: Any, token: int) -> str:
    """The name of a token: "the class token", "patch 5 (row 1, column 2)"; of a text just "token 5"."""
    config = encoder_config(config)
    if token < config.prefix:
        name = config.prefix_names[token]
        return name if name.startswith("register") else f"the {name} token"
    index = token - config.prefix
    if config.input == "text":
        return f"token {index}"
    row, column = divmod(index, config.grid[1])
    return f"patch {index} (row {row}, column {column})"


class Walk:
    """Builds the list of stages. Each method adds stages and returns the name of the result in equations."""

    def __init__(self, model: Any, activations: dict[str, Tensor], block: int, head: int, token: int) -> None:
        self.model, self.config, self.activations = model, encoder_config(model.config), activations
        self.block, self.head, self.token = block, head, token
        self.stages: list[Stage] = []

    def add(self, name: str, equation: str, meaning: str, tensor: Tensor | None = None) -> str:
        """Add a stage, with the recorded activation of that name by default; returns its left side."""
        tensor = self.activations[name] if tensor is None else tensor
        self.stages.append(Stage(name, equation, meaning, tensor.detach()))
        return equation.partition(" = ")[0]

    def add_norm(self, name: str, z: str, what: str) -> str:
        """A norm over the last axis; nothing for a config without norms."""
        if not (norm := NORM_NAMES[self.config.norm]):
            return z
        right = f"g ({z} - mu) / sqrt(var + eps) + b" if norm == "LN" else f"g {z} / sqrt(ms + eps)"
        return self.add(name, f"{norm}({z}) = {right}", f"{what}, each normalized by its own statistics.")

    def add_token_indices(self, x: Tensor) -> None:
        last = (self.config.vocabulary or 0) - 1
        meaning = "The text: the index of each token in the vocabulary."
        self.add("numbers", f"x in {{0, ..., {last}}}^{len(x)}", meaning, x)


# ---- recording ------------------------------------------------------------------------------


def record_activations(model: nn.Module, names: list[str], *inputs: Tensor | None) -> dict[str, Tensor]:
    """Run the model and return the activations of these taps, without the batch axis."""
    with record(model, *names) as tape:
        model(*inputs)
    # The bias of the scores is a parameter, which has no batch axis.
    return {name: t if name.endswith("attention.bias") else t[0] for name, t in tape.items()}


def check_index(name: str, index: int, count: int, owner: str = "this model") -> None:
    if not isinstance(index, int) or index not in range(count):
        raise InputError(
            f"{name} must be an integer from 0 to {count - 1}, not {index!r}; {owner} has {count} "
            f"{name}{'s' if count > 1 else ''}, counted from 0."
        )


# ---- numbers --------------------------------------------------------------------------------


def format_number(number: float | None) -> str:
    """A number in at most seven characters; None becomes a dash."""
    if number is None:
        return "-"
    return f"{number:.3g}" if len(f"{number:.3g}") <= 7 else f"{number:.0e}"


def summarize(tensor: Tensor) -> dict[str, float | None]:
    """Mean, standard deviation, minimum and maximum; None for NaN or infinity."""
    values = tensor.double()
    numbers = {"mean": values.mean(), "std": values.std(correction=0), "min": values.min()}
    numbers["max"] = values.max()
    return {name: finite_or_none(number.item()) for name, number in numbers.items()}


def finite_or_none(values: Any) -> Any:
    """The number, or nested lists of numbers, with None for NaN and infinity, which JSON lacks."""
    if isinstance(values, list):
        return [finite_or_none(value) for value in values]
    return values if math.isfinite(values) else None
