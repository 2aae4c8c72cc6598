"""The run directory: created once, checked on resume, never shared by two runs."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from vitrail.base.errors import FileError, option, printable
from vitrail.base.safe_files import PARTIAL, remove_partial, write_text
from vitrail.base.version import __version__
from vitrail.training.callbacks import Callback
from vitrail.training.checkpoint import list_checkpoints
from vitrail.training.data_fingerprint import check_contents
from vitrail.training.run_plan import RunPlan
from vitrail.training.saved_run import call_to_resume, check_same_run, describe_run, read_config
from vitrail.views.run_page import REPORT_NAME


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


def prepare_run_directory(plan: RunPlan, out: Path, resume: bool, callback: Callback) -> bool:
    """Create the run directory, or check that it is this run's. True if the run is already finished."""
    config, path, epochs = describe_run(plan), out / "config.json", plan.recipe.train.epochs
    finished = (out / "last.safetensors").exists()
    with explain_errors(out):
        saved = check_same_run(path, config) if resume and path.exists() else None
        if saved is None:
            check_empty(out, resume)
        extended = saved is not None and epochs > saved["train"]["epochs"]
        if extended and not list_checkpoints(out / "checkpoints"):
            raise FileError(
                f"a run is extended from its last checkpoint, and {printable(out)} has none; start a new run "
                f"from its weights, in another folder, with {option('from', out / 'last.safetensors')}."
            )
    if saved is not None and plan.recipe.train.fingerprint and (extended or not finished):
        check_contents(out, plan.data, plan.ranks, callback)
    plan.ranks.barrier()  # all processes have checked; now the main one may write
    if plan.ranks.is_main:
        with explain_errors(out):
            if resume:
                remove_partial(out)
                remove_partial(out / "checkpoints")
            if saved is None:
                out.mkdir(parents=True, exist_ok=True)
                _write_json(out / "environment.json", environment())
                _write_json(path, config)
            else:
                _update_config(out, saved, config, callback)
    plan.ranks.barrier()
    return saved is not None and finished and not extended


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
        _write_json(out / "config.json", new)


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
    if before != {**before, **resolved}:
        with explain_errors(out):
            _write_json(out / "config.json", {**saved, "resolved": {**before, **resolved}})


def _write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2), overwrite=True)


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


def environment() -> dict[str, Any]:
    """Versions, hardware and the command line, for environment.json."""
    gpu = None
    with suppress(RuntimeError, AssertionError):  # of a GPU that does not work
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }
