"""Loading a model: describe the file, fill a model with its tensors, adapt it to what was requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, FileError, InputError, printable
from vitrail.base.fields import per_axis
from vitrail.images.preprocess import fit_preprocess
from vitrail.model.config import POSITIONS, format_sides
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.bundle_header import (
    OWN_NAMES,
    FileDescription,
    describe_own,
    stored_fingerprint,
    stored_statistics,
)
from vitrail.weights.bundle.scores import Scores
from vitrail.weights.readers.folder import ModelFiles, open_model

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitrail.model import ViT
    from vitrail.weights.families.keys import Keys


def load(
    path: str | Path,
    *,
    classes: int | Sequence[str] | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    patch: int | tuple[int, int] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    family: str | None = None,
    keys: Keys | None = None,
    checkpoint_key: str | None = None,
    preprocess: Mapping[str, Any] | str | None = None,
    offline: bool = False,
    **overrides: Any,
) -> Bundle:
    """Load a model from a file or folder of any supported library, recognized by its tensor names.

    Args:
        path: a file, a folder, or a model on the Hugging Face hub, which is downloaded into its cache:
            "hf:owner/name", "hf:owner/name@revision", "hf:owner/name/path/file.npz".
        classes: replace the head by a new one for this number of classes; 0 removes it. With a list of names,
            the rows of classes that the file knows by name are kept.
        size: (H, W) or a side. If the stored positions fit it, it is the model's own; otherwise they are
            resized from the model's own grid.
        channels, patch: likewise, the patch projection is changed.
        device, dtype: of the model; float32 on the CPU by default. "auto" is a GPU if one can be used.
        family: read the file as one of this family, instead of recognizing it.
        keys: rows of a key table, (their name or names, ours[, layout]), tried before the family's;
            "{i}" is the block index. (pattern, None) ignores
            tensors. Layouts: those of vitrail.weights.families.key_rows.LAYOUTS.
            Without a family, a table that names every tensor is sufficient.
        checkpoint_key: the key of the state dict to read, if a torch.save file holds several.
        preprocess: fields of Preprocess to use instead of the file's: {"mean": (0.485, 0.456, 0.406)}; or the
            name of a published preprocessing: "deit", "augreg", "google", "clip", "dinov2", ...
        offline: download nothing; a model on the hub must be in the cache.
        overrides: fields of ViTConfig that shapes do not show: heads, head_width, activation, eps, block...

    Assumptions and changes are listed in `.notes`, a sentence each.
    """
    from vitrail.weights.model_settings import check_fields, override_preprocess

    device = "cpu" if device is None else device
    requested: dict[str, Any] = {"size": size, "channels": channels, "patch": patch}
    if preprocess is not None:
        check_fields(preprocess)
    with open_model(path, checkpoint_key, offline=offline) as files:
        description = describe(files, family=family, keys=keys, **requested, **overrides)
        from vitrail.model.device import find_device, place  # with torch: not for a file that is refused

        if device != "auto":
            find_device(device)  # an error before any tensor is read
        bundle = build_bundle(files, description, dtype)
    _adapt(bundle, classes, size, channels, patch)
    if preprocess is not None:  # only now: a given resize_to is for the size that the model has in the end
        bundle.preprocess = override_preprocess(
            bundle.preprocess, preprocess, bundle.model.config, bundle.notes
        )
        if isinstance(preprocess, str) or {"mean", "std"} <= set(preprocess):
            bundle.guess = ""  # nothing is left to guess
    if bundle.model.config != description.config or overrides or preprocess is not None:
        bundle.statistics = None  # they are of the features of the model as it was trained
    place(bundle.model, device)
    return bundle


def as_bundle(
    model: Bundle | ViT | str | Path, *, default_device: str | None = None, **options: Any
) -> Bundle:
    """A bundle as it is, that of a run, a model with the default preprocessing, or what `load` reads.

    Args:
        default_device: where a file is loaded to if the options do not say it; a model stays where it is.
    """
    from torch import nn

    model = getattr(model, "bundle", model)  # a finished run, which is defined in a layer above
    if not isinstance(model, (Bundle, nn.Module)):
        return load(model, **{"device": default_device, **options})
    if options:
        raise InputError(
            f"{type(model).__name__} is loaded already and takes no options ({', '.join(options)}); pass "
            "them to vt.load instead."
        )
    return model if isinstance(model, Bundle) else Bundle(model=model)  # which refuses other modules


def describe(
    files: ModelFiles,
    *,
    family: str | None = None,
    keys: Keys | None = None,
    preprocess: Mapping[str, Any] | str | None = None,
    **overrides: Any,
) -> FileDescription:
    """Describe an open file: a vitrail file by its own header, any other by its family. No torch.

    The arguments are those of `load`; `overrides` are config fields.
    """
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if files.own and family in (None, "vitrail"):
        if keys:
            raise ConfigError(OWN_NAMES)
        description = describe_own(files, overrides)
    else:
        from vitrail.weights.families.recognize import describe_library

        description = describe_library(files, family, keys, overrides)
    description = replace(description, card=replace(description.card, **files.card))
    if not preprocess:
        return description
    from vitrail.weights.model_settings import override_preprocess

    config, notes = description.config, description.notes
    return replace(
        description,
        preprocess=override_preprocess(description.preprocess, preprocess, config, notes),
        preprocess_from="as given",
    )


def build_bundle(files: ModelFiles, description: FileDescription, dtype: torch.dtype | None) -> Bundle:
    """The model with the file's tensors. All shapes are checked before any tensor is read."""
    import torch

    from vitrail.model import ViT
    from vitrail.model.init import EmptyParameters
    from vitrail.weights.families.family import Profile

    config, match, notes = description.config, description.match, list(description.notes)
    profile = match.family.profile if match else Profile()
    with EmptyParameters():
        model = ViT(config)
    computed = profile.computed(config) if profile.computed else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in computed.items()} | dict(description.shapes)
    if wrong := describe_mismatch(model, shapes):
        raise FileError(
            f"{printable(files.path)} does not hold the tensors of its model: it {wrong}. Give fields that "
            "shapes do not show (heads, pool, head...), or check the file."
        )
    if match is None:
        state = {name: files.tensor(name) for name in description.shapes}
    else:
        from vitrail.weights.families.match import read_state

        state = computed | read_state(match, files.tensor, config)
    extras = {name: files.tensor(original) for name, original in description.extras.items()}
    if profile.check_extras:
        notes += profile.check_extras(extras)
    text_files: dict[str, bytes] = {}
    if extras:
        from vitrail.weights.text.words import add_clip_file, has_text

        others = {name: files.entries[original] for name, original in description.extras.items()}
        text_files = add_clip_file(others, files.text_files) if has_text(others) else {}
    state = {name: tensor.to(dtype or torch.float32) for name, tensor in state.items()}
    model.load_state_dict(state, assign=True)
    return Bundle(
        model=model.to(dtype or torch.float32).eval(),
        preprocess=description.preprocess,
        labels=description.labels,
        scores=description.scores,
        card=description.card,
        source=description.source,
        statistics=None if match else stored_statistics(files, config.pooled_width),
        native=description.native,
        extras=extras,
        fingerprint=None if match else stored_fingerprint(files),
        notes=notes,
        guess=description.guess,
        text_files=text_files,
    )


