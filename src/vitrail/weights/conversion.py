"""Converting a model to another family, with a report of tensors and logits; weights between two models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, FileError, InputError, printable, suggest
from vitrail.base.fields import is_real, short_repr
from vitrail.base.telemetry import disable_telemetry
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.bundle import Bundle, check_suffix, golden_inputs, not_finite
from vitrail.weights.bundle.labels import rehead
from vitrail.weights.families import FAMILIES, LIBRARIES
from vitrail.weights.families.family import Family
from vitrail.weights.families.keys import CUSTOM
from vitrail.weights.families.match import join_names
from vitrail.weights.families.to_family import (
    TRAINING_ONLY,
    ConversionError,
    family_tensors,
    unsupported,
    write_family,
)
from vitrail.weights.load import load
from vitrail.weights.text.prompts import Prompts, bake_prompts

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.model import ViT


@dataclass(frozen=True)
class ConversionReport:
    """What happened to a model's tensors, and how close the other library's logits are."""

    source: str
    target: str
    same: int
    """Tensors with the same name and layout in both."""
    renamed: int
    transformed: int
    extras: list[str]
    """Tensors that no model uses; only written back to the family they came from."""
    difference: float | None
    """The largest difference between our logits and the other library's, on the golden inputs."""
    checked_by: str
    """Who computed the other logits, or why they were not computed."""
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the other library's logits, if they were computed, are finite."""
        return self.difference is None or math.isfinite(self.difference)


def convert(
    path: str | Path, out: str | Path, to: str, *, prompts: Prompts | None = None, **options: Any
) -> ConversionReport:
    """Write a model as a file of another family.

    Args:
        path: as for `vitrail.load`: a file, a folder, or a name such as "hf:owner/name".
        out: a file that ends in .safetensors or .npz, for the tensors alone; any other name is a
            folder, which also gets the family's settings. Endings of other formats, such as .pt, are
            refused. It must not exist yet.
        to: "vitrail", a family that can be written, or the one the file came from.
        prompts: give a model with a text tower a head for these classes, see `weights.prompts`.
        options: of `vitrail.load`: classes, size, heads, eps, offline...
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise FileError(f"{printable(out)} already exists; choose another name, or remove it first.")
    check_suffix(out, *([] if to == "vitrail" else [".npz"]))
    bundle = load(path, **options)
    bundle = bundle if prompts is None else bake_prompts(bundle, prompts)
    inputs, logits = _check_finite(bundle, path)
    source = bundle.source.family if bundle.source else "vitrail"
    if to == "vitrail":
        bundle.write(out, inputs, logits)
        count = len(bundle.model.state_dict())
        return ConversionReport(source, to, 0, count, 0, [], 0.0, "the same model", bundle.notes)
    family = find_target(to, bundle)
    rows, tensors = family_tensors(bundle, family)
    write_family(out, family, tensors, bundle)
    difference, checked_by = _compare(bundle, family, tensors, inputs, logits)
    changed = [row for row in rows if len(row.theirs) > 1 or row.row.layout.name != "same"]
    same = [row for row in rows if row not in changed and row.theirs == (row.ours,)]
    extras = list(bundle.extras) if source == family.name else []
    notes = list(bundle.notes)
    if bundle.extras and not extras:
        notes.append(f"Not written, since {family.group} has no such tensors: {join_names(bundle.extras)}.")
    return ConversionReport(
        source=source,
        target=family.name,
        same=len(same),
        renamed=len(rows) - len(changed) - len(same),
        transformed=len(changed),
        extras=extras,
        difference=difference,
        checked_by=checked_by,
        notes=notes,
    )


def _check_finite(bundle: Bundle, path: str | Path) -> tuple[Tensor, Tensor]:
    """The golden inputs and their logits, which must be finite to be compared."""
    inputs = golden_inputs(bundle.model.config)
    if bad := not_finite(bundle.model.state_dict()):
        raise FileError(
            f"{printable(path)} holds NaN or infinity in {join_names(bad)}, so its logits mean nothing; "
            "use a checkpoint from before it diverged."
        )
    logits = bundle.golden_logits(inputs)
    if not_finite({"logits": logits}):
        raise FileError(
            f"The logits of {printable(path)} are NaN or infinity, though its weights are not; check eps, "
            "scale, mean and std."
        )
    if bad := not_finite(bundle.extras):
        bundle.notes.append(f"There is NaN or infinity in {join_names(bad)}, which the model does not use.")
    return inputs, logits


def find_target(to: str, bundle: Bundle) -> Family:
    """The family to write: the one the file came from, or the first of that name that can express it."""
    origin = bundle.source.family if bundle.source else ""
    named = [family for family in (*FAMILIES, CUSTOM) if to in (family.name, family.group)]
    for family in named:
        if family.name == origin:
            return family
    written = [family for family in named if family.writer.expresses is not None]
    if not written:
        writable = ["vitrail", *(f.group for f in LIBRARIES if f.writer.expresses is not None)]
        raise ConfigError(
            f"{short_repr(to)} is not a family that can be written. "
            f"{suggest(str(to), dict.fromkeys(writable))}"
        )
    reasons = {family.name: unsupported(family, bundle.model.config) for family in written}
    for family in written:
        if not reasons[family.name]:
            return family
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    raise ConversionError(
        f"{nearest} cannot express this model: {'; '.join(reasons[nearest])}. "
        + (
            "A field such as eps can be overridden; the report shows how far that moves the logits."
            if any("eps" in reason for reason in reasons[nearest])
            else "Keep it as a vitrail file, or write another family."
        )
    )


def _compare(
    bundle: Bundle, family: Family, tensors: dict[str, Tensor], inputs: Tensor, ours: Tensor
) -> tuple[float | None, str]:
    """The largest difference between our logits and the library's own, if it is installed."""
    import torch

    writer = family.writer
    if writer.peer is None:
        return None, f"not compared: there is no Python library for {family.group} to compare with"
    reasons = unsupported(family, bundle.model.config) if writer.expresses is not None else []
    if reasons:
        return None, f"not compared: {'; '.join(reasons)}"
    disable_telemetry()  # the other libraries import huggingface_hub
    try:
        state = {name: tensor.float() for name, tensor in tensors.items() if name not in bundle.extras}
        peer = writer.peer(bundle.model.config, state)
    except (ImportError, RuntimeError) as error:
        return None, f"not compared: {family.group} did not load it ({printable(str(error).splitlines()[0])})"
    with torch.no_grad():
        theirs = peer(bundle.as_input(inputs))
    return (theirs - ours).abs().max().item(), f"{family.group} itself, on the golden inputs"


