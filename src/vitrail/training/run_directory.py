"""The run directory: created once, checked on resume, never shared by two runs."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.base.errors import ConfigError, FileError, InputError, call, option, printable
from vitrail.base.fields import as_tuples, short_repr
from vitrail.base.safe_files import PARTIAL, remove_partial, write_text
from vitrail.base.version import __version__
from vitrail.images.formats.lazy import LARGE, LazySequence
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.training.callbacks import Callback
from vitrail.training.checkpoint import list_checkpoints
from vitrail.training.open_data import SPLIT_FIELDS, check_contents, open_training_data
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.resolve import named_fields, resolve_recipe, split_changes, with_size
from vitrail.training.run_plan import RunCall, RunPlan, describe_path, plain_json, plan_recipe
from vitrail.views.run_page import REPORT_NAME
from vitrail.weights.bundle.digest import bundle_digest


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


# ---- a saved run ----------------------------------------------------------------------------

VERSION = 3  # of a run directory; 0.1 wrote none, 0.2 held out other images
# Settings that may change on resume; the second ones, only by the user, because the result then does, too.
_SAME_RESULT = ("workers", "keep", "cuda_graph", "checkpoint_blocks", "log")
_OTHER_BITS = ("precision", "compile", "parallel", "threads", "device", "patience")
_NOT_COMPARED = ("version", "request", "resolved", "extended")  # parts of config.json


def describe_run(plan: RunPlan) -> dict[str, Any]:
    """config.json of a run: everything that determines its result, and what the user asked for."""
    data, recipe, start = plan.data, plan.recipe, plan.start
    digest = hashlib.sha256(_name_bytes(data.train.names))
    digest.update(data.train.labels.tobytes())
    origin = {
        "from_file": start is not None or bool(plan.request and plan.request["from"]),
        "teacher": plan.teacher and plan.teacher.digest,
    }
    if start is not None:
        origin["from_digest"] = bundle_digest(start)
        origin |= {"license": start.card.license, "source": start.card.source}
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
        "start": origin,
        "request": plan.request,
    }
    return json.loads(json.dumps(config))


def _name_bytes(names: Sequence[str]) -> bytes:
    """The names of all images; of very many, a hash of where they are read from."""
    if isinstance(names, LazySequence) and len(names) >= LARGE:
        return names.identity()
    return "\n".join(names).encode(errors="surrogatepass")


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a run, of this version."""
    try:
        saved = json.loads(path.read_text())
        version = saved.get("version") if saved["model"] and saved["train"] else None
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{printable(path)} is not the config.json of a run; choose another folder."
        ) from error
    if version != VERSION:
        writer = "Vitrail 0.1" if version is None else f"another version of Vitrail (format {version})"
        raise FileError(
            f"{printable(path.parent)} was written by {writer}, and this version cannot resume it; its "
            "weights still load, so start a new run from them, in another folder, with "
            f"{option('from', path.parent / 'last.safetensors')} (or best.safetensors)."
        )
    return saved


