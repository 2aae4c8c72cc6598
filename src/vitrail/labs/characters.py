"""Lab `characters`: note 003's decoder reads a text, character by character.

The slides' own numbers come again: four rows of eight characters, what follows what, and the mask's
table. Then a decoder of the notes' parts is trained, and compared with counts of pairs: what the notes
call a bigram model knows more than the last character.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.inspect.canvas import FAINT, INK, LINES, canvas, in_our_style
from vitrail.labs.descent import descend
from vitrail.labs.interval import interval
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.text import Text, read, rows
from vitrail.model import Decoder, DecoderConfig, generate, record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "characters"
NOTE = '003 "Decoder" and "Masked Multi-Head attention"'
CLAIM = (
    "A decoder learns from a text alone: at each place the target is the next character, and the mask lets "
    "no token see what comes after it. Rows of characters, targets and the mask's table are as printed."
)
TAKES = "a text file"

# "Decoder": what seed 1337 draws from the first nine tenths of tinyshakespeare.
SEED, BLOCK, ROWS = 1337, 8, 4
XB = torch.tensor(
    [
        [24, 43, 58, 5, 57, 1, 46, 43],
        [44, 53, 56, 1, 58, 46, 39, 58],
        [52, 58, 1, 58, 46, 39, 58, 1],
        [25, 17, 27, 10, 0, 21, 1, 54],
    ]
)
YB = torch.tensor(
    [
        [43, 58, 5, 57, 1, 46, 43, 39],
        [53, 56, 1, 58, 46, 39, 58, 1],
        [58, 1, 58, 46, 39, 58, 1, 46],
        [17, 27, 10, 0, 21, 1, 54, 39],
    ]
)

SMOOTHING = (0.01, 0.1, 1.0)  # added to each count of a pair; the counts get the best of them
BATCH = 32


@dataclass(frozen=True)
class Setting:
    """How large the decoder is, and how long it learns."""

    width: int
    depth: int
    length: int
    steps: int
    rate: float
    dropout: float
    seeds: int
    sample: int
    """How many characters it writes at the end."""


SETTINGS = {
    "full": Setting(width=64, depth=3, length=32, steps=1_800, rate=3e-3, dropout=0.1, seeds=3, sample=420),
    "small": Setting(width=32, depth=1, length=16, steps=450, rate=6e-3, dropout=0, seeds=3, sample=200),
}


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    text, setting = read(data), SETTINGS[size]
    xb, yb = first_batch(text.train)
    slide = (torch.equal(xb, XB) and torch.equal(yb, YB)) if text.known else None
    table = mask_table()
    runs = [train(text, setting, seed) for seed in range(setting.seeds)]
    losses = [held_out_loss(model, text.held_out) for model, _ in runs]
    bigram, uniform = bigram_loss(text), math.log(len(text.kinds))
    leak = max(change_before(model, text.held_out) for model, _ in runs)
    decoder = fmean(losses)
    sample = write_sample(runs[0][0], text, setting.sample)
    sentence = (
        f"{text.name}, {len(text.numbers):,} characters of {len(text.kinds)} kinds. "
        f"{about_slide(slide)} On the tenth that was held out, decoders of width {setting.width} and depth "
        f"{setting.depth} have {decoder:.2f} nats per character after {setting.steps:,} steps; counts of "
        f"pairs have {bigram:.2f}, and guessing {uniform:.2f}. With other characters from any place on, what "
        f"the trained decoders say before it changes by {leak:g}."
    )
    return Result(
        number=decoder,
        unit=f"nats per held-out character (counts of pairs {bigram:.2f}, guessing {uniform:.2f})",
        n=setting.seeds,
        verdict=judge(slide, table, leak, losses, bigram),
        sentence=sentence,
        figure=draw(table, [curve for _, curve in runs], decoder, bigram, uniform, sample),
        interval=interval(losses),
        numbers={
            **{"decoder": losses, "bigram": bigram, "uniform": uniform, "change before": leak},
            **{"xb": xb.tolist(), "yb": yb.tolist(), "lines": lessons(xb, yb)[:14], "sample": sample},
        },
    )


def judge(slide: bool | None, table: Tensor, leak: float, losses: list[float], bigram: float) -> Verdict:
    """`slide` is whether the slide's rows came; None of a text that cannot give them."""
    surely = interval(losses)
    if slide is False:
        return Verdict("does not hold", ": the slide's rows are not what its seed draws")
    if not torch.equal(table, as_on_the_slide()):
        return Verdict("does not hold", ": equal scores do not give the table's weights")
    if leak > 0:
        return Verdict("does not hold", ": a character changes what is said before it")
    if surely is None or surely[1] >= bigram:
        return Verdict("does not hold", ": a trained decoder is no better than counts of pairs")
    if slide is None:
        return Verdict(
            "holds if", "the slide's rows are left out: they are of tinyshakespeare, and this text is another"
        )
    return Verdict("holds")


