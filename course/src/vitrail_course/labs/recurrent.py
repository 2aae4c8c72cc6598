"""Lab `recurrent`: a Transformer and a recurrent network of the same size, by time and by loss.

Both are language models of characters: the causal decoder of note 003, and an LSTM with as many parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import edge_note
from vitrail.experiment.trial import map_in_processes
from vitrail.model.device import find_device
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.decoder import Decoder, DecoderConfig
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.text import next_character_batch, read_text
from vitrail_course.labs.training_loop import train_model
from vitrail_course.labs.verdict import Statement, Verdict, confirming, decide, format_interval, is_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "recurrent"
TITLE = "faster than a recurrent net"
NOTE = '002 "Recap: Transformer"; 003 "But what even are transformers?"'
CLAIM = "A Transformer trains faster than a recurrent network, because it computes all tokens in parallel."
ACCEPTS = "a text file"

TRANSFORMER, LSTM = "Transformer", "LSTM"
_VOCABULARY = 128
# Tokens in a sequence, and in all sequences of a step: as many for every length, so that only what is
# computed one after the other grows.
_LENGTHS = {"cpu": [32, 64, 128, 256, 512], "cuda": [64, 128, 256, 512, 1024]}
_TOKENS = {"cpu": 2048, "cuda": 65_536}
_SIZES = {"cpu": (64, 2), "cuda": (512, 4)}  # width and depth
_PARALLEL = 0.5  # slope of log time over log length below which a model computes tokens in parallel


class RecurrentModel(nn.Module):
    """An LSTM language model: token ids (B, T) to logits (B, T, V)."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


def build_models(width: int, depth: int, length: int, vocabulary: int) -> dict[str, Callable[[], nn.Module]]:
    """Both models, with about as many parameters: 12 width^2 per block, and 8 per layer of the LSTM."""
    config = DecoderConfig(vocabulary=vocabulary, width=width, depth=depth, heads=4, length=length)
    wide = round(width * math.sqrt(12 / 8) / 8) * 8
    return {
        TRANSFORMER: lambda: Decoder(config),
        LSTM: lambda: RecurrentModel(vocabulary, wide, depth),
    }


def count_parameters(model: nn.Module) -> int:
    """Without the position embeddings, of which a longer sequence has more."""
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("position"))


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    repeats = 10 if full else 3
    device = find_device()[0].type  # the CPU, if the lab's --device says so
    lengths = {name: _LENGTHS[name] if full else [16, 32] for name in dict.fromkeys(("cpu", device))}
    total = {name: _TOKENS[name] if full else 64 for name in lengths}
    models = {
        where: build_models(*(_SIZES[where] if full else (32, 1)), counts[-1], _VOCABULARY)
        for where, counts in lengths.items()
    }
    seconds = {
        where: {
            name: measure_steps(build, lengths[where], total[where], repeats, where)
            for name, build in some.items()
        }
        for where, some in models.items()
    }
    losses, lrs, sweep = _compare_losses(size, data)
    longest = lengths[device][-1]
    ratios = time_ratios(seconds[device], str(longest))
    numbers = {
        "seconds per step": seconds,
        "device": device,
        "tokens per step": total,
        "parameters": {
            where: {name: count_parameters(build()) for name, build in some.items()}
            for where, some in models.items()
        },
        "nats per character": losses,
        "lrs": lrs,
        "sweep": sweep,
    }
    return LabResult(
        number=math.exp(fmean(map(math.log, ratios))),
        unit=f"times as long takes a training step of the LSTM with sequences of {longest} tokens ({device}, "
        "timings of one run)",
        n=repeats,
        sentence=summarize(numbers),
        figure=draw(numbers),
        interval=_exp(confidence_interval([math.log(ratio) for ratio in ratios])),
        numbers=numbers,
        warnings=[note for name, lr in lrs.items() if (note := edge_note(f"the {name}", lr, [*sweep[name]]))],
    )


