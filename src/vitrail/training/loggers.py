"""Loggers by name (`--log csv,tensorboard`): each gets the numbers of every row of metrics.jsonl.

A logger continues its series when a run is resumed, and one that is added then gets the earlier rows too. It
never stops or changes a run: one that fails is reported once and switched off.
"""

from __future__ import annotations

import csv
import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from vitrail.base.errors import printable, require_extra
from vitrail.base.safe_files import write_text
from vitrail.base.telemetry import disable_telemetry
from vitrail.training.callbacks import Callback

Row = Mapping[str, Any]


class Logger(Protocol):
    """Made when training starts, with the run directory and the rows so far."""

    def log(self, history: Sequence[Row]) -> None:
        """The last row of the history is new."""

    def close(self) -> None: ...


def check_loggers(names: Sequence[str]) -> None:
    """Check that the packages of these loggers are installed."""
    disable_telemetry()
    packages = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
    for name in (name for name in names if name in packages):
        with require_extra(name):
            import_module(packages[name])


class Loggers:
    """The loggers of a run; none of their errors gets out."""

    def __init__(self, names: Sequence[str], out: Path, history: Sequence[Row], callback: Callback) -> None:
        self._callback = callback
        self._open: dict[str, Logger] = {}
        for name in names:
            with self._reported(name):
                self._open[name] = _KINDS[name](out, history)

    def log(self, history: Sequence[Row]) -> None:
        for name, logger in list(self._open.items()):
            with self._reported(name):
                logger.log(history)

    def close(self) -> None:
        for name, logger in list(self._open.items()):
            with self._reported(name):
                logger.close()

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Switch off a logger that fails, and say so."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = printable(str(error) or type(error).__name__).rstrip(".")
            self._callback.on_message(
                f"The logger {name} failed and is off from now on: {reason}. metrics.jsonl has all rows."
            )


def _numbers(row: Row) -> dict[str, int | float]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def _timestamp(row: Row) -> float:
    """When the epoch ended, in seconds since 1970."""
    return datetime.fromisoformat(row["time"]).timestamp()


class CsvLogger:
    """metrics.csv, written anew after every epoch."""

    def __init__(self, out: Path, history: Sequence[Row]) -> None:
        self._path = out / "metrics.csv"
        if history:
            self.log(history)

    def log(self, history: Sequence[Row]) -> None:
        rows = [_numbers(row) for row in history]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._path, text.getvalue(), overwrite=True)

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files in tensorboard/, with epochs as steps."""

    def __init__(self, out: Path, history: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The rows so far replace what an earlier process has written, which may be ahead of its checkpoint.
        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=0)
        for end in range(1, len(history) + 1):
            self.log(history[:end])

    def log(self, history: Sequence[Row]) -> None:
        row = history[-1]
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["epoch"], _timestamp(row))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MlflowLogger:
    """One MLflow run in the file store mlruns/, which holds no other."""

    def __init__(self, out: Path, history: Sequence[Row]) -> None:
        # MLflow 3 asks for a database instead; files make a run directory complete in itself.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=(out / "mlruns").absolute().as_uri())
        found = self._client.get_experiment_by_name("vitrail")
        experiment = found.experiment_id if found else self._client.create_experiment("vitrail")
        runs = self._client.search_runs([experiment], max_results=1)
        run = runs[0] if runs else self._client.create_run(experiment, run_name=out.absolute().name)
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        logged = (
            {metric.step for metric in self._client.get_metric_history(self._id, "epoch")} if runs else ()
        )
        for end in (end for end, row in enumerate(history, start=1) if row["epoch"] not in logged):
            self.log(history[:end])

    def log(self, history: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        row = history[-1]
        milliseconds = int(1000 * _timestamp(row))
        metrics = [Metric(name, value, milliseconds, row["epoch"]) for name, value in _numbers(row).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class WandbLogger:
    """A run in wandb/; offline, unless the user has set WANDB_MODE."""

    def __init__(self, out: Path, history: Sequence[Row]) -> None:
        import wandb

        self._state = out / "wandb" / "vitrail.json"
        saved: dict[str, Any] = {"id": secrets.token_hex(4), "epoch": 0}
        with suppress(OSError, ValueError):
            saved |= json.loads(self._state.read_text())
        self._id = str(saved["id"])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vitrail"),
            name=out.absolute().name,
            dir=str(out),
            id=self._id,
            resume="allow",
            mode=cast(Any, os.environ.get("WANDB_MODE", "offline")),  # checked by wandb
        )
        for end in (end for end, row in enumerate(history, start=1) if row["epoch"] > saved["epoch"]):
            self.log(history[:end])

    def log(self, history: Sequence[Row]) -> None:
        row = history[-1]
        self._run.log(_numbers(row), step=row["epoch"])
        self._state.parent.mkdir(exist_ok=True)
        write_text(self._state, json.dumps({"id": self._id, "epoch": row["epoch"]}), overwrite=True)

    def close(self) -> None:
        self._run.finish()


_KINDS: dict[str, type[Any]] = {
    "csv": CsvLogger,
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
}
