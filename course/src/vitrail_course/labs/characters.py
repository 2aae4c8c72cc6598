"""Lab `characters`: the character-level decoder of note 003.

Reproduces the numbers of the slides: a batch of four sequences of eight characters, their targets, and the
attention weights of the causal mask. Then trains a decoder and compares it with bigram counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.experiment.interval import confidence_interval
from vitrail.model import record
from vitrail.views.canvas import FAINT, INK, LINES, new_figure, styled
from vitrail_course.character_model import CharacterModel
from vitrail_course.decoder import Decoder, DecoderConfig, generate
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.lr_sweep import train_model
from vitrail_course.labs.text import CharacterText, next_character_batch, read_text
from vitrail_course.labs.verdict import EXACT, REPLICATION, Statement, Verdict, exceeds, identity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "characters"
TITLE = "a masked decoder learns text"
NOTE = '003 "Decoder" and "Masked Multi-Head attention"'
CLAIM = (
    "when input is [24, 43] the target: 58 [and 13 more lines; a mask sets the scores of later positions "
    "to -inf before softmax.]"
)
ACCEPTS = "a text file"

# Slide "Decoder": the batch that seed 1337 draws from the first nine tenths of tinyshakespeare.
SLIDE_SEED, SLIDE_LENGTH, SLIDE_BATCH = 1337, 8, 4
SLIDE_INPUTS = torch.tensor(
    [
        [24, 43, 58, 5, 57, 1, 46, 43],
        [44, 53, 56, 1, 58, 46, 39, 58],
        [52, 58, 1, 58, 46, 39, 58, 1],
        [25, 17, 27, 10, 0, 21, 1, 54],
    ]
)
SLIDE_TARGETS = torch.tensor(
    [
        [43, 58, 5, 57, 1, 46, 43, 39],
        [53, 56, 1, 58, 46, 39, 58, 1],
        [58, 1, 58, 46, 39, 58, 1, 46],
        [17, 27, 10, 0, 21, 1, 54, 39],
    ]
)

_SMOOTHING = (0.01, 0.1, 1.0)  # added to each bigram count; the best one is used
_BATCH = 32


@dataclass(frozen=True)
class _CharacterSettings:
    """Size and training of the decoder, and the number of characters to generate."""

    width: int = 64
    depth: int = 3
    length: int = 32
    steps: int = 1_800
    lr: float = 3e-3
    dropout: float = 0.1
    sample: int = 420


_SEEDS = 3
SETTINGS = {
    "full": _CharacterSettings(),
    "small": _CharacterSettings(width=32, depth=1, length=16, steps=450, lr=6e-3, dropout=0, sample=200),
}


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    text, settings = read_text(data), SETTINGS[size]
    inputs, targets = slide_batch(text.train)
    slide_matches = (
        (torch.equal(inputs, SLIDE_INPUTS) and torch.equal(targets, SLIDE_TARGETS))
        if text.is_tinyshakespeare
        else None
    )
    mask_weights = uniform_mask_weights()
    runs = [_train_decoder(text, settings, seed) for seed in range(_SEEDS)]
    losses = [mean_loss(model, text.eval_split) for model, _ in runs]
    bigram, uniform = bigram_loss(text), math.log(len(text.vocabulary))
    future_leak = max(measure_future_leak(model, text.eval_split) for model, _ in runs)
    decoder_loss = fmean(losses)
    sample = _generate_sample(runs[0][0], text, settings.sample)
    return LabResult(
        number=decoder_loss,
        unit=f"nats per held-out character (bigram counts {bigram:.2f}, uniform {uniform:.2f})",
        n=_SEEDS,
        setting=f"{text.name}, {len(text.ids):,} characters; decoders of width {settings.width} and depth "
        f"{settings.depth}, {settings.steps:,} steps; the last tenth is held out.",
        figure=draw(mask_weights, [losses for _, losses in runs], decoder_loss, bigram, uniform, sample),
        interval=confidence_interval(losses),
        model=CharacterModel(runs[0][0], text.vocabulary),
        numbers={
            "decoder": losses,
            "bigram": bigram,
            "uniform": uniform,
            "change of earlier logits": future_leak,
            "slide's batch reproduced": slide_matches,
            "printed attention weights": torch.equal(mask_weights, slide_mask_weights()),
            "xb": inputs.tolist(),
            "yb": targets.tolist(),
            "lines": context_lines(inputs, targets)[:14],
            "sample": sample,
        },
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """The slides must be reproduced, and a trained decoder must be better than bigram counts."""
    bigram, leak = numbers["bigram"], numbers["change of earlier logits"]
    slide = numbers["slide's batch reproduced"]
    return Verdict(
        [
            Statement(
                "the printed batch and its targets are what its seed draws",
                REPLICATION,
                slide,
                "another text" if slide is None else f"seed {SLIDE_SEED}",
                "all 64 ids",
                "note 003",
            ),
            Statement(
                "equal scores give the printed attention weights",
                REPLICATION,
                numbers["printed attention weights"],
                "compared number by number",
                "all 64 weights",
                "note 003",
            ),
            identity(
                "the mask hides later positions",
                leak == 0,
                f"they change earlier logits by {leak:g}",
                "0",
                EXACT,
            ),
            exceeds(
                "a trained decoder is better than bigram counts (nats per character)",
                numbers["decoder"],
                round(bigram, 2),
                "bigram counts on the same text",
                form=".2f",
                below=True,
            ),
        ]
    )


# ---- the slide's batch -----------------------------------------------------------------------


def slide_batch(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The slide's batch of four sequences of eight characters."""
    rng = torch.Generator().manual_seed(SLIDE_SEED)
    return next_character_batch(
        ids, torch.randint(len(ids) - SLIDE_LENGTH, (SLIDE_BATCH,), generator=rng), SLIDE_LENGTH
    )