def check_same_run(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a run; an error if it is of another version, or if a setting differs that must not."""
    saved = read_config(path)
    by_user = config["request"] is not None  # a study must not get another run than it asks for
    may_change = (*_SAME_RESULT, *_OTHER_BITS) if by_user else _SAME_RESULT
    for part in (name for name in config if name not in _NOT_COMPARED):
        fields = as_tuples(saved.get(part) or {})
        for name, value in as_tuples(config[part]).items():
            old, is_epochs = fields.get(name), by_user and (part, name) == ("train", "epochs")
            unknown = part == "start" and name not in fields  # an earlier version did not write it
            if old != value and not (unknown or name in may_change or (is_epochs and (old or 0) < value)):
                raise different_setting(
                    f"{part}.{name}", value, old, " Epochs can only be added." if is_epochs else ""
                )
    return saved


def different_setting(name: str, value: object, saved: object, hint: str = "") -> ConfigError:
    return ConfigError(
        f"a run resumes with the settings and the data it started with: {name} is {short_repr(value)}, but "
        f"{short_repr(saved)} in the run.{hint} Use the same value, or another run directory."
    )


def call_to_resume(out: Path, *arguments: str) -> str:
    """The command or the Python call that resumes a run."""
    return call("train", *arguments, option("out", out), option("resume", True))


@dataclass(frozen=True)
class SavedRun:
    """A run that can be resumed: its settings, and where its data and weights came from."""

    out: Path
    recipe: Recipe
    request: Mapping[str, Any]
    resolved: Mapping[str, Any]

    def plan(self, again: RunCall, callback: Callback) -> RunPlan:
        """The plan of the run. What is given again must be the same, except for more epochs, data that has
        moved, and settings that do not change the result much (`check_same_run`)."""
        request, changes = self.request, dict(again.changes)
        if again.minutes is not None and changes.get("epochs") == request["changes"].get("epochs"):
            changes.pop("epochs", None)  # the same command again, not an extension
        fields, model, nested, preprocess = split_changes(changes)
        asked = request["changes"].get("preprocess")
        for name, given, before in (
            ("minutes", again.minutes, request.get("minutes")),
            ("recipe", again.recipe, request["recipe"]),
            ("preprocess", plain_json(preprocess), asked),
        ):
            if given is not None and given != before:
                raise different_setting(name, given, before)
        train = self.recipe.train
        inner = {part: replace(getattr(train, part), **values) for part, values in nested.items()}
        recipe = replace(
            self.recipe,
            model=replace(self.recipe.model, **named_fields(with_size(model, again.size))),
            train=replace(train, **fields, **inner),
        )
        split = {name: getattr(recipe.train, name) for name in SPLIT_FIELDS}
        source = self.locate("data") if again.data is None else again.data
        data = open_training_data(source, again.classes, split, callback)
        if again.classes is None and request.get("classes"):
            data = replace(data, classes=list(request["classes"]))
        start, teacher = None, again.teacher
        if again.from_ is not None or (request["from"] and not list_checkpoints(self.out / "checkpoints")):
            from_ = again.from_ or self.locate("from")
            _, start = resolve_recipe(request["recipe"], data, from_, request["changes"], request["size"])
        if teacher is None and request["teacher"]:
            teacher = self.locate("teacher")
        paths = {"data": again.data, "from": again.from_, "teacher": teacher}
        located = {name: describe_path(given) for name, given in paths.items()}
        moved = {name: path for name, path in located.items() if path and path["given"]}
        kept = {name: value for name, value in self.resolved.items() if name not in fields}
        return plan_recipe(data, recipe, start, teacher, request={**request, **moved}, resolved=kept)

    def locate(self, what: str) -> str:
        """The path or name of the run's data, from or teacher; an error if it is no longer there."""
        saved = self.request[what] or {}
        given, path = saved.get("given"), saved.get("path")
        if given is None:
            keyword = {"data": "data", "from": "from_", "teacher": "teacher"}[what]
            raise InputError(
                f"the {what} of this run was an object in Python, not a path; resume it with "
                f"vt.train({keyword}=..., out={str(self.out)!r}, resume=True)."
            )
        if path is None or Path(path).exists():
            return path or given
        if Path(given).exists():  # relative to another folder than before
            return given
        moved = "NEWPATH" if what == "data" else option(what, "NEWPATH")
        raise InputError(
            f"the run's {'data' if what == 'data' else f'{what} file'} {printable(path)} does not exist any "
            f"more; if it has moved, resume with: {call_to_resume(self.out, moved)}"
        )


def read_saved_run(out: Path) -> SavedRun | None:
    """The run in this folder; None if there is none, or one that does not record what was asked for."""
    path = out / "config.json"
    if not path.exists():
        return None
    saved = read_config(path)
    if not saved.get("request"):
        return None
    try:
        recipe = Recipe(
            ViTConfig(**as_tuples(saved["model"])),
            Preprocess(**as_tuples(saved["preprocess"])),
            TrainConfig(**as_tuples(saved["train"])),
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise FileError(
            f"{printable(path)} has settings that this version of Vitrail does not read: "
            f"{str(error).removesuffix('.')}. Resume the run with the version that wrote it."
        ) from error
    return SavedRun(out, recipe, saved["request"], saved.get("resolved") or {})
