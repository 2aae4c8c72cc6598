"""The plan of a run: a call of `vt.train` or a saved run, resolved once into one frozen object."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail.base.errors import ConfigError, option, setting
from vitrail.base.fields import is_real, short_repr
from vitrail.fast.lora import check_rank
from vitrail.images.classes import ClassNames
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.model.device import ComputeDevice, choose_device
from vitrail.model.model_memory import check_fits, training_bytes
from vitrail.training.loggers import check_loggers
from vitrail.training.objective import Teacher
from vitrail.training.parallel import ProcessGroup, global_batch_size, init_process_group, shards_of_replica
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.load import load

if TYPE_CHECKING:
    from torch.utils.data import Dataset as TorchDataset

    from vitrail.training.plan.threads import Threads

    Arrays = tuple[Any, Any]  # images and labels
    Part = TorchDataset[Any] | Arrays
    Data = str | Path | Dataset | Part | Mapping[str, Part]


@dataclass(frozen=True, kw_only=True)
class RunCall:
    """What the user asks for: the arguments of `vt.train` that say what is trained."""

    data: Data | None = None
    classes: ClassNames | None = None
    recipe: str | None = None
    from_: str | Path | None = None
    teacher: str | Path | Bundle | None = None
    size: int | tuple[int, int] | None = None
    minutes: float | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    """When the minutes begin."""

    def __post_init__(self) -> None:
        minutes = self.minutes
        if minutes is not None and (not is_real(minutes) or not 0 < minutes < 1e6):
            raise ConfigError(f"minutes must be a number above 0, such as 30, not {short_repr(minutes)}.")

    def as_json(self, data: Dataset) -> dict[str, Any]:
        """The "request" of config.json, from which a run is resumed."""
        request = {
            "data": describe_path(self.data),
            "recipe": self.recipe,
            "from": describe_path(self.from_),
            "teacher": describe_path(self.teacher),
            "size": self.size,
            "changes": self.changes,
            "minutes": self.minutes,
            "classes": None if self.classes is None else data.classes,
        }
        return plain_json(request)


def describe_path(given: object) -> dict[str, str | None] | None:
    """A path as given and absolute; names such as "digits" and "hf:owner/name" have no absolute path."""
    if given is None:
        return None
    if not isinstance(given, (str, Path)):
        return {"given": None, "path": None}  # an object of the caller's
    path = Path(given)
    return {"given": str(given), "path": str(path.absolute()) if path.exists() else None}


def plain_json(value: Any) -> Any:
    """A value as JSON has it: numbers of NumPy as Python's, tuples as lists, paths as text."""
    return json.loads(json.dumps(value, default=lambda one: one.item() if hasattr(one, "item") else str(one)))


@dataclass(frozen=True)
class RunPlan:
    """Data, settings, device and weights of a run."""

    data: Dataset
    recipe: Recipe
    compute: ComputeDevice
    ranks: ProcessGroup = field(default_factory=ProcessGroup)
    start: Bundle | None = None
    """The weights to start from; not needed where there is a checkpoint."""
    teacher: Teacher | None = None
    request: Mapping[str, Any] | None = None
    """What the user asked for, as in config.json; None for a recipe and an open data set."""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    """What automatic settings were resolved to when a resumed run started."""
    minutes: float | None = None
    """For a new run: the time that its epochs are reduced to fit, since a moment of `time.monotonic`."""
    since: float = 0.0
    threads: Threads | None = None
    """Chosen by a rehearsal for the minutes, like the next one."""
    seconds: float | None = None
    """The time of the run; None if it was not measured."""

    def with_settings(self, note: str | None = None, **fields: Any) -> RunPlan:
        """The plan with other fields of TrainConfig, and a note of why."""
        notes = self.recipe.notes if note is None else (*self.recipe.notes, note)
        train = replace(self.recipe.train, **fields)
        return replace(self, recipe=replace(self.recipe, train=train, notes=notes))

    def initial_model(self) -> ViT:
        """Random weights from the seed, or those to start from."""
        torch.manual_seed(self.recipe.train.seed)
        model = ViT(self.recipe.model)
        if self.start is not None:
            model.load_state_dict(self.start.model.state_dict())
        return model

    def notes(self) -> Iterator[str]:
        """What was decided, for the user."""
        chosen = self.recipe.train.device == "auto" and self.compute.device.type == "cuda"
        otherwise = f"; {option('device', 'cpu')} chooses otherwise" if chosen else ""
        yield f"Computing on {self.compute.reason}{otherwise}."
        yield from (*self.data.notes, *self.recipe.notes)
        yield from (f"The teacher: {note}" for note in (self.teacher.notes if self.teacher else ()))
        yield from self.start.notes if self.start else ()

    def check(self) -> None:
        """Check that the settings fit the data, and on a CPU that a step fits in memory."""
        settings, model = self.recipe.train, self.recipe.model
        if settings.patience is not None and not self.data.val:
            raise ConfigError(
                "patience needs a validation set, and this data has only a test set, which must not decide "
                "when training stops; remove patience, or add a validation set."
            )
        batch = global_batch_size(self.data, settings, self.ranks)
        if settings.parallel == "hsdp" and self.ranks.count > 1:
            shards_of_replica(self.ranks)
        if settings.tune == "lora":
            check_rank(model, settings.lora_rank)
        if self.compute.device.type == "cpu":
            images = batch // self.ranks.count // settings.accumulate
            advice = f"use a smaller image size, batch or model, or {setting('accumulate', 2)}"
            check_fits(training_bytes(model, images), model, images, "A training step", advice)
        check_loggers(settings.log)


def plan_recipe(
    data: Dataset,
    recipe: Recipe,
    start: Bundle | None = None,
    teacher: str | Path | Bundle | None = None,
    *,
    compute: ComputeDevice | None = None,
    request: Mapping[str, Any] | None = None,
    resolved: Mapping[str, Any] | None = None,
) -> RunPlan:
    """The plan of a run by a recipe whose settings are complete.

    Args:
        compute: where the run computes; by default what its settings say.
    """
    settings, resolved, ranks = recipe.train, resolved or {}, init_process_group()
    compute = compute or run_device(settings, ranks, resolved.get("precision"))
    taught = None
    if teacher is not None:
        bundle = teacher if isinstance(teacher, Bundle) else load(teacher)
        taught = Teacher(bundle, data, recipe.model.channels, compute)
    return RunPlan(data, recipe, compute, ranks, start, taught, request, resolved)


def run_device(settings: TrainConfig, ranks: ProcessGroup, precision: str | None = None) -> ComputeDevice:
    """Choose the device and the precision of a run; `precision` is the one that it has had before."""
    return choose_device(precision or settings.precision, ranks.local_rank, settings.device)
