"""Checkpoints of shards are written in the background; here by a group of one process, in this one."""

import json
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vitrail.base.errors import FileError
from vitrail.training import checkpoint as files
from vitrail.training.checkpoint import Checkpoint, CheckpointManager
from vitrail.training.parallel import ProcessGroup

LIMIT = 30  # seconds, for what takes far less


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def weight(mesh):
    return distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])


@pytest.fixture
def held(monkeypatch):
    """Keeps the background from finishing a checkpoint until it is set."""
    event, real = threading.Event(), files._write_files

    def write(*args):
        assert event.wait(LIMIT)
        real(*args)

    monkeypatch.setattr(files, "_write_files", write)
    return event


def state(step, weight):
    sums = {"sums": torch.zeros(1, 4)}
    return Checkpoint(step, {"model": {"w": weight}, "sums": sums}, {"pending": False})


def names(out):
    return [path.name for path in files.list_checkpoints(out / "checkpoints")]


def saved_weight(out):
    found, _ = files.load_newest(out / "checkpoints")
    target = {"model": {"w": torch.zeros(3, 2)}}
    found.copy_into(target)
    return target["model"]["w"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, weight, held):
    """What is saved are the weights at the time of saving, although they change before it is complete."""
    manager = CheckpointManager(tmp_path, 2, ProcessGroup())
    manager.save(state(1, weight))
    weight.to_local().fill_(-1)  # the next step
    assert names(tmp_path) == []  # a folder without a manifest has no name of a checkpoint yet
    held.set()
    manager.wait()
    assert names(tmp_path) == ["step-00000001"]
    assert saved_weight(tmp_path).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_run_that_ends_with_an_error_completes_its_checkpoint(tmp_path, weight, held):
    manager = CheckpointManager(tmp_path, 2, ProcessGroup())
    manager.save(state(1, weight))
    threading.Timer(0.2, held.set).start()
    manager.close()
    assert names(tmp_path) == ["step-00000001"]


def test_the_newest_are_kept_and_the_next_waits_for_the_last(tmp_path, weight):
    manager = CheckpointManager(tmp_path, 2, ProcessGroup())
    for step in range(1, 5):
        weight.to_local().fill_(step)
        manager.save(state(step, weight))
    manager.wait()
    assert names(tmp_path) == ["step-00000004", "step-00000003"]
    assert saved_weight(tmp_path).unique().tolist() == [4]
    assert all(".part" not in path.name for path in (tmp_path / "checkpoints").iterdir())


def test_files_without_pickles_listed_in_the_manifest(tmp_path, weight):
    manager = CheckpointManager(tmp_path, 2, ProcessGroup())
    manager.save(state(1, weight))
    manager.wait()
    folder = tmp_path / "checkpoints" / "step-00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    assert any(name.startswith("shard-00001-") for name in manifest)


def test_an_error_in_the_background_is_raised_and_leaves_the_checkpoint_before(tmp_path, weight, monkeypatch):
    manager = CheckpointManager(tmp_path, 2, ProcessGroup())
    manager.save(state(1, weight))
    manager.wait()

    @contextmanager
    def full(path):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(files, "atomic_folder", full)
    manager.save(state(2, weight))
    with pytest.raises(FileError, match="could not be written: No space left on device"):
        manager.wait()
    manager.wait()  # once
    assert names(tmp_path) == ["step-00000001"]


def test_a_shard_that_cannot_be_written_is_such_an_error(tmp_path, weight, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", fail)
    manager = CheckpointManager(tmp_path, 2, ProcessGroup())
    manager.save(state(1, weight))
    with pytest.raises(FileError, match=r"could not be written: process 0: .*No space left"):
        manager.wait()
    assert not list((tmp_path / "checkpoints").iterdir())
