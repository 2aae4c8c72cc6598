"""What a stage is, the words for what goes in, and how the numbers are got: one run with taps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.errors import InputError
from vitrail.model import Decoder, DecoderConfig, ViT, record

NORMS = {"layer": "LN", "rms": "RMS", "none": ""}


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of the forward pass."""

    name: str
    """Where in the model: the name of the tap, if there is one."""
    equation: str
    """What is computed, in the paper's letters."""
    meaning: str
    """The same in a sentence."""
    tensor: Tensor
    """What came out, for this one input: no batch axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True)
class Words:
    """How a kind of input, its numbers and its pieces are called."""

    whole: str
    numbers: str
    meaning: str
    piece: str
    pieces: str
    axes: tuple[str, ...] = ()


WORDS = {
    "picture": Words(
        *("picture", "pixels", "The picture: a number for each pixel."),
        *("patch", "patches", ("row", "column")),
    ),
    "video": Words(
        *("video", "frames", "The video: a number for each pixel of each frame."),
        *("tubelet", "tubelets", ("frame", "row", "column")),
    ),
    "audio": Words(
        *("sound", "samples", "The sound: a number for each moment."),
        *("patch", "patches", ("frequency row", "time column")),
    ),
    "text": Words(
        *("text", "numbers", "The text: for each token its number in the vocabulary."),
        *("token", "tokens"),
    ),
}


def encoder_like(config: ViTConfig | DecoderConfig) -> ViTConfig:
    """A decoder's tokens and blocks are those of a ViT for texts."""
    return config.encoder_like if isinstance(config, DecoderConfig) else config


def token_name(config: ViTConfig | DecoderConfig, token: int) -> str:
    """A token in words: "the class token", "patch 5 (row 1, column 2)"; all counted from 0.

    In a video they are tubelets with a frame as well, counted in tubelets; in a sound rows are of
    frequencies and columns of time; in a text there is just "token 5".
    """
    config = encoder_like(config)
    named = ["the class token"] * config.class_token + ["the distillation token"] * config.distillation_token
    named += [f"register {number}" for number in range(1, config.registers + 1)]
    if token < len(named):
        return named[token]
    number, words = token - len(named), WORDS[config.input]
    places: list[str] = []
    left = number
    for axis, side in reversed([*zip(words.axes, config.grid, strict=False)]):  # a text has no axes to name
        left, at = divmod(left, side)
        places.insert(0, f"{axis} {at}")
    return f"{words.piece} {number}" + (f" ({', '.join(places)})" if places else "")


class Steps:
    """The stages so far. Each method adds some, and returns what the next equation calls the result."""

    model: ViT | Decoder

    def __init__(
        self, model: ViT | Decoder, seen: dict[str, Tensor], block: int, head: int, token: int
    ) -> None:
        self.model, self.config, self.seen = model, encoder_like(model.config), seen
        self.block, self.head, self.token = block, head, token
        self.stages: list[Stage] = []

    def add(self, name: str, equation: str, meaning: str, tensor: Tensor | None = None) -> str:
        tensor = self.seen[name] if tensor is None else tensor
        self.stages.append(Stage(name, equation, meaning, tensor.detach()))
        return equation.partition(" = ")[0]

    def norm(self, name: str, z: str, what: str) -> str:
        """A norm over the last axis; left out where the config has none."""
        if not (norm := NORMS[self.config.norm]):
            return z
        sums = f"g ({z} - mu) / sqrt(var + eps) + b" if norm == "LN" else f"g {z} / sqrt(ms + eps)"
        return self.add(
            name, f"{norm}({z}) = {sums}", f"{what}, each brought to one scale by its own numbers."
        )

    def numbers(self, x: Tensor) -> None:
        last = (self.config.vocabulary or 0) - 1
        self.add("numbers", f"x in {{0, ..., {last}}}^{len(x)}", WORDS["text"].meaning, x)


# ---- the run --------------------------------------------------------------------------------


def run(model: nn.Module, names: list[str], *given: Tensor | None) -> dict[str, Tensor]:
    """What the taps of these names see while the model is given this, without the batch axis."""
    with record(model, *names) as tape:
        model(*given)
    # Parameters have no batch axis; the bias of the scores is the only one on the tape.
    return {name: t if name.endswith("attention.bias") else t[0] for name, t in tape.items()}


def check_number(name: str, number: int, count: int, whose: str = "This model") -> None:
    if not isinstance(number, int) or number not in range(count):
        raise InputError(
            f"{name} must be a whole number from 0 to {count - 1}.",
            f"{name}={number!r}",
            f"{whose} has {count} {name}{'s' if count > 1 else ''}, counted from 0.",
        )
