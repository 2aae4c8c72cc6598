"""Lab `gelu-relu`: GELU and ReLU trained, in a ViT and in an MLP that fits a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import draw_arm, edge_note, study
from vitrail.experiment.trial import ProcessPool
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.datasets import describe_dataset, load_dataset, plain_settings
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.training_loop import train_model
from vitrail_course.labs.verdict import (
    Statement,
    Verdict,
    compare_arms,
    confirming,
    decide,
    format_interval,
    format_points,
    gain,
    is_above,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.experiment.study import Study

    _Sweeps = dict[str, dict[float, float]]  # by activation, the error of the first seed at each rate

NAME = "gelu-relu"
TITLE = "GELU trains better than ReLU"
NOTE = '001 "Intermediate", 003 "Feed forward"'
CLAIM = (
    "Not being monotonic, convex or linear above zero, GELU approximates complicated functions more easily "
    "than ReLU; being smooth, it is easier to optimize by gradients."
)
ACCEPTS = "labeled images"

GELU, RELU = "GELU", "ReLU"
ARMS: dict[str, dict[str, Any]] = {GELU: {}, RELU: {"model": {"activation": "relu"}}}
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {GELU: nn.GELU, RELU: nn.ReLU}
_POINTS, _HIDDEN, _STEPS = 512, 64, 1_000


def _sines(x: Tensor) -> Tensor:
    return (3 * x).sin() + (7 * x + 1).sin() + 0.5 * (15 * x).sin()


def _zigzag(x: Tensor) -> Tensor:
    """The triangle wave of about the same frequencies: made of straight lines, as ReLU is."""
    return sum(weight * 2 / math.pi * (rate * x).sin().asin() for rate, weight in ((3, 1), (7, 1), (15, 0.5)))  # type: ignore[return-value]


TARGETS = {"sines": _sines, "zigzags": _zigzag}


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    images = load_dataset(data) if full else load_dataset(data, 128, 64)
    epochs = 16 if full else 1
    model = {"width": 48, "depth": 2, "heads": 4} if full else {"width": 16, "depth": 1, "heads": 2}
    with TemporaryDirectory(prefix="runs-", dir=out) as runs:
        result = study(
            images,
            arms=ARMS,
            out=runs,
            seeds=6 if full else 2,
            lrs=[1e-3, 3e-3, 1e-2, 3e-2] if full else [3e-3],
            processes=process_count(size),
            batch=64,
            **plain_settings(images, epochs, **model),
        )
    fits, fit_sweeps = _fit_functions(size)
    difference = compare_arms(result.arms[GELU].scores, result.arms[RELU].scores, len(images.eval_split))
    return LabResult(
        number=100 * difference.mean,
        unit="percentage points of accuracy, a ViT with GELU minus one with ReLU",
        n=difference.n,
        sentence=summarize(result, fits, describe_dataset(images), epochs),
        figure=draw(result, fits),
        interval=difference.interval and (100 * difference.interval[0], 100 * difference.interval[1]),
        numbers={
            "accuracy": {name: arm.numbers() for name, arm in result.arms.items()},
            "error of the fitted function": fits,
            "lrs of the fits": {target: best_fit_lrs(by_name) for target, by_name in fit_sweeps.items()},
            "sweep of the fits": fit_sweeps,
            "images": len(images.train),
            "held out": len(images.eval_split),
        },
        warnings=[
            *result.notes,
            *(
                note
                for target, by_name in fit_sweeps.items()
                for name, lr in best_fit_lrs(by_name).items()
                if (note := edge_note(f"the MLP with {name} for {target}", lr, [*by_name[name]]))
            ),
        ],
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """GELU must give a better ViT, and fit functions better."""
    accuracy = numbers["accuracy"]
    difference = compare_arms(accuracy[GELU]["scores"], accuracy[RELU]["scores"], numbers["held out"])
    statements = [gain("a ViT with GELU is more accurate than one with ReLU", difference)]
    for target, errors in numbers["error of the fitted function"].items():
        logs = log_ratios(errors)
        bounds = confidence_interval(logs)
        ratio = format_interval(fmean(logs), bounds, "+.2f")
        evidence = f"log10 of the error with ReLU over that with GELU: {ratio}, n = {len(logs)}"
        text = (
            f"an MLP of {_HIDDEN} units with GELU, after {_STEPS:,} steps from torch's initialization, "
            f"fits a function of {target} with less error"
        )
        statements.append(Statement(text, is_above(bounds, 0), evidence))
    return decide(statements)


def log_ratios(errors: Mapping[str, list[float]]) -> list[float]:
    """log10 of the error with ReLU over that with GELU, by seed, without the one that chose the rates."""
    gelu, relu = confirming(errors[GELU]), confirming(errors[RELU])
    return [math.log10(b / a) for a, b in zip(gelu, relu, strict=True)]


# ---- fitting a function ---------------------------------------------------------------------


def _fit_functions(size: LabSize) -> tuple[dict[str, dict[str, list[float]]], dict[str, _Sweeps]]:
    """For each target and activation, the error of every seed at the best learning rate, and the sweep."""
    full = size == "full"
    lrs, seeds, steps = ([1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1], 7, _STEPS) if full else ([1e-2], 3, 20)
    fits: dict[str, dict[str, list[float]]] = {}
    sweeps: dict[str, _Sweeps] = {}
    with ProcessPool(process_count(size)) as pool:
        for target in TARGETS:
            tasks = [(target, name, lr, 0, steps) for name in ARMS for lr in lrs]
            first = dict(zip(tasks, pool.map(fit_function, tasks), strict=True))
            sweeps[target] = {name: {lr: first[target, name, lr, 0, steps] for lr in lrs} for name in ARMS}
            best = best_fit_lrs(sweeps[target])
            tasks = [(target, name, best[name], seed, steps) for name in ARMS for seed in range(1, seeds)]
            others = dict(zip(tasks, pool.map(fit_function, tasks), strict=True))
            fits[target] = {name: [sweeps[target][name][best[name]]] for name in ARMS}
            for (_, name, *_), error in others.items():
                fits[target][name].append(error)
    return fits, sweeps


def best_fit_lrs(sweeps: _Sweeps) -> dict[str, float]:
    """The learning rate with the lowest error, by activation."""
    return {name: min(errors, key=lambda lr: errors[lr]) for name, errors in sweeps.items()}


def fit_function(task: tuple[str, str, float, int, int]) -> float:
    """The relative squared error between the training points of an MLP with one hidden layer."""
    target, activation, lr, seed, steps = task
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, _HIDDEN), _ACTIVATIONS[activation](), nn.Linear(_HIDDEN, 1))
    x = torch.linspace(-1, 1, _POINTS)[:, None]
    y, between = TARGETS[target](x), (x[1:] + x[:-1]) / 2
    train_model(model, lambda: (model(x) - y).square().mean(), steps, lr)
    expected = TARGETS[target](between)
    with torch.no_grad():
        return ((model(between) - expected).square().mean() / expected.var()).item()


# ---- summary and figure ---------------------------------------------------------------------


def summarize(result: Study, fits: Mapping[str, Mapping[str, list[float]]], data: str, epochs: int) -> str:
    gelu, relu = result.arms[GELU], result.arms[RELU]
    difference = compare_arms(gelu.scores, relu.scores, gelu.images)
    errors = "; ".join(
        f"{target} {math.exp(fmean(map(math.log, one[GELU]))):.1e} with GELU and "
        f"{math.exp(fmean(map(math.log, one[RELU]))):.1e} with ReLU"
        for target, one in fits.items()
    )
    return (
        f"On {data} ({epochs} epoch{'s' * (epochs > 1)}, {gelu.n} seeds, each arm at its own best learning "
        f"rate), accuracy is {gelu.mean:.1%} with GELU at {gelu.lr:g} and {relu.mean:.1%} with ReLU at "
        f"{relu.lr:g}: {format_points(difference)}, without the seed that chose the rates. An MLP with "
        f"{_HIDDEN} hidden units, each "
        f"at its best learning rate and after {_STEPS:,} steps, fits functions of one variable with a "
        f"relative squared error of (geometric mean over {len(next(iter(fits.values()))[GELU])} seeds): "
        f"{errors}. Zigzags are made of straight lines, as ReLU is. This is about training; with random "
        "hidden units and the output layer "
        "solved by least squares, GELU fits a sine better (erratum 001.20)."
    )


@styled
def draw(result: Study, fits: Mapping[str, Mapping[str, list[float]]]) -> Figure:
    from matplotlib.ticker import LogLocator

    figure = new_figure(7.6, 2.8)
    left, right = figure.subplots(1, 2)
    for n, arm in enumerate(result.arms.values()):
        draw_arm(left, n, arm, LINES[n])
    left.set(yticks=range(len(ARMS)), yticklabels=list(ARMS), xlabel="held-out accuracy", ylim=(1.5, -0.5))
    left.set_title(f"ViT, {len(result.seeds)} seeds, 95 % confidence interval", loc="left")
    rows = [(target, name) for target in fits for name in ARMS]
    for row, (target, name) in enumerate(rows):
        values, color = fits[target][name], LINES[list(ARMS).index(name)]
        right.plot(values, [row] * len(values), "o", color=color, alpha=0.35, markersize=5)
        mean = math.exp(fmean(map(math.log, values)))
        right.plot([mean], [row], "|", color=color, markersize=14, markeredgewidth=2)
    right.set(yticks=range(len(rows)), yticklabels=[f"{target}, {name}" for target, name in rows])
    right.set(xscale="log", xlabel="relative squared error of an MLP", ylim=(len(rows) - 0.5, -0.5))
    right.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    right.xaxis.set_major_formatter("{x:g}")
    right.minorticks_off()
    return figure