def interpolate(first: Bundle, second: Bundle, t: float) -> Bundle:
    """A bundle of the second's kind whose weights are t of the way from the first to the second."""
    if not is_real(t) or not 0 <= t <= 1:
        raise InputError(f"interpolate must be a number from 0 to 1, not {short_repr(t)}.")
    import copy

    import torch

    check_compatible(first, second)
    model = copy.deepcopy(second.model)
    start, end = _in_order(first, second).state_dict(), second.model.state_dict()
    mixed = {name: torch.lerp(start[name].to(end[name]), end[name], t) for name in end}
    model.load_state_dict(mixed)
    note = (
        f"Weights are {t:g} of the way from {first.card.source or 'one model'} to another of the same shape."
    )
    return replace(second, model=model, statistics=None, notes=[*second.notes, note])


def check_compatible(first: Bundle, second: Bundle) -> None:
    """Refuse models between which there is nothing: of another shape, or for other classes."""
    for one in fields(ViTConfig):
        values = [getattr(bundle.model.config, one.name) for bundle in (first, second)]
        if one.name not in TRAINING_ONLY and values[0] != values[1]:
            raise InputError(
                f"Weights are interpolated between models of the same shape, but {one.name} is "
                f"{short_repr(values[0])} in one and {short_repr(values[1])} in the other; use a model and "
                "one that was fine-tuned from it."
            )
    if sorted(first.labels or []) != sorted(second.labels or []):
        raise InputError(
            "The two models have different classes, so their heads cannot be interpolated; use a model and "
            "one that was fine-tuned from it for the same classes."
        )


def _in_order(first: Bundle, second: Bundle) -> ViT:
    """The first model, its classes in the order of the second's: training takes that of the data."""
    labels = second.labels
    if labels is None or labels == first.labels or len(set(labels)) < len(labels):
        return first.model
    model, kept = rehead(first.model, first.labels, labels)
    if kept < len(labels):
        raise InputError("The classes of the two models cannot be matched by name; give both the same order.")
    return model
