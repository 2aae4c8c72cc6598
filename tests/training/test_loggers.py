"""Loggers by name get the rows of metrics.jsonl, continue on resume, and never change or stop a run.

Here csv and tensorboard are real, mlflow and wandb are stand-ins with the calls that we make. The real packages,
which take seconds to import, are in the slow tests at the end.
"""

import csv
import json
import os
import re
import socket
import struct
import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    fingerprints,
    rows,
    stopped_and_resumed,
    train,
)
from vitrail.cli import app


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """A run without loggers."""
    out = tmp_path_factory.mktemp("plain") / "run"
    train(data, out=out, **SETTINGS)
    return fingerprints(out)


def numbers(out):
    """The numbers in metrics.jsonl."""
    return [{k: v for k, v in row.items() if not isinstance(v, str)} for row in rows(out)]


def read_csv(out):
    with (out / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def read_events(out):
    """The scalars that TensorBoard shows, a row for each epoch."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    table = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in table.setdefault(event.step, {}), f"{name} twice"
            table[event.step][name] = event.value
    return [table[epoch] for epoch in sorted(table)]


@pytest.mark.parametrize("at", [7, "evaluate", "save"])
def test_csv_and_tensorboard_continue_when_a_run_is_resumed(data, plain, tmp_path, at):
    out = tmp_path / "run"
    stopped_and_resumed(data, out, at, log="csv,tensorboard", **SETTINGS)
    assert fingerprints(out) == plain
    assert read_csv(out) == numbers(out)
    assert read_events(out) == [pytest.approx(row, rel=1e-6) for row in numbers(out)]


def test_a_logger_that_is_added_on_resume_gets_the_earlier_epochs(data, tmp_path):
    out = tmp_path / "run"
    train(data, out=out, log="csv", **SETTINGS)
    train(out=out, resume=True, epochs=4, log="tensorboard")
    assert [row["epoch"] for row in read_events(out)] == [1, 2, 3, 4]
    assert len(read_csv(out)) == 3


def test_a_logger_that_fails_is_reported_once_and_the_run_goes_on(data, plain, tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    def no_space(*_):
        raise OSError("no space left")

    monkeypatch.setattr(SummaryWriter, "add_scalar", no_space)
    callback = RecordingCallback()
    train(data, out=tmp_path / "run", log=["tensorboard", "csv"], callback=callback, **SETTINGS)
    said = [note for note in callback.notes if "logger" in note]
    assert said == [
        "The logger tensorboard failed and is off from now on: no space left. metrics.jsonl has all rows."
    ]
    assert fingerprints(tmp_path / "run") == plain
    assert len(read_csv(tmp_path / "run")) == 3


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_before_training(data, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    done = CliRunner().invoke(app, ["train", str(data), "--out", str(tmp_path / "run"), "--log", name])
    assert re.search(rf'package {name}, .* pip install "vitrail\[{name}\]"', str(done.exception))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tensorbord", "there is no logger 'tensorbord'. Did you mean 'tensorboard'? Choose from: csv, "),
        ("csv,", "there is no logger ''. Choose from: csv, tensorboard, mlflow, wandb."),
    ],
)
def test_unknown_names(data, tmp_path, value, message):
    done = CliRunner().invoke(app, ["train", str(data), "--out", str(tmp_path / "run"), "--log", value])
    assert message in str(done.exception)
    assert not (tmp_path / "run").exists()


# ---- stand-ins -----------------------------------------------------------------------------------


def test_mlflow_continues_its_run(data, plain, tmp_path, monkeypatch):
    stores = {}  # by address: the metrics of each run

    class MlflowClient:
        def __init__(self, tracking_uri):
            assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
            assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true"
            self.store = stores.setdefault(tracking_uri, {"experiments": [], "runs": {}})

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="1") if name in self.store["experiments"] else None

        def create_experiment(self, name):
            self.store["experiments"].append(name)
            return "1"

        def search_runs(self, experiment_ids, max_results):
            return [SimpleNamespace(info=SimpleNamespace(run_id=one)) for one in self.store["runs"]]

        def create_run(self, experiment_id, run_name):
            assert run_name == "run"
            self.store["runs"]["r1"] = []
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def update_run(self, run_id, status):
            self.store["status"] = status

        def set_terminated(self, run_id):
            self.store["status"] = "FINISHED"

        def get_metric_history(self, run_id, key):
            return [metric for metric in self.store["runs"][run_id] if metric.key == key]

        def log_batch(self, run_id, metrics):
            self.store["runs"][run_id] += metrics

    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient, entities.Metric = MlflowClient, metric
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    out = tmp_path / "run"
    stopped_and_resumed(data, out, "save", log="mlflow", **SETTINGS)
    assert fingerprints(out) == plain
    [(address, store)] = stores.items()
    assert address == (out / "mlruns").as_uri()
    assert store["status"] == "FINISHED"
    logged = store["runs"]["r1"]
    expected = [(row["epoch"], k, v) for row in numbers(out) for k, v in row.items()]
    assert [(metric.step, metric.key, metric.value) for metric in logged] == expected


@pytest.mark.parametrize("mode", [None, "online"])
def test_wandb_is_offline_and_continues_its_run(data, tmp_path, monkeypatch, mode):
    starts, logged = [], []

    def init(**how):
        assert os.environ["WANDB_ERROR_REPORTING"] == "false"
        starts.append(how)
        return SimpleNamespace(log=lambda row, step: logged.append((step, row)), finish=lambda: None)

    wandb = ModuleType("wandb")
    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    out = tmp_path / "run"
    stopped_and_resumed(data, out, 7, log="wandb", **SETTINGS)
    first, second = starts
    assert first == second
    assert (first["mode"], first["dir"], first["resume"]) == (mode or "offline", str(out), "allow")
    assert logged == list(enumerate(numbers(out), start=1))


# ---- the real packages ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_real_mlflow(data, plain, tmp_path, monkeypatch):
    """A file store that MLflow reads: one finished run with all rows, although it was interrupted."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out = tmp_path / "run"
    stopped_and_resumed(data, out, "save", log="mlflow", **SETTINGS)
    assert fingerprints(out) == plain
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(out / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("vitrail").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    for name in numbers(out)[0]:
        history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        assert history == [(row["epoch"], row[name]) for row in numbers(out)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_wandb(data, plain, tmp_path, monkeypatch):
    """Offline: the rows of a run that was interrupted, in files of one run id, and no connection."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        out = tmp_path / "run"
        stopped_and_resumed(data, out, 7, log="wandb", **SETTINGS)
        import wandb

        wandb.teardown()
        proxy.settimeout(1)
        with pytest.raises(TimeoutError):
            proxy.accept()
    assert fingerprints(out) == plain
    files = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # of one run, by two processes
    logged = [row for file in files for row in read_wandb(file)]
    assert [{k: row[k] for k in numbers(out)[0]} for row in logged] == numbers(out)


def read_wandb(file):
    """The rows in a .wandb file: protocol buffers in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # the end of a block is padded
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete, or the last part
            history = Record.FromString(record).history
            if history.item:
                rows.append(
                    {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
                )
            record = b""
    return rows
