"""Checkpoints that are whole or not there: written aside, synced, checked, renamed.

A checkpoint is a folder, checkpoints/step-00000042, with tensors in safetensors files, state.json, and
manifest.json, which lists every other file with its size and hash. One that does not fit its manifest
is passed over for the one before it, with a sentence that says why. A whole one is never written over:
the same step saved again (first while its epoch was judged, then after) is step-00000042.1.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vitrail.errors import FileError, printable
from vitrail.weights.files import write_safetensors

NAME = re.compile(r"step-(\d{8})(?:\.(\d{1,4}))?")
ASIDE = re.compile(r"\.step-[\d.]+\.part|\.[0-9a-f]{16}\.part|\.[a-z]+\.jsonl?\.part")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if nothing had happened."""

    step: int
    """How many steps have been taken."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By file: model, optimizer, ema, sums."""
    state: Mapping[str, Any]
    """Plain numbers and words."""


def save(folder: Path, checkpoint: Checkpoint, keep: int, damaged: Iterable[Path] = ()) -> Path:
    """Write a checkpoint, then remove the damaged ones, and the oldest of the others beyond `keep`."""
    place = next_place(folder, checkpoint.step)
    aside = folder / f".{place.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        aside.mkdir()
        for name, tensors in checkpoint.tensors.items():
            write_safetensors(aside / f"{name}.safetensors", tensors)
        write_text(aside / "state.json", json.dumps({"step": checkpoint.step, **checkpoint.state}))
        write_text(aside / "manifest.json", json.dumps(manifest(aside)))
        sync(aside)
        aside.rename(place)
        sync(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise failed(place, error.strerror or str(error)) from error
    except FileError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise failed(place, error.args[1]) from error
    found = [one for one in complete(folder) if one == place or one not in damaged]
    at = found.index(place)  # those beyond it are damaged, or their steps would not be taken again
    for old in set(complete(folder)) - set(found[at : at + keep]):
        shutil.rmtree(old, ignore_errors=True)
    return place


def next_place(folder: Path, step: int) -> Path:
    """Where a checkpoint goes: after all others of the same step."""
    found = [order(place) for place in complete(folder)]
    again = max((number + 1 for taken, number in found if taken == step), default=0)
    return folder / (f"step-{step:08d}.{again}" if again else f"step-{step:08d}")


def tidy(folder: Path) -> None:
    """Remove what a run that was killed had begun to write."""
    for left in [p for p in folder.iterdir() if ASIDE.fullmatch(p.name)] if folder.is_dir() else []:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def failed(place: Path, reason: str) -> FileError:
    return FileError(
        "A checkpoint must be written whole; the one before it is as it was.",
        f"{printable(place)}: {printable(reason)}",
        "Free some space or check the rights, then go on with --resume.",
    )


def complete(folder: Path) -> list[Path]:
    """Folders of finished checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if NAME.fullmatch(p.name) and p.is_dir())
    return sorted(found, key=order, reverse=True)


def order(place: Path) -> tuple[int, int]:
    step, _, again = place.name.removeprefix("step-").partition(".")
    return int(step), int(again or 0)


def load_newest(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint that is whole, and a sentence on each newer one that is not."""
    warnings: dict[Path, str] = {}
    for place in complete(folder):
        reason = damage(place)
        if reason is None:
            return read(place), warnings
        warnings[place] = f"{printable(place.name)} is not whole ({reason}); the one before it is used."
    return None, warnings


def read(place: Path) -> Checkpoint:
    state = json.loads((place / "state.json").read_text())
    tensors = {file.stem: load_file(file) for file in sorted(place.glob("*.safetensors"))}
    return Checkpoint(state.pop("step"), tensors, state)


def damage(place: Path) -> str | None:
    """Why a checkpoint is not whole; None if it is."""
    try:
        listed = json.loads((place / "manifest.json").read_text())
        found = manifest(place)
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError):
        return "its manifest cannot be read"
    if not isinstance(listed, dict) or set(listed) != set(found):
        return "its files are not those of its manifest"
    wrong = [name for name in found if listed[name] != found[name]]
    return f"{wrong[0]} has changed" if wrong else None


def manifest(place: Path) -> dict[str, list[Any]]:
    """Size and hash of every file but the manifest itself."""
    files = sorted(p for p in place.iterdir() if p.name != "manifest.json")
    return {file.name: [file.stat().st_size, hash_of(file)] for file in files}


def hash_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_text(file: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with file.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def replace_text(file: Path, text: str) -> None:
    """A text file, whole or as it was."""
    aside = file.with_name(f".{file.name}.part")
    try:
        write_text(aside, text)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- optimizers by name ---------------------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """An optimizer's state by the parameters' names: exp_avg/blocks.0..., step/blocks.0..."""
    return {
        f"{kind}/{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], names: Mapping[Tensor, str]
) -> None:
    """Give an optimizer the state it had."""
    by_name = {name: parameter for parameter, name in names.items()}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parameter = by_name[name]
        optimizer.state[parameter][kind] = value.to(parameter.device)