def describe_mismatch(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Which tensors a model has and a file has not, or the other way round, as a phrase; "" if none."""
    missing, unexpected, misshapen = list[str](), list[str](), list[str]()
    from vitrail.weights.families.match import join_names

    needed = model.state_dict()
    for name in {**needed, **shapes}:
        if name not in shapes:
            missing.append(name)
        elif name not in needed:
            unexpected.append(name)
        elif (shape := needed[name].shape) != shapes[name]:
            misshapen.append(f"{name} {format_sides(shapes[name])} instead of {format_sides(shape)}")
    wrong = {"is missing": missing, "has unexpected": unexpected, "has wrong shapes:": misshapen}
    return " and ".join(f"{what} {join_names(names)}" for what, names in wrong.items() if names)


def _adapt(
    bundle: Bundle,
    classes: int | Sequence[str] | None,
    size: int | tuple[int, int] | None,
    channels: int | None,
    patch: int | tuple[int, int] | None,
) -> None:
    """Change the model as requested; each change is a sentence in the notes."""
    from vitrail.model import surgery

    model, notes = bundle.model, bundle.notes
    config = model.config
    if channels is not None and channels != config.channels:
        model = surgery.rechannel(model, channels)
        notes.append(f"The patch projection was changed from {config.channels} to {channels} channels.")
    new_patch = config.patch_pixels if patch is None else per_axis("patch", patch, ("height", "width"))
    new_size = config.pixels if size is None else per_axis("size", size, ("H", "W"))
    resize: Mapping[str, Any] = {}
    if bundle.source is not None and (new_patch, new_size) != (config.patch_pixels, config.pixels):
        from vitrail.weights.families.recognize import position_resize_options

        resize = position_resize_options(bundle.source)
    if new_patch != config.patch_pixels:
        model = surgery.repatch(model, new_patch, size=new_size, **resize)  # type: ignore[arg-type]
        notes.append(
            f"The patch projection was resized from {format_sides(config.patch_pixels)} to "
            f"{format_sides(new_patch)} pixels."
        )
    elif new_size != config.pixels:
        model = surgery.resize(model, new_size, **resize)  # type: ignore[arg-type]
    if model.config.grid != config.grid and POSITIONS[config.position].has_table:
        notes.append(
            f"Positions were resized from a grid of {format_sides(config.grid)} to "
            f"{format_sides(model.config.grid)}."
        )
    if isinstance(classes, Sequence):
        model = _rename_head(model, bundle, list(classes))
    elif classes is not None and classes != config.classes:
        model = surgery.reclass(model, classes)
        change = f"replaced by a new one for {classes}, all zero" if classes else "removed"
        notes.append(f"The head for {config.classes} classes was {change}.")
        bundle.labels, bundle.scores = None, Scores()
    bundle.model = model
    if bundle.preprocess is not None:
        bundle.preprocess = fit_preprocess(bundle.preprocess, model.config)


def _rename_head(model: ViT, bundle: Bundle, names: list[str]) -> ViT:
    """A head for classes of these names: its own, or a new one with the rows that the file has."""
    from vitrail.weights.bundle.labels import rehead

    count, labels = model.config.classes, bundle.labels
    if names == labels or (labels is None and len(names) == count):
        return model
    new, kept = rehead(model, labels, names)
    which = "all zero"
    if kept:
        which = f"with the rows of {kept:,} that the file knows by name" + ", the others zero" * (
            kept < len(names)
        )
    bundle.notes.append(f"The head for {count} classes was replaced by a new one for {len(names)}, {which}.")
    bundle.labels = names
    return new
