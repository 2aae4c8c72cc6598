"""A run as its config.json describes it: resuming needs nothing but the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, FileError, InputError, call, option, printable
from vitrail.base.fields import as_tuples, short_repr
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.training.checkpoint import list_checkpoints
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.weights.bundle.bundle import Bundle

VERSION = 3  # of a run directory; 0.1 wrote none, 0.2 held out other images
MAY_CHANGE = (
    "workers",
    "keep",
    "cuda_graph",
    "checkpoint_blocks",
    "log",
)  # settings that do not change the result
CHANGES_BITS = (
    "precision",
    "compile",
    "parallel",
    "threads",
    "device",
    "patience",
)  # may change, too, but then the result does


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


def describe_request(
    data: object,
    recipe: str,
    from_: str | Path | None,
    teacher: str | Path | Bundle | None,
    size: int | tuple[int, int] | None,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """What the user asked for, as JSON for config.json; `SavedRun` reads it."""
    request = {
        "data": _describe_path(data),
        "recipe": recipe,
        "from": _describe_path(from_),
        "teacher": _describe_path(teacher),
        "size": size,
        "changes": changes,
    }
    return json.loads(json.dumps(request, default=_plain_value))


def _describe_path(given: object) -> dict[str, str | None] | None:
    """A path as given and absolute; names such as "digits" and "hf:owner/name" have no absolute path."""
    if given is None:
        return None
    if not isinstance(given, (str, Path)):
        return {"given": None, "path": None}  # an object of the caller's
    path = Path(given)
    return {"given": str(given), "path": str(path.absolute()) if path.exists() else None}


def _plain_value(value: Any) -> Any:
    """A number of NumPy as a Python number, a path as text."""
    return value.item() if hasattr(value, "item") else str(value)


@dataclass(frozen=True)
class SavedRun:
    """A run that can be resumed: its settings, and where its data and weights came from."""

    out: Path
    recipe: Recipe
    request: Mapping[str, Any]
    """What the user asked for (`describe_request`)."""
    start: Mapping[str, Any]
    """Whether the run started from a weight file, and digests of it and of the teacher."""
    resolved: Mapping[str, Any]
    """What automatic settings were resolved to, as far as it changes bits."""

    @property
    def has_checkpoint(self) -> bool:
        return bool(list_checkpoints(self.out / "checkpoints"))

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

    def check_name(self, what: str, given: object) -> None:
        """Check that a name or number, if it is given again, is the run's."""
        if given is not None and given != self.request.get(what):
            raise different_setting(what, given, self.request.get(what))

    def check_preprocess(self, given: object) -> None:
        """Check that the preprocessing, if it is given again, is what was asked for."""
        asked = self.request["changes"].get("preprocess")
        if given is not None and json.loads(json.dumps(given, default=_plain_value)) != asked:
            raise different_setting("preprocess", given, asked)

    def with_changes(
        self, fields: Mapping[str, Any], model: Mapping[str, Any], nested: Mapping[str, Mapping[str, Any]]
    ) -> Recipe:
        """The run's recipe with settings that are given on resume; only some may differ.

        Args:
            fields, model, nested: fields of TrainConfig, of the model, and of augment and mixing.
        """
        train = self.recipe.train
        inner = {part: replace(getattr(train, part), **values) for part, values in nested.items()}
        new = replace(train, **fields, **inner)
        for name in (*fields, *inner):
            value, saved = getattr(new, name), getattr(train, name)
            extends = name == "epochs" and value > saved
            if value != saved and not extends and name not in (*MAY_CHANGE, *CHANGES_BITS):
                hint = " Epochs can only be added." if name == "epochs" else ""
                raise different_setting(f"train.{name}", value, saved, hint)
        config = replace(self.recipe.model, **model)
        for name in model:
            if getattr(config, name) != getattr(self.recipe.model, name):
                raise different_setting(
                    f"model.{name}", getattr(config, name), getattr(self.recipe.model, name)
                )
        return replace(self.recipe, train=new)

    def moved(self, given: Mapping[str, object]) -> dict[str, Any]:
        """What the user asked for, with the paths of data, from and teacher that are given now."""
        paths = {what: _describe_path(path) for what, path in given.items()}
        return {**self.request, **{what: new for what, new in paths.items() if new and new["given"]}}

    def reused(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What the automatic settings were resolved to, but for those that are given now."""
        return {name: value for name, value in self.resolved.items() if name not in fields}


def different_setting(name: str, value: object, saved: object, hint: str = "") -> ConfigError:
    return ConfigError(
        f"a run resumes with the settings and the data it started with: {name} is {short_repr(value)}, but "
        f"{short_repr(saved)} in the run.{hint} Use the same value, or another run directory."
    )


def call_to_resume(out: Path, *arguments: str) -> str:
    """The command or the Python call that resumes a run."""
    return call("train", *arguments, option("out", out), option("resume", True))


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
    return SavedRun(out, recipe, saved["request"], saved.get("start") or {}, saved.get("resolved") or {})
