"""Does a file still give, here and now, the logits it gave when it was written?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import FileError, printable
from vitrail.weights.bundle import not_finite
from vitrail.weights.describe import describe
from vitrail.weights.folder import open_model
from vitrail.weights.layout import Shape
from vitrail.weights.load import build

LIMIT = 1e-4  # of the largest logit, or of 1: what may lie between two machines in float32


@dataclass(frozen=True)
class Verdict:
    """What the golden inputs gave."""

    inputs: int
    difference: float
    """The largest between a logit now and then."""
    limit: float
    same_class: int
    """For how many inputs the largest logit is still the same one."""
    written_by: dict[str, str]
    """Versions of when the file was written."""
    not_finite: list[str]
    """The tensors with NaN or infinity; of the logits, "logits now" and "logits then"."""

    @property
    def holds(self) -> bool:
        return not self.not_finite and self.difference <= self.limit and self.same_class == self.inputs


def verify(path: str | Path) -> Verdict:
    """Run the golden inputs of a vitrail file through its model, in float32 on the CPU."""
    with open_model(path) as stored:
        what = describe(stored)
        golden = {"golden/inputs", "golden/logits"}
        if what.found is not None or not golden <= set(stored.entries):
            raise FileError(
                "Only a vitrail file carries golden inputs and their logits.",
                f"{printable(str(path))}, {what.title}",
                "Convert it first: vitrail convert IN OUT --to vitrail.",
            )
        bundle = build(stored, what, None)
        inputs, then = (stored.tensor(f"golden/{part}") for part in ("inputs", "logits"))
    check_golden(path, tuple(inputs.shape), tuple(then.shape), bundle.model.config.input_shape)
    now = bundle.golden_logits(inputs)
    if now.shape != then.shape:
        raise odd(path, f"logits of {tuple(then.shape)} where the model gives {tuple(now.shape)}")
    difference = (now - then).abs().max().item()
    agree = int((now.argmax(1) == then.argmax(1)).sum())
    limit = LIMIT * max(1.0, then.abs().max().item())
    bad = not_finite({**bundle.model.state_dict(), "logits now": now, "logits then": then})
    return Verdict(len(inputs), difference, limit, agree, dict(what.card.versions), bad)


def check_golden(path: str | Path, inputs: Shape, logits: Shape, one: Shape) -> None:
    if inputs[1:] != one or inputs[:1] != logits[:1] or not inputs[0] or len(logits) != 2:
        raise odd(path, f"golden inputs of {inputs} with logits of {logits}")


def odd(path: str | Path, reason: str) -> FileError:
    return FileError(
        "Golden inputs must fit the model.", f"{printable(str(path))}: {reason}", "Save it again."
    )
