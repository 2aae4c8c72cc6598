"""The gate: how far the answers of a faster model are from those in fp32, and whether that is near enough.

Half of the calibration images set ranges and scales; answers are compared on the other half.

agreement  the fraction of images with the same most likely class
KL         the mean Kullback-Leibler divergence of the fp32 distribution from the faster one, in nats
top-1      the accuracy of both, where labels are given
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import InputError, option
from vitrail.base.fields import short_repr
from vitrail.fast.quantize import Calibration
from vitrail.model.device import eval_mode

if TYPE_CHECKING:
    from vitrail.fast.inference_routes import Accelerated

MIN_AGREEMENT = 0.99
_FEW = 64  # images by which layers are compared with each other


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A comparison of logits with those of the model in fp32."""

    precision: str
    images: int
    """On which the answers were compared; none of them set a range."""
    agreement: float
    kl: float
    cosine: float
    """The mean cosine of both logits."""
    min_agreement: float
    top1: float | None = None
    top1_fp32: float | None = None
    layers: dict[str, float] = field(default_factory=dict)
    """The KL that each layer causes alone, the largest first; measured only if the gate fails."""
    keep: tuple[str, ...] = ()
    """The layers that must stay in higher precision to pass; measured only if the gate fails."""

    @property
    def passed(self) -> bool:
        return self.agreement >= self.min_agreement

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"passed": self.passed, **asdict(self), "keep": list(self.keep)}

    def table(self) -> str:
        """The report as lines of text."""
        same = round(self.agreement * self.images)
        limit = f"limit {self.min_agreement:.1%}, {'passed' if self.passed else 'FAILED'}"
        rows = {
            "precision": self.precision,
            "agreement": f"{self.agreement:.2%}, {same:,} of {self.images:,} images ({limit})",
            "mean KL": f"{self.kl:.2g} nats to fp32",
            "cosine": f"{self.cosine:.5f} of the logits to fp32",
        }
        if self.top1 is not None and self.top1_fp32 is not None:
            rows["top-1"] = f"{self.top1:.2%}, fp32 {self.top1_fp32:.2%}"
        for number, (name, kl) in enumerate(list(self.layers.items())[:5]):
            rows["layers" if number == 0 else " " * (number + 1)] = f"{name:<28} KL {kl:.2g} alone"
        return "\n".join(f"{name.strip():<12} {value}" for name, value in rows.items())


def compare(
    logits: Tensor, exact: Tensor, *, precision: str, min_agreement: float, labels: Tensor | None = None
) -> Gate:
    """Compare logits (N, K) with those in fp32. Without a head, pooled vectors: only the cosine counts."""
    logits, exact = logits.float().cpu(), exact.float().cpu()
    best = exact.argmax(1)
    right = None if labels is None else labels.cpu().to(best.dtype)

    def mean(matches: Tensor) -> float:
        return float(matches.double().mean())

    difference = F.kl_div(logits.log_softmax(1), exact.log_softmax(1), log_target=True, reduction="batchmean")
    return Gate(
        precision=precision,
        images=len(exact),
        agreement=mean(logits.argmax(1) == best),
        kl=max(0.0, float(difference)),
        cosine=float(F.cosine_similarity(logits, exact).mean()),
        min_agreement=min_agreement,
        top1=None if right is None else mean(logits.argmax(1) == right),
        top1_fp32=None if right is None else mean(best == right),
    )


class GateError(InputError):
    """The faster model's answers differ too much; `.gate` has the numbers."""

    def __init__(self, gate: Gate, remedy: str = "use a higher precision") -> None:
        worst = ", ".join(f"{name} (KL {kl:.2g})" for name, kl in list(gate.layers.items())[:4])
        blame = f" The layers that hurt most: {worst}." if worst else ""
        keep = f"keep {len(gate.keep)} layers in higher precision with {option('keep', 'auto')}"
        limit = option("min-agreement").rstrip("=")
        advice = f"{keep if gate.keep else remedy}, or lower {limit}"
        super().__init__(
            f"{gate.precision} gives the answer of fp32 for {gate.agreement:.2%} of {gate.images:,} "
            f"held-out images, and min_agreement is {gate.min_agreement:.2%}.{blame} To use it, {advice}."
        )
        self.gate = gate


