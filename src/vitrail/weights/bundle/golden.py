"""Checking that a vitrail file still gives its golden logits, on this machine and with these versions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitrail.base.errors import FileError, printable
from vitrail.weights.bundle.bundle import not_finite
from vitrail.weights.families.key_rows import Shape
from vitrail.weights.load import build_bundle, describe
from vitrail.weights.readers.folder import open_model

LOGIT_TOLERANCE = 1e-4  # of the largest logit, or of 1: the tolerance between two machines in float32


@dataclass(frozen=True)
class Verification:
    """The logits of the golden inputs, compared with the stored ones."""

    inputs: int
    difference: float
    """The largest difference between a logit and the stored one."""
    limit: float
    same_class: int
    """The number of inputs whose largest logit is still the same."""
    written_by: dict[str, str]
    """The versions that wrote the file."""
    device: str
    """Where they were computed."""
    not_finite: list[str]
    """The tensors with NaN or infinity; logits are "logits now" and "logits stored"."""

    @property
    def holds(self) -> bool:
        return not self.not_finite and self.difference <= self.limit and self.same_class == self.inputs


def verify(path: str | Path, device: str = "cpu") -> Verification:
    """Run the golden inputs of a vitrail file through its model, in float32.

    Args:
        device: "auto" is a GPU if one can be used. The tolerance is the same everywhere.
    """
    with open_model(path) as files:
        description = describe(files)
        if not files.own or not {"golden/inputs", "golden/logits"} <= set(files.entries):
            raise FileError(
                f"{printable(path)} ({description.title}) has no golden inputs; only vitrail files "
                "have them. Convert it first: vitrail convert IN OUT --to vitrail."
            )
        bundle = build_bundle(files, description, None)
        inputs, stored = (files.tensor(f"golden/{part}") for part in ("inputs", "logits"))
    from vitrail.model.device import place

    _check_golden(path, tuple(inputs.shape), tuple(stored.shape), bundle.model.config.input_shape)
    place(bundle.model, device)
    where = next(bundle.model.parameters()).device
    now = bundle.golden_logits(inputs, where)
    if now.shape != stored.shape:
        raise _damaged(path, f"has logits of {tuple(stored.shape)}, and the model gives {tuple(now.shape)}")
    return Verification(
        inputs=len(inputs),
        difference=(now - stored).abs().max().item(),
        limit=LOGIT_TOLERANCE * max(1.0, stored.abs().max().item()),
        same_class=int((now.argmax(1) == stored.argmax(1)).sum()),
        written_by=dict(description.card.versions),
        device=str(where),
        not_finite=not_finite({**bundle.model.state_dict(), "logits now": now, "logits stored": stored}),
    )


def _check_golden(path: str | Path, inputs: Shape, logits: Shape, one: Shape) -> None:
    if inputs[1:] != one or inputs[:1] != logits[:1] or not inputs[0] or len(logits) != 2:
        raise _damaged(path, f"has golden inputs of {inputs} with logits of {logits}")


def _damaged(path: str | Path, reason: str) -> FileError:
    return FileError(f"{printable(path)} {reason}, which do not fit the model; save it again.")
