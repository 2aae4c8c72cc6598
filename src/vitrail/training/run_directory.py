"""The run directory: created once, checked on resume, never shared by two runs."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.base.errors import FileError, option, printable
from vitrail.base.safe_files import PARTIAL, remove_partial, write_text
from vitrail.base.version import __version__
from vitrail.images.formats.lazy import LARGE, LazySequence
from vitrail.images.formats.sources import Dataset
from vitrail.training.callbacks import Callback
from vitrail.training.checkpoint import list_checkpoints
from vitrail.training.data_fingerprint import check_contents
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import Recipe
from vitrail.training.saved_run import (
    CHANGES_BITS,
    MAY_CHANGE,
    VERSION,
    call_to_resume,
    different_setting,
    read_config,
)
from vitrail.views.run_page import REPORT_NAME

_NOT_COMPARED = ("version", "request", "resolved", "extended")  # parts of config.json


@dataclass(frozen=True)
class Origin:
    """Where a run comes from, for config.json."""

    start: Mapping[str, Any]
    """Whether the run starts from a weight file, and digests of it and of the teacher."""
    request: Mapping[str, Any] | None = None
    """What the user asked for (`describe_request`); None if it was a recipe and an open data set."""


@contextmanager
def explain_errors(out: Path) -> Iterator[None]:
    """Turn an error of the file system into a FileError that names the run directory."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"the run directory {printable(out)} cannot be used: {printable(error.strerror or error)}"
            f"{f' ({printable(error.filename)})' if error.filename else ''}. Check its permissions and the "
            "free disk space, or choose another folder."
        ) from error


def prepare_run_directory(
    out: Path,
    resume: bool,
    recipe: Recipe,
    data: Dataset,
    origin: Origin,
    ranks: ProcessGroup,
    callback: Callback,
) -> bool:
    """Create the run directory, or check that it is this run's. True if the run is already finished."""
    config = describe_run(recipe, data, origin.start)
    config["request"] = origin.request
    path = out / "config.json"
    with explain_errors(out):
        saved = check_same_run(path, config) if resume and path.exists() else None
        if saved is None:
            check_empty(out, resume)
        elif recipe.train.epochs > saved["train"]["epochs"]:
            _check_extension(out)
    extended = saved is not None and recipe.train.epochs > saved["train"]["epochs"]
    if saved is not None and recipe.train.fingerprint and (extended or not _is_finished(out)):
        check_contents(out, data, ranks, callback)
    ranks.barrier()  # all processes have checked; now the main one may write
    if ranks.is_main:
        with explain_errors(out):
            if resume:
                remove_partial(out)
                remove_partial(out / "checkpoints")
            if saved is None:
                _create_run(out, config)
            else:
                _update_config(out, saved, config, callback)
    ranks.barrier()
    return saved is not None and _is_finished(out)


def _is_finished(out: Path) -> bool:
    return (out / "last.safetensors").exists()


def _create_run(out: Path, config: Mapping[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "environment.json", json.dumps(environment(), indent=2), overwrite=True)
    write_text(out / "config.json", json.dumps(config, indent=2), overwrite=True)


def _update_config(
    out: Path, saved: Mapping[str, Any], config: Mapping[str, Any], callback: Callback
) -> None:
    """Write what a resumed run changes: more epochs, data that has moved, another precision."""
    new = {**saved, **config}
    new["start"] = {**saved["start"], **config["start"]}  # the weight file is not read again
    new["request"] = config["request"] or saved.get("request")
    old_epochs, epochs = saved["train"]["epochs"], config["train"]["epochs"]
    if epochs > old_epochs:
        new["extended"] = [*saved.get("extended", []), old_epochs]
        callback.on_message(
            f"The run is extended from {old_epochs} to {epochs} epochs: from here on, the learning rate is "
            f"that of a run of {epochs} epochs. The steps before had the schedule of {old_epochs}, so the "
            f"result is not that of a run of {epochs} epochs from the start."
        )
        # A killed process must leave a finished run of the old length, or an unfinished one of the new.
        for name in ("last.safetensors", REPORT_NAME):
            (out / name).unlink(missing_ok=True)
    if new != saved:
        write_text(out / "config.json", json.dumps(new, indent=2), overwrite=True)


def record_resolved(out: Path, resolved: Mapping[str, Any], callback: Callback) -> None:
    """Write to config.json what automatic settings were resolved to, as far as it changes bits."""
    saved = read_config(out / "config.json")
    before = saved.get("resolved") or {}
    for name, value in resolved.items():
        if before.get(name, value) != value:
            callback.on_message(
                f"The run had {name}={before[name]} and continues with {value}, so the result is not "
                "bit-equal to that of an uninterrupted run."
            )
    if any(before.get(name) != value for name, value in resolved.items()):
        new = {**saved, "resolved": {**before, **resolved}}
        with explain_errors(out):
            write_text(out / "config.json", json.dumps(new, indent=2), overwrite=True)


def _check_extension(out: Path) -> None:
    if not list_checkpoints(out / "checkpoints"):
        last = out / "last.safetensors"
        raise FileError(
            f"a run is extended from its last checkpoint, and {printable(out)} has none; start a new run "
            f"from its weights, in another folder, with {option('from', last)}."
        )


def describe_run(recipe: Recipe, data: Dataset, start: Mapping[str, Any]) -> dict[str, Any]:
    """config.json: everything that determines the result of a run."""
    digest = hashlib.sha256(_name_bytes(data.train.names))
    digest.update(data.train.labels.tobytes())
    config = {
        "version": VERSION,
        "model": asdict(recipe.model),
        "train": asdict(recipe.train),
        "preprocess": asdict(recipe.preprocess),
        "data": {
            "train_images": len(data.train),
            "eval_images": len(data.eval_split),
            "classes": data.classes,
            "digest": digest.hexdigest()[:16],
        },
        "start": dict(start),
    }
    return json.loads(json.dumps(config))


def _name_bytes(names: Sequence[str]) -> bytes:
    """The names of all images; of very many, a hash of where they are read from."""
    if isinstance(names, LazySequence) and len(names) >= LARGE:
        return names.identity()
    return "\n".join(names).encode(errors="surrogatepass")


def check_same_run(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a run; an error if it is of another version, or if a setting differs that must not."""
    saved = read_config(path)
    by_user = config.get("request") is not None  # a study must not get another run than it asks for
    may_change = (*MAY_CHANGE, *CHANGES_BITS) if by_user else MAY_CHANGE
    for part in (name for name in config if name not in _NOT_COMPARED):
        fields = saved.get(part) or {}
        for name, value in config[part].items():
            old = fields.get(name)
            extends = by_user and (part, name) == ("train", "epochs") and (old or 0) < value
            unknown = part == "start" and name not in fields  # an earlier version did not write it
            if old != value and not (extends or unknown or name in may_change):
                raise different_setting(f"{part}.{name}", value, old)
    return saved


def check_empty(out: Path, resume: bool) -> None:
    """Refuse a folder with anything in it but the traces of a run killed while its folder was created."""
    ours = {"environment.json"} if resume else set()
    names = [p.name for p in out.iterdir()] if out.is_dir() else []
    foreign = [name for name in names if name not in ours and not (resume and PARTIAL.fullmatch(name))]
    if foreign or (out.exists() and not out.is_dir()):
        if not resume and "config.json" in names and "checkpoints" in names:
            raise FileError(
                f"{option('out')} must be a new or empty folder, and {printable(out)} holds a run; resume it "
                f"with {call_to_resume(out)}, or choose another folder."
            )
        advice = "" if resume else f", or resume a run with {option('resume', True)}"
        raise FileError(
            f"{option('out')} must be a new or empty folder, or a run's, and {printable(out)} is not; choose "
            f"another folder{advice}."
        )


def _gpu_name() -> str | None:
    """The GPU of this process; None without one, or with one that does not work."""
    with suppress(RuntimeError, AssertionError):
        return torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return None


def environment() -> dict[str, Any]:
    """Versions, hardware and the command line, for environment.json."""
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": _gpu_name(),
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }
