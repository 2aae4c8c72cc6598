"""Which device, which dtype, and why: an automatic choice gives its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Where a run computes, and in what."""

    device: torch.device
    dtype: torch.dtype
    reason: str

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Where the model runs forward: in the machine's dtype, with kernels that can be trusted.

        cuDNN's attention, which torch prefers on an H100 or H200, is left out: its backward gave NaN
        for sound bf16 inputs, again and again in the same step, where torch's own kernels gave
        numbers (torch 2.11, cuDNN 9.19, H200; recipe cifar10-small, seed 0, step 1694).
        """
        if self.device.type != "cuda":
            yield
            return
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        half = self.dtype != torch.float32
        with sdpa_kernel(kernels), torch.autocast("cuda", self.dtype if half else None, enabled=half):
            yield


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
    threads = torch.get_num_threads()
    many = f"{threads} CPU threads" if threads > 1 else "one CPU thread"
    return Machine(torch.device("cpu"), torch.float32, f"{many}, fp32: {why}")
