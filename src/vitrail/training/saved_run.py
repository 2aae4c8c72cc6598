"""A run as its config.json describes it: resuming needs nothing but the run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, FileError, InputError, call, option, printable
from vitrail.base.fields import as_tuples, short_repr
from vitrail.images.formats.lazy import LARGE, LazySequence
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.training.callbacks import Callback
from vitrail.training.checkpoint import list_checkpoints
from vitrail.training.open_data import SPLIT_FIELDS, open_training_data
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.resolve import named_fields, resolve_recipe, split_changes, with_size
from vitrail.training.run_plan import RunCall, RunPlan, describe_path, plain_json, plan_recipe
from vitrail.weights.bundle.digest import bundle_digest

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
    """What the user asked for (`RunCall.as_json`)."""
    resolved: Mapping[str, Any]
    """What automatic settings were resolved to, as far as it changes bits."""

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
