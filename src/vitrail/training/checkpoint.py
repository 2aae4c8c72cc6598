"""Checkpoints: everything a run needs to resume exactly, in folders that are complete or not there at all.

A checkpoint is a folder, checkpoints/step-00000042, with tensors in safetensors files, state.json, and
manifest.json, which lists every other file with its size and hash. Of a sharded model, every process writes
its own part, in the background (`sharded_checkpoint.py`). A folder that does not match its manifest
is ignored, with a warning, and the one before it is used. A complete checkpoint is never overwritten: the
same step saved again (first before its epoch was evaluated, then after) is step-00000042.1.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vitrail.base.errors import FileError, option, printable
from vitrail.base.safe_files import atomic_folder, remove_partial, write_text
from vitrail.fast.parallelism import copy_into, is_sharded
from vitrail.training.parallel import ProcessGroup
from vitrail.training.sharded_checkpoint import SHARDS, ShardWriter, measure_file, read_shards
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.readers.files import write_safetensors

_NAME = re.compile(r"step-(\d{8})(?:\.(\d{1,4}))?")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some steps: tensors, and what is not a tensor, as JSON."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By file: model, optimizer, ema, sums."""
    state: Mapping[str, Any]
    shards: Path | None = None
    """Where the tensors of a sharded model are, all but the sums."""

    def copy_into(self, targets: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors into those of a run, which may be sharded in another way, or not at all."""
        if self.shards is not None:
            read_shards(self.shards, targets)
            return
        with torch.no_grad():
            for file, tensors in targets.items():
                for name, target in tensors.items():
                    copy_into(target, self.tensors[file][name])


class CheckpointManager:
    """Saves and restores the checkpoints of a run directory, and its files best and last.safetensors.

    Args:
        out: the run directory.
        keep: how many checkpoints to keep.
    """

    def __init__(self, out: Path, keep: int, ranks: ProcessGroup) -> None:
        self.out, self.keep, self.ranks = out, keep, ranks
        self.folder = out / "checkpoints"
        self._newest: tuple[int, bool] | None = None
        self._damaged: list[Path] = []
        self._writer: ShardWriter | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, unless the newest one already holds this state. All processes must call it.

        Of a sharded model it is written in the background: `wait` for it.
        """
        moment = (checkpoint.step, bool(checkpoint.state["pending"]))
        if moment == self._newest:
            return
        if any(is_sharded(tensor) for part in checkpoint.tensors.values() for tensor in part.values()):
            tensors = dict(checkpoint.tensors)
            own = {"sums": {name: sums.clone() for name, sums in tensors.pop("sums").items()}}
            rest = Checkpoint(checkpoint.step, own, checkpoint.state)
            folder = partial(_checkpoint_folder, self.folder, checkpoint.step, self.keep, self._damaged)
            self._writer = self._writer or ShardWriter(self.ranks)
            self._writer.start(tensors, folder, partial(_write_files, rest))
        elif self.ranks.is_main:
            save_checkpoint(self.folder, checkpoint, self.keep, self._damaged)
        self.ranks.barrier()
        self._newest, self._damaged = moment, []

    def wait(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """End the run, also after an error."""
        if self._writer is not None:
            self._writer.close()

    def restore_newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Find the newest complete checkpoint; `warn` is called for each newer one that is damaged."""
        checkpoint, warnings = load_newest(self.folder, self.ranks)
        for text in warnings.values():
            warn(text)
        self._damaged = list(warnings)  # the next checkpoint replaces them
        if checkpoint is not None:
            self._newest = (checkpoint.step, bool(checkpoint.state["pending"]))
        return checkpoint

    def save_best(self, bundle: Bundle) -> None:
        bundle.save(self.out / "best.safetensors")

    def save_last(self, bundle: Bundle) -> None:
        """Write the weights of the last step. This file marks the run as finished."""
        bundle.save(self.out / "last.safetensors")


# ---- files ----------------------------------------------------------------------------------


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, damaged: Iterable[Path] = ()) -> Path:
    """Write a checkpoint, then remove the damaged ones, and the oldest of the others beyond `keep`."""
    with _checkpoint_folder(folder, checkpoint.step, keep, damaged) as path:
        _write_files(checkpoint, path, {})
    return list_checkpoints(folder)[0]


@contextmanager
def _checkpoint_folder(folder: Path, step: int, keep: int, damaged: Iterable[Path]) -> Iterator[Path]:
    """Yield a temporary folder for a checkpoint, then rename it, and remove what is not kept."""
    before = [_step_and_attempt(path) for path in list_checkpoints(folder)]
    attempt = max((number + 1 for other, number in before if other == step), default=0)
    path = folder / (f"step-{step:08d}.{attempt}" if attempt else f"step-{step:08d}")
    try:
        remove_partial(folder)
        with atomic_folder(path) as temporary:
            yield temporary
    except (OSError, FileError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileError(
            f"the checkpoint {printable(path)} could not be written: {printable(reason, 400).rstrip('.')}. "
            "The checkpoint before it is unchanged. Free some disk space or check the permissions, then "
            f"resume with {option('resume', True)}."
        ) from error
    good = [one for one in list_checkpoints(folder) if one == path or one not in damaged]
    at = good.index(path)  # those of later steps are damaged, or their steps would not be taken again
    for old in set(list_checkpoints(folder)) - set(good[at : at + keep]):
        shutil.rmtree(old, ignore_errors=True)


def _write_files(checkpoint: Checkpoint, folder: Path, shards: Mapping[str, list[Any]]) -> None:
    """Write the files of a checkpoint, the manifest last; `shards` are there, with their sizes and hashes."""
    for name, tensors in checkpoint.tensors.items():
        write_safetensors(folder / f"{name}.safetensors", tensors)
    write_text(folder / "state.json", json.dumps({"step": checkpoint.step, **checkpoint.state}))
    written = {name: measure_file(folder / name) for name in _file_names(folder) if name not in shards}
    write_text(folder / "manifest.json", json.dumps({**written, **shards}))


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders of complete checkpoints, the newest first; their contents are not checked."""
    if not folder.is_dir():
        return []
    folders = (p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())
    return sorted(folders, key=_step_and_attempt, reverse=True)


def _step_and_attempt(path: Path) -> tuple[int, int]:
    step, _, attempt = path.name.removeprefix("step-").partition(".")
    return int(step), int(attempt or 0)


def load_newest(folder: Path, ranks: ProcessGroup | None = None) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest undamaged checkpoint, and a warning for each newer one that is damaged."""
    warnings: dict[Path, str] = {}
    ranks = ranks or ProcessGroup()
    for path in ranks.from_main(list_checkpoints(folder)):
        reason = _find_damage(path, ranks)
        reasons = ranks.union({} if reason is None else {reason: ""})
        if not reasons:
            state = json.loads((path / "state.json").read_text())
            shards = set(path.glob(SHARDS))
            files = sorted(set(path.glob("*.safetensors")) - shards)
            tensors = {file.stem: load_file(file) for file in files}
            return Checkpoint(state.pop("step"), tensors, state, path if shards else None), warnings
        warnings[path] = f"{path.name} is damaged ({next(iter(reasons))}); the checkpoint before it is used."
    return None, warnings


def _find_damage(path: Path, ranks: ProcessGroup) -> str | None:
    """Why some files of a checkpoint are damaged, of which every process checks its own; None if not."""
    try:
        listed = json.loads((path / "manifest.json").read_text())
        names = _file_names(path)
        if not isinstance(listed, dict) or set(listed) != set(names):
            return "its files do not match its manifest"
        own = names[ranks.rank :: ranks.count]
        changed = [name for name in own if listed[name] != measure_file(path / name)]
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError):
        return "its manifest cannot be read"
    return f"{changed[0]} has changed" if changed else None


def _file_names(folder: Path) -> list[str]:
    """The files of a checkpoint but for its manifest."""
    return sorted(p.name for p in folder.iterdir() if p.name != "manifest.json")


# ---- optimizer state by parameter name ------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """An optimizer's state by the parameters' names: exp_avg/blocks.0..., step/blocks.0..."""
    return {
        f"{kind}/{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor)
    }
