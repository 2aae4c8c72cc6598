"""The tensors of a sharded model in a checkpoint: every process writes and reads its own part.

torch's distributed checkpoints (DCP) in safetensors files, without pickles: shard-00001-..., one for each
process. Reading needs neither the same number of processes nor the same way of sharing the model.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.base.errors import FileError
from vitrail.training.parallel import ProcessGroup

_CLOSE_SECONDS = 30.0
SHARDS = "shard-*.safetensors"
Tensors = Mapping[str, Mapping[str, Tensor]]
"""By file and name."""
Seal = Callable[[Path, dict[str, list[Any]]], None]
"""Completes a folder, given the sizes and hashes of the shards in it."""


class ShardWriter:
    """Copies the tensors, then writes them in a thread, while training goes on.

    Its processes exchange messages in a group of their own: those of training have another order.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.ranks = ranks
        self._group = dist.new_group(backend="gloo")
        gpu = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(gpu, False, False, gpu))  # pinned memory, copied at once
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, tensors: Tensors, open_folder: Callable[[], Any], seal: Seal) -> None:
        """Copy the tensors, and write them in the background. All processes must call it.

        Args:
            open_folder: in the main process, the context of a folder that appears when it ends.
            seal: called in the main process when all shards are written.
        """
        self.wait()
        staged = self._stager.stage(flatten(tensors))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._thread = threading.Thread(target=self._run, args=(staged, open_folder, seal), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; raise the error that prevented it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """After an error of the run, give a checkpoint that is being written some time to be completed."""
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self, staged: dict[str, Tensor], open_folder: Callable[[], Any], seal: Seal) -> None:
        try:
            if self.ranks.is_main:
                with open_folder() as folder:
                    seal(folder, self._write(staged, folder))
            else:
                self._write(staged, None)
            dist.barrier(self._group)
        except BaseException as error:  # raised by `wait`, in the thread of the caller
            self._error = error

    def _write(self, staged: dict[str, Tensor], folder: Path | None) -> dict[str, list[Any]]:
        """Write the shards of all processes; in the main one, return their sizes and hashes."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        name = [str(folder)]
        dist.broadcast_object_list(name, group=self._group)
        try:
            with _quiet():
                writer = HuggingFaceStorageWriter(name[0], save_distributed=True)
                save(staged, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:  # a BaseException, with the errors of all processes
            rank, (reason, _) = next(iter(error.failures.items()))
            raise FileError(f"process {rank}: {reason}") from error
        own = Path(name[0]).glob(f"shard-{self.ranks.rank + 1:05d}-*.safetensors")
        parts: list[dict[str, list[Any]]] = [{} for _ in range(self.ranks.count)]
        dist.all_gather_object(parts, {file.name: measure_file(file) for file in own}, group=self._group)
        return {file: measured for part in parts for file, measured in part.items()}


def read_shards(folder: Path, targets: Tensors) -> None:
    """Read the tensors of a checkpoint into those of a run; a process reads what it needs."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _quiet():
        load(flatten(targets), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def flatten(tensors: Tensors) -> dict[str, Tensor]:
    """By names such as model/head.bias and optimizer/exp_avg/head.bias."""
    return {f"{file}/{name}": tensor for file, part in tensors.items() for name, tensor in part.items()}


def measure_file(path: Path) -> list[Any]:
    """Size and hash of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings about its own way of calling itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