def _exp(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    return bounds and (math.exp(bounds[0]), math.exp(bounds[1]))


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Steps must be faster, and as many must teach as much.

    The reason shows in how the time of a step grows with the length of its sequences, with as many tokens in
    all: it should not for the Transformer, but for what is computed one after the other.
    """
    device = numbers["device"]
    seconds = numbers["seconds per step"][device]
    longest = list(seconds[TRANSFORMER])[-1]
    logs = [math.log(ratio) for ratio in time_ratios(seconds, longest)]
    slopes = {name: length_slopes(by_length) for name, by_length in seconds.items()}
    where = f"on the {'GPU' if device == 'cuda' else 'CPU, one thread'}"
    small = f"for models of {min(numbers['parameters'][device].values()):,} parameters"
    transformer, lstm = (confirming(numbers["nats per character"][name]) for name in (TRANSFORMER, LSTM))
    gained = [b - a for a, b in zip(transformer, lstm, strict=True)]
    grows = {name: is_above(confidence_interval(some), _PARALLEL) for name, some in slopes.items()}
    parallel = None
    if None not in grows.values():
        parallel = grows[LSTM] and not grows[TRANSFORMER]
    return decide(
        [
            Statement(
                f"a training step with sequences of {longest} tokens is faster {where}, {small}",
                is_above(confidence_interval(logs), 0),
                f"the LSTM takes {math.exp(fmean(logs)):.2f} times as long, log "
                f"{format_interval(fmean(logs), confidence_interval(logs), '+.2f')}",
            ),
            Statement(
                "the loss of the Transformer is lower after as many steps",
                is_above(confidence_interval(gained), 0),
                f"{_format(gained)} nats per character",
            ),
            Statement(
                "the reason is that all tokens are computed in parallel",
                parallel,
                "with as many tokens in all, the time grows as the length of a sequence to the power "
                f"{_format(slopes[TRANSFORMER])}, that of the LSTM to the power {_format(slopes[LSTM])}, "
                f"threshold {_PARALLEL:g}",
            ),
        ]
    )


def _format(values: Sequence[float]) -> str:
    return format_interval(fmean(values), confidence_interval(values), "+.2f")


# ---- time -----------------------------------------------------------------------------------


def measure_steps(
    build: Callable[[], nn.Module], lengths: Sequence[int], total: int, repeats: int, device: str
) -> dict[str, list[float]]:
    """Seconds of a forward and backward pass, by length; they take turns, so that a slow moment hits all.

    Args:
        total: the tokens of all sequences together.
    """
    torch.manual_seed(0)
    model = build().to(device)
    tokens = torch.randint(_VOCABULARY, (total,), device=device)
    seconds: dict[str, list[float]] = {str(length): [] for length in lengths}
    for n in range(repeats + 2):  # the first two warm up
        for length in lengths:
            taken = _time_step(model, tokens.view(-1, length), device)
            if n >= 2:
                seconds[str(length)].append(taken)
    return seconds


def _time_step(model: nn.Module, tokens: Tensor, device: str) -> float:
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    synchronize()
    start = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(tokens)
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    synchronize()
    return time.perf_counter() - start


def time_ratios(seconds: Mapping[str, Mapping[str, list[float]]], length: str) -> list[float]:
    """The time of the LSTM over that of the Transformer, by repetition."""
    return [b / a for a, b in zip(seconds[TRANSFORMER][length], seconds[LSTM][length], strict=True)]


def length_slopes(by_length: Mapping[str, list[float]]) -> list[float]:
    """The slope of log time over log length, by repetition: 0 if time does not depend on the length."""
    lengths = [math.log(int(length)) for length in by_length]
    return [
        linear_regression(lengths, [math.log(value) for value in values]).slope
        for values in zip(*by_length.values(), strict=True)
    ]


# ---- loss -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _LossTask:
    """A language model to train."""

    model: str
    lr: float
    seed: int
    train: Tensor
    held_out: Tensor
    vocabulary: int
    size: LabSize


def _compare_losses(
    size: LabSize, data: str | Path | None
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, dict[float, float]]]:
    """Nats per held-out character of both models at their best learning rates, these rates, and the sweep."""
    text = read_text(data)
    lrs, seeds = ([1e-3, 3e-3, 1e-2, 3e-2, 1e-1], 3) if size == "full" else ([3e-3], 2)

    def losses(keys: Sequence[tuple[str, float, int]]) -> dict[tuple[str, float, int], float]:
        tasks = [
            _LossTask(*key, text.train, text.eval_split[:50_000], len(text.vocabulary), size) for key in keys
        ]
        return dict(zip(keys, map_in_processes(_train_model, tasks, process_count(size)), strict=True))

    names = (TRANSFORMER, LSTM)
    first = losses([(name, lr, 0) for name in names for lr in lrs])
    sweep = {name: {lr: first[name, lr, 0] for lr in lrs} for name in names}
    best = {name: min((sweep[name][lr], lr) for lr in lrs)[1] for name in names}
    runs = first | losses([(name, best[name], seed) for name in names for seed in range(1, seeds)])
    return {name: [runs[name, best[name], seed] for seed in range(seeds)] for name in names}, best, sweep


def _train_model(task: _LossTask) -> float:
    width, depth, length, steps = (16, 1, 8, 5) if task.size == "small" else (64, 2, 32, 400)
    torch.manual_seed(task.seed)
    model = build_models(width, depth, length, task.vocabulary)[task.model]()

    def batch_loss() -> Tensor:
        starts = torch.randint(len(task.train) - length, (32,))
        x, y = next_character_batch(task.train, starts, length)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    train_model(model, batch_loss, steps, task.lr)
    x, y = next_character_batch(task.held_out, torch.arange(0, len(task.held_out) - length, length), length)
    with torch.no_grad():
        parts = zip(x.split(128), y.split(128), strict=True)
        sums = [
            F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum").item() for a, b in parts
        ]
    return sum(sums) / y.numel()


# ---- summary and figure ---------------------------------------------------------------------


def summarize(numbers: Mapping[str, Any]) -> str:
    texts = []
    for device, seconds in numbers["seconds per step"].items():
        shortest, *_, longest = seconds[TRANSFORMER]
        times = "; ".join(
            f"{name} {1000 * median(by_length[shortest]):.1f} ms with sequences of {shortest} and "
            f"{1000 * median(by_length[longest]):.1f} with {longest}"
            for name, by_length in seconds.items()
        )
        counts, tokens = numbers["parameters"][device], numbers["tokens per step"][device]
        texts.append(
            f"on {'a GPU in bf16' if device == 'cuda' else 'one thread of a CPU in fp32'}, with "
            f"{counts[TRANSFORMER]:,} parameters besides position embeddings (LSTM {counts[LSTM]:,}) and "
            f"{tokens:,} tokens, {times}"
        )
    losses = numbers["nats per character"]
    return (
        f"A forward and backward pass takes, for sequences of some length, {'; '.join(texts)} (medians). "
        "Trained on characters on a CPU, models of width 64 of both kinds have after as many steps "
        f"{fmean(losses[TRANSFORMER]):.2f} (Transformer) and {fmean(losses[LSTM]):.2f} nats per held-out "
        "character (LSTM), each at its own best learning rate. To write text, both compute one token after "
        "the other."
    )


@styled
def draw(numbers: Mapping[str, Any]) -> Figure:
    from matplotlib.ticker import LogLocator

    devices = numbers["seconds per step"]
    figure = new_figure(3.6 * (1 + len(devices)), 2.8)
    axes = figure.subplots(1, 1 + len(devices))
    for axis, (device, seconds) in zip(axes, devices.items(), strict=False):
        for n, (name, by_length) in enumerate(seconds.items()):
            lengths = [int(length) for length in by_length]
            axis.plot(
                lengths,
                [1000 * median(values) for values in by_length.values()],
                "o-",
                color=LINES[n],
                label=name,
                markersize=4,
            )
        axis.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="milliseconds per step")
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title("GPU" if device == "cuda" else "CPU, one thread", loc="left")
        axis.legend(fontsize=7.5)
    for n, values in enumerate(numbers["nats per character"].values()):
        axes[-1].plot(values, [n] * len(values), "o", color=LINES[n], alpha=0.4, markersize=5)
        axes[-1].plot([fmean(values)], [n], "|", color=LINES[n], markersize=14, markeredgewidth=2)
    axes[-1].set(yticks=[0, 1], yticklabels=list(numbers["nats per character"]), ylim=(1.5, -0.5))
    axes[-1].set(xlabel="nats per held-out character")
    axes[-1].set_title("after as many steps", loc="left")
    return figure