def context_lines(inputs: Tensor, targets: Tensor) -> list[str]:
    """The slide's lines: a sequence of T characters gives T pairs of context and target."""
    return [
        f"when input is {x[: t + 1]} the target: {y[t]}"
        for x, y in zip(inputs.tolist(), targets.tolist(), strict=True)
        for t in range(len(x))
    ]


# ---- the mask -------------------------------------------------------------------------------


def uniform_mask_weights() -> Tensor:
    """(T, T): the attention weights of a decoder if all scores are zero."""
    model = Decoder(DecoderConfig(vocabulary=65, width=8, depth=1, heads=1, length=SLIDE_LENGTH))
    with torch.no_grad():
        queries = model.get_parameter("blocks.0.attention.qkv.weight")[:8]
        queries.zero_()  # the biases are initialized to zero
        with record(model, "blocks.0.attention.weights") as tape:
            model(SLIDE_INPUTS)
    weights = tape["blocks.0.attention.weights"]  # (B, k, T, T)
    return weights[0, 0]


def slide_mask_weights() -> Tensor:
    """The result of the slide's three lines of code."""
    tril = torch.tril(torch.ones(SLIDE_LENGTH, SLIDE_LENGTH))
    return F.softmax(torch.zeros(SLIDE_LENGTH, SLIDE_LENGTH).masked_fill(tril == 0, float("-inf")), dim=-1)


