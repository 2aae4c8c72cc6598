"""A run's folder: made once, known again, and never another run's."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__
from vitrail.data.sources import Dataset
from vitrail.errors import ConfigError, FileError, printable
from vitrail.fields import show
from vitrail.training import checkpoint as files
from vitrail.training.listen import Listener
from vitrail.training.parallel import Ranks
from vitrail.training.settings import Recipe


def prepare(
    out: Path,
    resume: bool,
    chosen: Recipe,
    data: Dataset,
    start: Mapping[str, Any],
    ranks: Ranks,
    say: Listener,
) -> bool:
    """Make the run's folder, or check that it is this run's; True where the run is finished already.

    Args:
        start: what the run begins with besides: whether from a file, and which teacher it has.
    """
    described = describe(chosen, data, start)
    file = out / "config.json"
    known = resume and file.exists()
    if known:
        compare(file, described)
    else:
        check_new(out, resume)
    ranks.wait()  # all have looked; now the first may write
    if known and ranks.first:
        files.tidy(out)
        files.tidy(out / "checkpoints")
    elif ranks.first:
        if resume:
            say.note("There is no run to go on with: it starts at step 0.")
        out.mkdir(parents=True, exist_ok=True)
        files.replace_text(out / "environment.json", json.dumps(environment(), indent=2))
        files.replace_text(file, json.dumps(described, indent=2))
    ranks.wait()
    return known and (out / "last.safetensors").exists()


def describe(chosen: Recipe, data: Dataset, start: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What makes a run this run, as JSON has it."""
    digest = hashlib.sha256("\n".join(data.train.names).encode(errors="surrogatepass"))
    digest.update(data.train.labels.tobytes())
    described = {
        "model": asdict(chosen.model),
        "train": asdict(chosen.train),
        "preprocess": asdict(chosen.preprocess),
        "data": {
            "pictures": len(data.train),
            "held_out": len(data.held_out),
            "classes": data.classes,
            "names": digest.hexdigest()[:16],
        },
        "start": dict(start),
    }
    return json.loads(json.dumps(described))


def compare(file: Path, described: dict[str, dict[str, Any]]) -> None:
    """The first setting that is not as it was in the run is an error."""
    try:
        known = json.loads(file.read_text())
        found = {part: dict(known[part]) for part in described}
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            "A run to go on with must have its config.json.",
            f"{printable(file)}, which is not one",
            "Name another --out.",
        ) from error
    for part, fields in described.items():
        for name, value in fields.items():
            if found[part].get(name) != value and name not in ("workers", "keep"):
                raise ConfigError(
                    "A run is gone on with by the settings and the data it began with.",
                    f"{part}.{name}={show(value)}, and {show(found[part].get(name))} in the run",
                    "Give the same, or another --out.",
                )


def check_new(out: Path, resume: bool) -> None:
    """Nothing may lie there but what a run that was killed at once has left."""
    ours = {"environment.json"} if resume else set()
    there = [p.name for p in out.iterdir()] if out.is_dir() else []
    strange = [name for name in there if name not in ours and not (resume and files.ASIDE.fullmatch(name))]
    if strange or (out.exists() and not out.is_dir()):
        do = "Name another." if resume else "Name another, or go on with --resume."
        raise FileError("--out must be a new or empty folder, or a run's.", printable(out), do)


def environment() -> dict[str, Any]:
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }
