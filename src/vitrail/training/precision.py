"""Which device, which dtype, and why: an automatic choice gives its reason."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from vitrail.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Where a run computes, and in what."""

    device: torch.device
    dtype: torch.dtype
    reason: str

    def autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def choose_machine(precision: str, local_rank: int = 0) -> Machine:
    """The first GPU if there is one; bf16 where the GPU computes in it, fp32 everywhere else.

    bf16 on a CPU is refused: where the processor only claims to have it, the process would die
    without a word.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        name = torch.cuda.get_device_name(device)
        if precision == "fp32":
            return Machine(device, torch.float32, f"{name}, fp32 as asked")
        if torch.cuda.is_bf16_supported():
            return Machine(device, torch.bfloat16, f"{name}, which computes in bf16")
        if precision == "bf16":
            raise ConfigError("bf16 needs a GPU that has it.", name, "Use precision fp32.")
        return Machine(device, torch.float32, f"{name}, which has no bf16")
    if precision == "bf16":
        raise ConfigError(
            "bf16 needs a GPU.", "a CPU, where it is slow or ends the process", "Use precision fp32 or auto."
        )
    why = "there is no GPU" if precision == "auto" else "as asked"
    return Machine(torch.device("cpu"), torch.float32, f"{torch.get_num_threads()} CPU threads, fp32: {why}")
