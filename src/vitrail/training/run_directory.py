"""The run directory: created once, checked on resume, never shared by two runs."""

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
from vitrail.fields import short_repr
from vitrail.io.write import PARTIAL, remove_partial, write_text
from vitrail.recipes.settings import Recipe
from vitrail.training.callbacks import Callback
from vitrail.training.parallel import ProcessGroup

VERSION = 2  # of a run directory; 0.1 wrote none
_MAY_CHANGE = ("workers", "keep")  # settings that do not change the result


def prepare_run_directory(
    out: Path,
    resume: bool,
    recipe: Recipe,
    data: Dataset,
    start: Mapping[str, Any],
    ranks: ProcessGroup,
    callback: Callback,
) -> bool:
    """Create the run directory, or check that it is this run's. True if the run is already finished.

    Args:
        start: whether the run starts from a weight file, and the digest of its teacher.
    """
    config = describe_run(recipe, data, start)
    path = out / "config.json"
    exists = resume and path.exists()
    if exists:
        check_same_run(path, config)
    else:
        _check_empty(out, resume)
    ranks.barrier()  # all processes have checked; now the main one may write
    if resume and ranks.is_main:
        remove_partial(out)
        remove_partial(out / "checkpoints")
    if not exists and ranks.is_main:
        if resume:
            callback.on_message("There is no run to resume; training starts at step 0.")
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "environment.json", json.dumps(environment(), indent=2), overwrite=True)
        write_text(path, json.dumps(config, indent=2), overwrite=True)
    ranks.barrier()
    return exists and (out / "last.safetensors").exists()


def describe_run(recipe: Recipe, data: Dataset, start: Mapping[str, Any]) -> dict[str, Any]:
    """config.json: everything that determines the result of a run."""
    digest = hashlib.sha256("\n".join(data.train.names).encode(errors="surrogatepass"))
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


def check_same_run(path: Path, config: Mapping[str, Any]) -> None:
    """Raise if config.json is of another version, or if any setting differs from it."""
    try:
        saved = json.loads(path.read_text())
        version = saved.get("version") if saved["model"] and saved["train"] else None
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{printable(path)} is not the config.json of a run; choose another --out."
        ) from error
    if version != VERSION:
        writer = "Vitrail 0.1" if version is None else f"another version of Vitrail (format {version})"
        raise FileError(
            f"{printable(path.parent)} was written by {writer}, and this version cannot resume it; its "
            "weights still load, so start a new run from them with --from "
            f"{printable(path.parent / 'last.safetensors')} (or best.safetensors) and another --out."
        )
    parts = {name: saved.get(name) or {} for name in config if name != "version"}
    for name, fields in parts.items():
        for field, value in config[name].items():
            if fields.get(field) != value and field not in _MAY_CHANGE:
                raise ConfigError(
                    f"a run resumes with the settings and the data it started with: {name}.{field} is "
                    f"{short_repr(value)}, but {short_repr(fields.get(field))} in the run. Use the same "
                    "value, or another --out."
                )


def _check_empty(out: Path, resume: bool) -> None:
    """Refuse a folder with anything in it but the traces of a run killed while its folder was created."""
    ours = {"environment.json"} if resume else set()
    names = [p.name for p in out.iterdir()] if out.is_dir() else []
    foreign = [name for name in names if name not in ours and not (resume and PARTIAL.fullmatch(name))]
    if foreign or (out.exists() and not out.is_dir()):
        advice = "choose another folder" if resume else "choose another folder, or resume a run with --resume"
        raise FileError(
            f"--out must be a new or empty folder, or a run's, and {printable(out)} is not; {advice}."
        )


def environment() -> dict[str, Any]:
    """Versions, hardware and the command line, for environment.json."""
    return {
        "vitrail": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }
