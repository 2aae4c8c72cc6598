"""A run's folder: made once, known again, and never another run's."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__
from vitrail.errors import ConfigError, FileError, printable
from vitrail.fields import show
from vitrail.training import checkpoint as files
from vitrail.training.listen import Listener
from vitrail.training.parallel import Ranks
from vitrail.training.settings import Recipe


def prepare(out: Path, resume: bool, chosen: Recipe, ranks: Ranks, say: Listener) -> bool:
    """Make the run's folder, or check that it is this run's; True where the run is finished already."""
    described: dict[str, Any] = {
        "model": asdict(chosen.model),
        "train": asdict(chosen.train),
        "preprocess": asdict(chosen.preprocess),
    }
    described = json.loads(json.dumps(described))
    file = out / "config.json"
    if resume and file.exists():
        known = json.loads(file.read_text())
        for part, fields in described.items():
            for name, value in fields.items():
                if known.get(part, {}).get(name) != value and name not in ("workers", "keep"):
                    raise ConfigError(
                        "A run is gone on with by the settings it began with.",
                        f"{part}.{name}={show(value)}, and {show(known.get(part, {}).get(name))} in the run",
                        "Give the same settings, or another --out.",
                    )
        return (out / "last.safetensors").exists()
    if resume:
        say.note("There is no run to go on with: it starts at step 0.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not resume:
        raise FileError(
            "--out must be a new or empty folder.", printable(out), "Name another, or go on with --resume."
        )
    if ranks.first:
        out.mkdir(parents=True, exist_ok=True)
        files.write_text(out / "environment.json", json.dumps(environment(), indent=2))
        files.write_text(file, json.dumps(described, indent=2))
    ranks.wait()
    return False


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
