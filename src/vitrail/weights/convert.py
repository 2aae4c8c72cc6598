"""From one family to another, with a proof: what was renamed, what was changed, how far the logits are."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError, FileError, VitrailError, printable, suggest
from vitrail.fields import show
from vitrail.preprocess import Preprocess
from vitrail.published import from_hf
from vitrail.telemetry import disable_telemetry
from vitrail.weights.bundle import (
    Bundle,
    Source,
    as_they_were,
    check_ending,
    exactly,
    golden_inputs,
    not_finite,
)
from vitrail.weights.families import FAMILIES
from vitrail.weights.files import Entry, write_npz, write_safetensors
from vitrail.weights.keys import KEYS, read_table, with_rows
from vitrail.weights.layout import Sizes
from vitrail.weights.load import load
from vitrail.weights.table import Family, Found, Use, listed, look, plan, write

if TYPE_CHECKING:
    from torch import Tensor

# Fields that a tensor's shape shows, or that count in training alone: every family has them.
FREE = (
    *("width", "depth", "heads", "mlp_width", "patch", "size", "channels", "classes", "layer_scale"),
    *("dropout", "attention_dropout", "patch_dropout", "drop_path", "init", "position_sigma", "vocabulary"),
)


class CannotExpress(VitrailError, ValueError):
    """A model that the other library has no words for."""


@dataclass(frozen=True)
class Report:
    """What became of a model's tensors on the way, and how near the other library's logits are."""

    source: str
    target: str
    same: int
    """Tensors with the same name and layout in both."""
    renamed: int
    transformed: int
    extras: list[str]
    """Tensors that no model uses; written only where they came from."""
    difference: float | None
    """The largest difference between our logits and the other library's, on the golden inputs."""
    checked_by: str
    """Who computed the other logits, or why nobody did."""
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the other library's logits, where they were computed, are numbers at all."""
        return self.difference is None or math.isfinite(self.difference)


def convert(path: str | Path, out: str | Path, to: str, **how: Any) -> Report:
    """Write a model as a file of another family.

    Args:
        path: what `vitrail.load` takes: a file, a folder, or a name such as "hf:owner/name".
        out: a file that ends in .safetensors or .npz, for the tensors alone; any other name is a
            folder, which also gets the family's settings. Endings of other formats, such as .pt, are
            refused. It must not be there yet.
        to: a family that is written, "vitrail", or the one the file came from.
        how: what `vitrail.load` takes: classes, size, heads, eps, offline...
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise FileError("OUT must be new.", printable(str(out)), "Name another, or remove it first.")
    check_ending(out, *([] if to == "vitrail" else [".npz"]))
    bundle = load(path, **how)
    inputs, logits = check_finite(bundle, path)
    source = bundle.source.family if bundle.source else "vitrail"
    if to == "vitrail":
        bundle.write(out, inputs, logits)
        count = len(bundle.model.state_dict())
        return Report(source, to, 0, count, 0, [], 0.0, "the same model", bundle.notes)
    family = target_of(to, bundle)
    uses, tensors = their_tensors(bundle, family)
    store(out, family, tensors, bundle)
    difference, checked_by = compare(bundle, family, tensors, inputs, logits)
    changed = [one for one in uses if len(one.theirs) > 1 or one.row.layout.word != "same"]
    kept = [one for one in uses if one not in changed and one.theirs == (one.ours,)]
    extras = list(bundle.extras) if source == family.name else []
    notes = list(bundle.notes)
    if bundle.extras and not extras:
        notes.append(f"Left behind, as {family.group} has no place for it: {listed(list(bundle.extras))}.")
    renamed = len(uses) - len(changed) - len(kept)
    return Report(
        source, family.name, len(kept), renamed, len(changed), extras, difference, checked_by, notes
    )


def check_finite(bundle: Bundle, path: str | Path) -> tuple[Tensor, Tensor]:
    """The golden inputs and their logits. Without finite ones nothing can be compared, so it is refused."""
    inputs = golden_inputs(bundle.model.config)
    if bad := not_finite(bundle.model.state_dict()):
        raise FileError(
            f"{printable(str(path))} holds NaN or infinity in {listed(bad)}, so its logits mean nothing; "
            "use a checkpoint from before it diverged."
        )
    logits = bundle.golden_logits(inputs)
    if not_finite({"logits": logits}):
        raise FileError(
            f"The logits of {printable(str(path))} are NaN or infinity, though its weights are not; a wrong "
            "eps, scale, mean or std can do that."
        )
    if bad := not_finite(bundle.extras):
        bundle.notes.append(f"There is NaN or infinity in {listed(bad)}, which the model does not use.")
    return inputs, logits


def target_of(to: str, bundle: Bundle) -> Family:
    """The family to write: where the file came from, or the first of that name that can express it."""
    came = bundle.source.family if bundle.source else ""
    named = [family for family in (*FAMILIES, KEYS) if to in (family.name, family.group)]
    for family in named:
        if family.name == came:
            return family
    written = [family for family in named if family.expresses is not None]
    if not written:
        there = ["vitrail", *dict.fromkeys(f.group for f in FAMILIES if f.expresses is not None)]
        raise ConfigError("TO must be a family that is written.", show(to), suggest(str(to), there))
    reasons = {family.name: cannot(family, bundle.model.config) for family in written}
    for family in written:
        if not reasons[family.name]:
            return family
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    raise CannotExpress(
        f"{to} must have words for all of the model.",
        f"a model that {nearest} cannot express: {'; '.join(reasons[nearest])}",
        "A fact such as eps can be given anew, and the report says how far that moves the logits."
        if any("eps" in reason for reason in reasons[nearest])
        else "Keep it as a vitrail file, or write another family.",
    )


def cannot(family: Family, config: ViTConfig) -> list[str]:
    """Why the family's library cannot compute what this model computes."""
    words = family.expresses or {}
    reasons = []
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        allowed = words.get(one.name, (one.default,))
        if one.name == "remainder" and fits_whole(config):
            continue
        if one.name not in FREE and allowed is not ... and value not in allowed:
            only = " or ".join(show(word) for word in allowed)
            reasons.append(f"{one.name} is {only} there, and {show(value)} here")
    return reasons + family.also(config)


def fits_whole(config: ViTConfig) -> bool:
    """Whether no pixel is left over beside the patches: then it does not matter what becomes of them."""
    return all(side % step == 0 for side, step in zip(config.pixels, config.patch_pixels, strict=True))


def their_tensors(bundle: Bundle, family: Family) -> tuple[list[Use], dict[str, Tensor]]:
    """The model's tensors by their names; back in the file it came from, exactly as they were."""
    config = bundle.model.config
    state = {name: tensor.detach().cpu() for name, tensor in bundle.model.state_dict().items()}
    source = bundle.source if bundle.source and bundle.source.family == family.name else None
    if source is None:
        uses, left = plan(family, state, config, {"w": "", "p": family.prefixes[0]})
        if left:
            raise CannotExpress(
                f"{family.name} must have a place for every tensor.", listed(left), "Write another family."
            )
        theirs = write(family, uses, as_they_were(state, bundle.source), config)
        some = next(iter(theirs.values()))
        for name, shape in family.blanks.items():
            theirs[name.format(w="", p=family.prefixes[0])] = some.new_zeros(shape(config))
        return uses, theirs
    found = seen_again(family, source, config)
    known = {one.ours for one in found.uses} | unchanged(state, family.fixed(config, "cpu"))
    fresh, _ = plan(family, [name for name in state if name not in known], config, found.spelled)
    uses = [one for one in (*found.uses, *fresh) if one.ours in state]
    theirs = restack(write(family, uses, state, config), found)
    return uses, {
        name: as_it_was(tensor, source.tensors.get(name))
        for name, tensor in [*theirs.items(), *bundle.extras.items()]
    }


def unchanged(state: Mapping[str, Tensor], fixed: Mapping[str, Tensor]) -> set[str]:
    """Tensors that are as the library computes them, so that its files go without."""
    import torch

    return {name for name in fixed if name in state and torch.equal(state[name].float(), fixed[name])}


def seen_again(family: Family, source: Source, config: ViTConfig) -> Found:
    """The file a model came from, through the same table as when it was read."""
    entries = {name: Entry(dtype, shape) for name, (dtype, shape) in source.tensors.items()}
    sizes = Sizes(config.heads, config.channels, config.patch_pixels)
    table = read_table(source.keys)
    own = with_rows(family, table.rows) if table.rows else family
    found = look(own, table.kept(entries), sizes, family.wrapper)
    if found is None:
        raise FileError(
            f"The model says it was read from a file of the family {family.name}, and the names it lists are "
            "not of that family; write another family, or convert the original file."
        )
    return found