@torch.no_grad()
def measure_future_leak(model: Decoder, ids: Tensor) -> float:
    """The largest change of any logit before a position if all characters from there on change."""
    T, V = model.config.length, model.config.vocabulary
    original = ids[: T * min(_BATCH, len(ids) // T)].view(-1, T)
    logits, changes = model(original), []
    for t in range(1, T):
        changed = original.clone()
        changed[:, t:] = (changed[:, t:] + 1) % V
        changes.append((model(changed)[:, :t] - logits[:, :t]).abs().max().item())
    return max(changes)


# ---- training and baseline ------------------------------------------------------------------


def _train_decoder(
    text: CharacterText, settings: _CharacterSettings, seed: int
) -> tuple[Decoder, list[float]]:
    """Train a decoder as on the slides (ReLU, dropout, learned positions); return it with its losses."""
    torch.manual_seed(seed)
    config = DecoderConfig(
        vocabulary=len(text.vocabulary),
        width=settings.width,
        depth=settings.depth,
        heads=4,
        length=settings.length,
        dropout=settings.dropout,
    )
    model, ids = Decoder(config), text.train

    def loss() -> Tensor:
        starts = torch.randint(len(ids) - settings.length, (_BATCH,))
        x, y = next_character_batch(ids, starts, settings.length)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return model, train_model(model, loss, settings.steps, settings.lr)


@torch.no_grad()
def mean_loss(model: Decoder, ids: Tensor) -> float:
    """Mean loss in nats per character over sequences that do not overlap."""
    T = model.config.length
    x, y = next_character_batch(ids, torch.arange(0, len(ids) - T, T), T)
    parts = zip(x.split(256), y.split(256), strict=True)
    sums = [F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum").item() for a, b in parts]
    return sum(sums) / y.numel()


def bigram_loss(text: CharacterText) -> float:
    """Mean loss of bigram counts on the held-out text."""
    V, held_out = len(text.vocabulary), text.eval_split
    pairs = text.train[:-1] * V + text.train[1:]
    counts = torch.bincount(pairs, minlength=V * V).view(V, V).double()
    losses = []
    for smoothing in _SMOOTHING:
        probabilities = (counts + smoothing) / (counts + smoothing).sum(dim=1, keepdim=True)
        losses.append(-probabilities[held_out[:-1], held_out[1:]].log().mean().item())
    return min(losses)


def _generate_sample(model: Decoder, text: CharacterText, count: int) -> str:
    start = text.vocabulary.index("\n") if "\n" in text.vocabulary else 0
    rng = torch.Generator().manual_seed(0)
    sample_lines = generate(model, torch.tensor([[start]]), count, temperature=0.8, generator=rng)
    return text.decode(sample_lines[0, 1:])


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(
    mask_weights: Tensor,
    loss_curves: list[list[float]],
    decoder_loss: float,
    bigram: float,
    uniform: float,
    sample: str,
) -> Figure:
    sample_lines = printable_lines(sample)
    sample_height = 0.4 + 0.13 * len(sample_lines.splitlines())
    figure = new_figure(7.6, 2.9 + sample_height)
    axes = figure.subplot_mosaic(
        [["mask", "loss"], ["sample", "sample"]], width_ratios=[1, 1.4], height_ratios=[2.9, sample_height]
    )
    _draw_mask(axes["mask"], mask_weights)
    axis = axes["loss"]
    for losses in loss_curves:
        axis.plot(range(len(losses)), _smooth(losses), color=LINES[0], linewidth=0.7, alpha=0.7)
    baselines = {"uniform": uniform, "bigram counts": bigram, "decoder, held out": decoder_loss}
    for (name, value), color in zip(baselines.items(), (FAINT, LINES[1], LINES[0]), strict=True):
        axis.axhline(value, color=color, linestyle="--", linewidth=1, label=f"{name}: {value:.2f}")
    axis.set(xlabel="step", title=f"nats per character, {len(loss_curves)} seeds", ylim=(0, 1.05 * uniform))
    axis.legend(loc="lower left")
    axes["sample"].axis("off")
    axes["sample"].set_title("generated text", loc="left")
    letters: Any = {"family": "monospace", "fontsize": 7.5, "va": "top", "parse_math": False}
    axes["sample"].text(0, 0.97, sample_lines, transform=axes["sample"].transAxes, **letters)
    return figure


def _draw_mask(axis: Axes, mask_weights: Tensor) -> None:
    axis.imshow(mask_weights.numpy(), cmap="Blues", vmin=0, vmax=1.6)
    for row in range(SLIDE_LENGTH):
        for column in range(row + 1):
            axis.text(column, row, f"{mask_weights[row, column]:.3f}", ha="center", va="center", fontsize=5.5)
    axis.set(title="causal attention with equal scores", xlabel="key", ylabel="query")
    axis.tick_params(color=INK, labelsize=7)


def _smooth(losses: list[float], window: int = 25) -> list[float]:
    return [fmean(losses[max(0, n - window) : n + 1]) for n in range(len(losses))]


def printable_lines(sample: str, line_width: int = 100, max_lines: int = 13) -> str:
    """Lines that fit the figure, in ASCII, which every font has."""
    printable = "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in sample)
    lines = [
        line[n : n + line_width] for line in printable.splitlines() for n in range(0, len(line), line_width)
    ]
    return "\n".join(lines[:max_lines])
