"""Lab `recurrent`: the time of a training step of a Transformer and of a recurrent network of the same size.

Both are language models of characters: the causal decoder of note 003, and an LSTM with as many parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.experiment.interval import confidence_interval
from vitrail.model.device import find_device
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.decoder import Decoder, DecoderConfig
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import NO_DIFFERENCE, OURS, Verdict, exceeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "recurrent"
TITLE = "faster than a recurrent net"
NOTE = '002 "Recap: Transformer"'
CLAIM = "The transformer trains faster (vs. recurrent network) and is parallelizable."
ACCEPTS = ""

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
    longest = lengths[device][-1]
    ratios = time_ratios(seconds[device], str(longest))
    parameters = {
        where: {name: count_parameters(build()) for name, build in some.items()}
        for where, some in models.items()
    }
    numbers = {
        "seconds per step": seconds,
        "device": device,
        "tokens per step": total,
        "parameters": parameters,
    }
    bounds = confidence_interval([math.log(ratio) for ratio in ratios])
    return LabResult(
        number=math.exp(fmean(map(math.log, ratios))),
        unit=f"times as long takes a training step of the LSTM with sequences of {longest} tokens ({device}, "
        "timings of one run)",
        n=repeats,
        setting=f"A forward and backward pass of {total[device]:,} tokens of characters, in sequences of "
        "each length; "
        f"{min(parameters[device].values()):,} parameters; {device}.",
        figure=draw(numbers),
        interval=bounds and (math.exp(bounds[0]), math.exp(bounds[1])),
        numbers=numbers,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Steps must be faster, with short sequences and with long ones.

    The reason shows in how the time of a step grows with the length of its sequences, with as many tokens in
    all: it should not for the Transformer, but for what is computed one after the other.
    """
    device = numbers["device"]
    seconds = numbers["seconds per step"][device]
    lengths = list(seconds[TRANSFORMER])
    where = "on the GPU" if device == "cuda" else "on one thread of a CPU"
    return Verdict(
        [
            *(
                exceeds(
                    f"{where}, a step with sequences of {length} tokens is faster: log of the LSTM's time "
                    "over it",
                    [math.log(ratio) for ratio in time_ratios(seconds, length)],
                    0,
                    NO_DIFFERENCE,
                    form="+.2f",
                )
                for length in (lengths[0], lengths[-1])
            ),
            *(
                exceeds(
                    f"time grows with the length to a power {'below' if below else 'above'}, {name}",
                    length_slopes(seconds[name]),
                    _PARALLEL,
                    OURS + ": 0 if parallel, 1 if one after the other",
                    form="+.2f",
                    below=below,
                )
                for name, below in ((TRANSFORMER, True), (LSTM, False))
            ),
        ]
    )


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


# ---- summary and figure ---------------------------------------------------------------------


@styled
def draw(numbers: Mapping[str, Any]) -> Figure:
    from matplotlib.ticker import LogLocator

    devices = numbers["seconds per step"]
    figure = new_figure(3.6 * len(devices), 2.8)
    axes = figure.subplots(1, len(devices), squeeze=False)[0]
    for axis, (device, seconds) in zip(axes, devices.items(), strict=True):
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
    return figure