def restack(theirs: Mapping[str, Tensor], found: Found) -> dict[str, Tensor]:
    """Tensors under the names of the file; the blocks of a stack together again."""
    import torch

    out: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in theirs.items():
        place = found.places.get(name)
        if place is None or place.index is None:
            out[name if place is None else place.original] = tensor
        else:
            stacks.setdefault(place.original, []).append(tensor)  # uses go by block, from 0
    return out | {name: torch.stack(blocks) for name, blocks in stacks.items()}


def as_it_was(tensor: Tensor, before: tuple[str, tuple[int, ...]] | None) -> Tensor:
    """A tensor in the shape and dtype it had, where it still fits them."""
    import torch

    if before is None:
        return tensor
    dtype, shape = before
    if math.prod(shape) == tensor.numel():
        tensor = tensor.reshape(shape)
    return exactly(tensor, getattr(torch, dtype))


def store(out: Path, family: Family, tensors: dict[str, Tensor], bundle: Bundle) -> None:
    """Write the file, or the folder with its settings; whole, or not at all."""
    if out.suffix == ".npz":
        write_npz(out, {name: as_numpy(name, tensor) for name, tensor in tensors.items()})
    elif out.suffix == ".safetensors":
        write_safetensors(out, tensors, {"format": "pt"})
    elif family.settings is None or bundle.preprocess is None:
        raise ConfigError(
            f"The family {family.name} is written as one file.",
            printable(str(out)),
            f"Let OUT end in {family.suffix}.",
        )
    else:
        settings = family.settings(bundle.model.config, bundle.preprocess, bundle.labels)
        bundle.notes += moved(bundle.preprocess, settings)
        parent = out.absolute().parent
        try:
            half = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=parent))
        except OSError as error:
            raise FileError(
                "OUT must be in a folder that can be written.",
                f"{printable(str(out))}: {error.strerror}",
                "Check it.",
            ) from error
        try:
            write_safetensors(half / "model.safetensors", tensors, {"format": "pt"})
            for name, content in settings.items():
                (half / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            half.chmod(0o755)
            half.rename(out)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise


def moved(preprocess: Preprocess, settings: Mapping[str, Any]) -> list[str]:
    """A sentence for each field of the preprocessing that transformers has another value for."""
    if "preprocessor_config.json" not in settings:
        return []
    written = dataclasses.asdict(from_hf(settings["preprocessor_config.json"]))
    return [
        f"The preprocessing has {name} {show(written[name])} there, as transformers has no {show(value)}."
        for name, value in dataclasses.asdict(preprocess).items()
        if written[name] != value
    ]


def as_numpy(name: str, tensor: Tensor) -> Any:
    import torch

    if tensor.dtype == torch.bfloat16:  # as numpy without ml_dtypes has it: two bytes of no type
        return tensor.contiguous().view(torch.int16).numpy().view("V2")
    return tensor.numpy()


def compare(
    bundle: Bundle, family: Family, tensors: dict[str, Tensor], inputs: Tensor, ours: Tensor
) -> tuple[float | None, str]:
    """The largest difference of logits between us and the library itself, where it can be had."""
    import torch

    if family.peer is None:
        return None, f"nobody: {family.group} is not a Python library that we compare with"
    reasons = cannot(family, bundle.model.config) if family.expresses is not None else []
    if reasons:
        return None, f"nobody: {'; '.join(reasons)}"
    disable_telemetry()  # the other libraries load huggingface_hub
    extras = set(bundle.extras)
    try:
        mine = {name: tensor.float() for name, tensor in tensors.items() if name not in extras}
        peer = family.peer(bundle.model.config, mine)
    except (ImportError, RuntimeError) as error:
        return None, f"nobody: {family.group} did not take it ({printable(str(error).splitlines()[0])})"
    with torch.no_grad():
        theirs = peer(bundle.as_input(inputs))
    return (theirs - ours).abs().max().item(), f"{family.group} itself, on the golden inputs"