def about_slide(slide: bool | None) -> str:
    if slide is None:
        return "The slide's rows cannot come of this text; the mask's table does not need one."
    return f"The slide's rows {'come' if slide else 'do not come'} with its seed, {SEED}, digit for digit."


# ---- the slide's rows ------------------------------------------------------------------------


def first_batch(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The slide's four rows of eight."""
    chance = torch.Generator().manual_seed(SEED)
    return rows(numbers, torch.randint(len(numbers) - BLOCK, (ROWS,), generator=chance), BLOCK)


def lessons(xb: Tensor, yb: Tensor) -> list[str]:
    """The slide's lines: a row of T characters is T lessons."""
    return [
        f"when input is {x[: t + 1]} the target: {y[t]}"
        for x, y in zip(xb.tolist(), yb.tolist(), strict=True)
        for t in range(len(x))
    ]


# ---- the mask -------------------------------------------------------------------------------


def mask_table() -> Tensor:
    """(T, T): whom the tokens of a decoder look at where every score is zero, as its queries are."""
    model = Decoder(DecoderConfig(vocabulary=65, width=8, depth=1, heads=1, length=BLOCK))
    with torch.no_grad():
        queries = model.get_parameter("blocks.0.attention.qkv.weight")[:8]
        queries.zero_()  # the biases are zero at first
        with record(model, "blocks.0.attention.weights") as tape:
            model(XB)
    weights = tape["blocks.0.attention.weights"]  # (B, k, T, T)
    return weights[0, 0]


def as_on_the_slide() -> Tensor:
    """The slide's three lines, run."""
    tril = torch.tril(torch.ones(BLOCK, BLOCK))
    return F.softmax(torch.zeros(BLOCK, BLOCK).masked_fill(tril == 0, float("-inf")), dim=-1)


@torch.no_grad()
def change_before(model: Decoder, numbers: Tensor) -> float:
    """The largest change of any logit before a place from which on all characters are others."""
    T, V = model.config.length, model.config.vocabulary
    one = numbers[: T * min(BATCH, len(numbers) // T)].view(-1, T)
    said, changes = model(one), []
    for t in range(1, T):
        other = one.clone()
        other[:, t:] = (other[:, t:] + 1) % V
        changes.append((model(other)[:, :t] - said[:, :t]).abs().max().item())
    return max(changes)


# ---- training, and what it is compared with -------------------------------------------------


def train(text: Text, setting: Setting, seed: int) -> tuple[Decoder, list[float]]:
    """A decoder with the slides' parts (ReLU, dropout, learned positions), and its loss at every step."""
    torch.manual_seed(seed)
    config = DecoderConfig(
        vocabulary=len(text.kinds),
        width=setting.width,
        depth=setting.depth,
        heads=4,
        length=setting.length,
        dropout=setting.dropout,
    )
    model, numbers = Decoder(config), text.train

    def loss() -> Tensor:
        starts = torch.randint(len(numbers) - setting.length, (BATCH,))
        x, y = rows(numbers, starts, setting.length)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return model, descend(model, loss, setting.steps, setting.rate)


@torch.no_grad()
def held_out_loss(model: Decoder, numbers: Tensor) -> float:
    """Nats per character, over rows that do not overlap: the first of a row are guessed from little."""
    T = model.config.length
    x, y = rows(numbers, torch.arange(0, len(numbers) - T, T), T)
    parts = zip(x.split(256), y.split(256), strict=True)
    sums = [F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum").item() for a, b in parts]
    return sum(sums) / y.numel()


def bigram_loss(text: Text) -> float:
    """The same of a table of counts: how often each character followed each."""
    V, held_out = len(text.kinds), text.held_out
    pairs = text.train[:-1] * V + text.train[1:]
    counts = torch.bincount(pairs, minlength=V * V).view(V, V).double()
    losses = []
    for added in SMOOTHING:
        chances = (counts + added) / (counts + added).sum(dim=1, keepdim=True)
        losses.append(-chances[held_out[:-1], held_out[1:]].log().mean().item())
    return min(losses)


def write_sample(model: Decoder, text: Text, count: int) -> str:
    start = text.kinds.index("\n") if "\n" in text.kinds else 0
    chance = torch.Generator().manual_seed(0)
    written = generate(model, torch.tensor([[start]]), count, temperature=0.8, generator=chance)
    return text.write(written[0, 1:])


# ---- the picture ----------------------------------------------------------------------------


@in_our_style
def draw(
    table: Tensor, curves: list[list[float]], decoder: float, bigram: float, uniform: float, sample: str
) -> Figure:
    written = plain(sample)
    below = 0.4 + 0.13 * len(written.splitlines())
    figure = canvas(7.6, 2.9 + below)
    axes = figure.subplot_mosaic(
        [["mask", "loss"], ["sample", "sample"]], width_ratios=[1, 1.4], height_ratios=[2.9, below]
    )
    draw_table(axes["mask"], table)
    axis = axes["loss"]
    for curve in curves:
        axis.plot(range(len(curve)), smooth(curve), color=LINES[0], linewidth=0.7, alpha=0.7)
    levels = {"guessing": uniform, "counts of pairs": bigram, "decoder, held out": decoder}
    for (name, value), colour in zip(levels.items(), (FAINT, LINES[1], LINES[0]), strict=True):
        axis.axhline(value, color=colour, linestyle="--", linewidth=1, label=f"{name}: {value:.2f}")
    axis.set(xlabel="step", title=f"nats per character, {len(curves)} seeds", ylim=(0, 1.05 * uniform))
    axis.legend(loc="lower left")
    axes["sample"].axis("off")
    axes["sample"].set_title("what it writes after that", loc="left")
    letters: Any = {"family": "monospace", "fontsize": 7.5, "va": "top", "parse_math": False}
    axes["sample"].text(0, 0.97, written, transform=axes["sample"].transAxes, **letters)
    return figure


def draw_table(axis: Axes, table: Tensor) -> None:
    axis.imshow(table.numpy(), cmap="Blues", vmin=0, vmax=1.6)
    for row in range(BLOCK):
        for column in range(row + 1):
            axis.text(column, row, f"{table[row, column]:.3f}", ha="center", va="center", fontsize=5.5)
    axis.set(title="whom a token sees: equal scores, masked", xlabel="is seen", ylabel="token")
    axis.tick_params(color=INK, labelsize=7)


def smooth(curve: list[float], over: int = 25) -> list[float]:
    return [fmean(curve[max(0, n - over) : n + 1]) for n in range(len(curve))]


def plain(sample: str, wide: int = 100, most: int = 13) -> str:
    """Lines that fit the picture, in characters that every font has."""
    shown = "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in sample)
    lines = [line[n : n + wide] for line in shown.splitlines() for n in range(0, len(line), wide)]
    return "\n".join(lines[:most])
