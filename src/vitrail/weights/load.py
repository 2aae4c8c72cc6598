"""From a file to a model: read what it describes, fill a model, fit it to what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import by
from vitrail.errors import ConfigError, FileError, printable
from vitrail.fields import per_axis, show
from vitrail.weights.bundle import Bundle
from vitrail.weights.describe import Description, describe
from vitrail.weights.folder import Stored, open_model
from vitrail.weights.hub import fetch_model
from vitrail.weights.keys import Keys
from vitrail.weights.layout import Sizes
from vitrail.weights.preprocessing import check_fields, fitted, overridden
from vitrail.weights.table import listed, read

if TYPE_CHECKING:
    import torch

    from vitrail.model import ViT


def load(
    path: str | Path,
    *,
    classes: int | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    patch: int | tuple[int, int] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    family: str | None = None,
    keys: Keys | None = None,
    checkpoint_key: str | None = None,
    preprocess: Mapping[str, Any] | None = None,
    offline: bool = False,
    **facts: Any,
) -> Bundle:
    """Load a model from a file or a folder, whoever wrote it: the family is recognised by its keys.

    Args:
        path: or the name of one on the Hugging Face hub, which is fetched into its cache:
            "hf:owner/name", "hf:owner/name@revision", "hf:owner/name/path/file.npz".
        classes: for another number of classes, the head is replaced by a fresh one; 0 takes it off.
        size: (H, W) or a side. A size that the stored positions fit is the model's own; for another
            they are resized from the model's own grid.
        channels, patch: likewise, the patch projection is changed.
        device, dtype: where the model goes; float32 on the CPU unless given.
        family: read the file as one of this family, instead of by its keys.
        keys: rows of a table of your own, (their name or names, ours[, layout]), tried before the
            family's; "{i}" is the block. Layouts: vitrail.weights.layout.WORDS. (pattern, None) ignores
            tensors. Without a family, a table that names every tensor is enough by itself.
        checkpoint_key: where a torch.save file holds several state dicts, the key of the one to read.
        preprocess: fields of Preprocess in place of the file's: {"mean": (0.485, 0.456, 0.406)}.
        offline: fetch nothing; a name on the hub must be in the cache.
        facts: fields of ViTConfig that shapes cannot tell: heads, head_width, activation, eps, block...

    What was taken on trust and what was changed is in `.notes`, a sentence each.
    """
    wanted: dict[str, Any] = {"size": size, "channels": channels, "patch": patch}
    if preprocess is not None:
        check_fields(preprocess)
    path, origin = fetch_model(path, offline=offline)
    with open_model(path, checkpoint_key) as stored:
        what = describe(stored, family=family, keys=keys, **wanted, **facts)
        what = replace(what, card=replace(what.card, **origin))
        place = as_device(device)
        bundle = build(stored, what, dtype)
    fit(bundle, what, {"classes": classes, **wanted})
    # Only now, as a resize_to that is given is for the size that the model has in the end.
    bundle.preprocess = overridden(bundle.preprocess, preprocess, bundle.model.config, bundle.notes)
    bundle.model.to(place)
    return bundle


def as_device(device: str | torch.device | None) -> torch.device:
    """Where the model goes; a device that is not there is found out before tensors are read."""
    import torch

    try:
        place = torch.device("cpu" if device is None else device)
        torch.empty(0, device=place)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "device must be one that torch has here.", show(device), f'Use "cpu". torch: {reason}'
        ) from error
    return place


def build(stored: Stored, what: Description, dtype: torch.dtype | None) -> Bundle:
    """The model with the file's tensors, each checked before any is read."""
    import torch

    from vitrail.model import ViT

    with unfilled():
        model = ViT(what.config)
    if what.found is None:
        shapes = {
            name: e.shape for name, e in stored.entries.items() if not name.startswith(("extras/", "golden/"))
        }
    else:
        fixed = what.found.family.fixed(what.config, "meta")  # shapes alone, until the file is checked
        shapes = {**{name: tuple(tensor.shape) for name, tensor in fixed.items()}, **what.found.shapes}
    check_tensors(stored, shapes, model)
    if what.found is None:
        state = {name: stored.tensor(name) for name in shapes}
        extras = {n[7:]: stored.tensor(n) for n in stored.entries if n.startswith("extras/")}
    else:
        config = what.config
        sizes = Sizes(config.heads, config.channels, config.patch_pixels)
        state = {**what.found.family.fixed(config, "cpu"), **read(what.found, stored.tensor, sizes)}
        extras = {name: stored.tensor(name) for name in what.found.extras}
    state = {name: tensor.to(dtype or torch.float32) for name, tensor in state.items()}
    model.load_state_dict(state, assign=True)
    model = model.to(dtype or torch.float32).eval()
    return Bundle(
        model=model,
        preprocess=what.preprocess,
        labels=what.labels,
        card=what.card,
        source=what.source,
        extras=extras,
        notes=list(what.notes),
    )


def check_tensors(stored: Stored, shapes: Mapping[str, tuple[int, ...]], model: ViT) -> None:
    needed = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = [name for name in needed if name not in shapes]
    spare = [name for name in shapes if name not in needed]
    wrong = [
        f"{name} {by(shapes[name])} for {by(shape)}"
        for name, shape in needed.items()
        if name in shapes and shapes[name] != shape
    ]
    for names, words in ((missing, "without"), (spare, "with, besides,"), (wrong, "with")):
        if names:
            raise FileError(
                "A file must hold exactly the tensors of its model.",
                f"{printable(str(stored.path))} {words} {listed(names)}",
                "Give the facts that shapes cannot tell (heads, pool, head...), or check the file.",
            )


def unfilled() -> Any:
    """A mode in which parameters are made without memory, and buffers with their numbers."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.empty and kwargs.get("dtype") is None:
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return Mode()


def fit(bundle: Bundle, what: Description, wanted: Mapping[str, Any]) -> None:
    """Change the model as the user asked; each change is a sentence in the notes."""
    from vitrail.model import surgery

    def note(text: str) -> None:
        bundle.notes.append(text)

    model = bundle.model
    classes, size, channels, patch = (wanted[name] for name in ("classes", "size", "channels", "patch"))
    config = model.config
    if channels is not None and channels != config.channels:
        model = surgery.rechannel(model, channels)
        note(f"The patch projection for {config.channels} channels was changed to take {channels}.")
    new_patch = config.patch_pixels if patch is None else per_axis("patch", patch, ("height", "width"))
    new_size = config.pixels if size is None else per_axis("size", size, ("H", "W"))
    if new_patch != config.patch_pixels:
        model = surgery.repatch(model, new_patch, size=new_size, **what.resize)  # type: ignore[arg-type]
        note(f"The patch projection was resized from {by(config.patch_pixels)} to {by(new_patch)} pixels.")
    elif new_size != config.pixels:
        model = surgery.resize(model, new_size, **what.resize)  # type: ignore[arg-type]
    if model.config.grid != config.grid and config.position == "learned":
        note(f"Positions were resized from a grid of {by(config.grid)} to {by(model.config.grid)}.")
    if classes is not None and classes != config.classes:
        model = surgery.reclass(model, classes)
        fresh = f"a new one for {classes}, all zero" if classes else "none"
        note(f"The head for {config.classes} classes was replaced by {fresh}.")
        bundle.labels = None
    bundle.model = model
    if bundle.preprocess is not None:
        bundle.preprocess = fitted(bundle.preprocess, model.config)