def split_images(images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Images that set the ranges, and others to compare answers on, with their labels: every second one."""
    return images[::2], images[1::2], None if labels is None else labels[1::2]


def check_agreement(min_agreement: Any) -> float:
    if isinstance(min_agreement, bool) or not isinstance(min_agreement, (int, float)):
        raise InputError(f"min_agreement must be a number from 0 to 1, not {short_repr(min_agreement)}.")
    if not 0 <= min_agreement <= 1:
        raise InputError(f"min_agreement must be from 0 to 1, not {min_agreement:g}; 0.99 is the default.")
    return float(min_agreement)


def run_batches(forward: Any, images: Tensor, batch: int) -> Tensor:
    """The logits of all images on the CPU."""
    with torch.inference_mode():
        return torch.cat([forward(part).float().cpu() for part in images.split(batch)])


def name_layers(names: Sequence[str]) -> str:
    """A list of layer names for a sentence, shortened."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ---- which layers hurt ----------------------------------------------------------------------


def pass_gate(
    calibration: Calibration,
    build: Callable[[tuple[str, ...]], Accelerated],
    precision: str,
    kept: tuple[str, ...],
    names: Sequence[str],
    held_out: Tensor,
    *,
    labels: Tensor | None = None,
    min_agreement: float = MIN_AGREEMENT,
    search: bool = False,
) -> Accelerated:
    """The accelerated model if its answers are near enough; otherwise look for the layers that hurt.

    Args:
        build: builds it with these layers in higher precision.
        names: all layers that are computed in the lower one.
        held_out: images to compare answers on; the layers that hurt are found with those of the ranges.
        search: whether to keep more layers until it passes.
    """
    with eval_mode(calibration.model):
        exact = run_batches(calibration.model, held_out, calibration.batch)

        def attempt(kept: tuple[str, ...]) -> tuple[Accelerated, Gate]:
            fast = build(kept)
            found = run_batches(fast, held_out, calibration.batch)
            gate = compare(found, exact, precision=precision, min_agreement=min_agreement, labels=labels)
            fast.report = replace(fast.report, gate=gate)
            return fast, gate

        fast, gate = attempt(kept)
        if gate.passed:
            return fast
        layers = _find_worst(calibration, precision, [name for name in names if name not in kept])
        worst = list(layers)
        more = proposed = _propose(calibration, precision, worst, min_agreement)
        while search and more:
            fast, found = attempt((*kept, *more))
            if found.passed:
                why = f"{len(more)} layers that hurt most stay in higher precision: {name_layers(more)}."
                fast.report = replace(fast.report, why=[*fast.report.why, why])
                return fast
            further = worst[len(more) : len(more) + max(1, len(worst) // 12)]
            more = (*more, *further) if len(more) + len(further) < len(worst) else ()
        raise GateError(replace(gate, layers=layers, keep=proposed))


def _find_worst(calibration: Calibration, precision: str, names: Sequence[str]) -> dict[str, float]:
    """The KL that each layer causes alone, the largest first."""
    images = calibration.images
    images = images[:: max(1, len(images) // _FEW)][:_FEW]  # of all classes, if they are sorted
    exact = run_batches(calibration.model, images, calibration.batch)
    found = {}
    for name in names:
        with calibration.simulate(precision, {name}):
            logits = run_batches(calibration.model, images, calibration.batch)
        found[name] = compare(logits, exact, precision=precision, min_agreement=0).kl
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _propose(
    calibration: Calibration, precision: str, worst: Sequence[str], min_agreement: float
) -> tuple[str, ...]:
    """The fewest of the worst layers that must stay as they are for the rest to pass; empty if none do."""
    model, images, batch = calibration.model, calibration.images, calibration.batch
    exact = run_batches(model, images, batch)

    def passes(count: int) -> bool:
        with calibration.simulate(precision, set(worst[count:])):
            logits = run_batches(model, images, batch)
        return compare(logits, exact, precision=precision, min_agreement=min_agreement).passed

    low, high = 0, len(worst)  # all layers kept is no quantization
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return tuple(worst[:high]) if high < len(worst) else ()
