"""The device and dtype of a run; an automatic choice states its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.errors import ConfigError, option


@dataclass(frozen=True)
class ComputeDevice:
    """The device that a run computes on, and the dtype of its forward pass."""

    device: torch.device
    dtype: torch.dtype
    reason: str
    """What was chosen and why, for a message."""

    @property
    def precision(self) -> str:
        """The dtype as a word of `TrainConfig.precision`."""
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of sums over an epoch: float64, which MPS does not have."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def residual_bytes(self, residual: str) -> int:
        """Of a number in the residual stream; it is in bf16 only if products are, too."""
        return 2 if residual == "bf16" and self.dtype == torch.bfloat16 else 4

    def current(self) -> torch.cuda.device:
        """Context in which the GPU of the run is torch's current one, for whatever does not name a device."""
        return torch.cuda.device(self.device.index if self.device.type == "cuda" else -1)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context of a forward pass: autocast to the dtype, with attention kernels known to be correct."""
        if self.device.type != "cuda":
            yield
            return
        half = self.dtype != torch.float32
        with self.attention(), torch.autocast("cuda", self.dtype if half else None, enabled=half):
            yield

    @contextmanager
    def attention(self) -> Iterator[None]:
        """The same kernels, for a backward pass, too: a checkpointed block is computed again in it.

        cuDNN's attention, which torch prefers on an H100 or H200, is disabled: its backward gave NaN for
        valid bf16 inputs, at the same step every time, where torch's own kernels gave finite values
        (torch 2.11, cuDNN 9.19, H200; recipe cifar10-small, seed 0, step 1694).
        """
        if self.device.type != "cuda":
            yield
            return
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield


def choose_device(precision: str, local_rank: int = 0, device: str = "auto") -> ComputeDevice:
    """The GPU of this rank if there is one; bf16 where the GPU supports it, fp32 otherwise.

    bf16 and fp16 on a CPU are refused: where the processor only claims to support them, the process would be
    killed without an error.

    Args:
        device: "cpu", "cuda", "cuda:1" or "mps", if it is not to be chosen.
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return _choose_gpu(precision, _gpu_number(device, local_rank))
    if precision in ("bf16", "fp16"):
        slow = "on a CPU it is slow or kills the process"
        where = "on MPS only fp32 is supported" if device == "mps" else slow
        raise ConfigError(
            f"precision={precision!r} needs a GPU of NVIDIA or AMD; {where}. Use precision fp32 or auto."
        )
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(
                f"{option('device', 'mps')} needs a Mac with MPS, and torch finds none; use "
                f"{option('device', 'cpu')}."
            )
        return ComputeDevice(torch.device("mps"), torch.float32, "MPS, fp32, which is not tested")
    why = "there is no GPU" if precision == "auto" and device == "auto" else "as requested"
    return ComputeDevice(torch.device("cpu"), torch.float32, f"the CPU, fp32: {why}")


def _gpu_number(device: str, local_rank: int) -> int:
    """The number of a GPU that exists; each process of torchrun has its own."""
    _, colon, number = device.partition(":")
    index, count = int(number) if colon else local_rank, torch.cuda.device_count()
    if not torch.cuda.is_available() or index >= count:
        there = f"there {'is' if count == 1 else 'are'} {count}" if count else "torch finds none"
        raise ConfigError(
            f"{option('device', device)} needs GPU {index}, and {there}; use {option('device', 'cpu')}, or "
            "remove it."
        )
    return index


def _choose_gpu(precision: str, index: int) -> ComputeDevice:
    device = torch.device("cuda", index)
    name = torch.cuda.get_device_name(device)
    if precision in ("fp32", "fp16"):
        dtype = torch.float32 if precision == "fp32" else torch.float16
        return ComputeDevice(device, dtype, f"{name}, {precision} as requested")
    with torch.cuda.device(device):
        supported = torch.cuda.is_bf16_supported(including_emulation=False)  # emulated, it is slow
    if supported:
        return ComputeDevice(device, torch.bfloat16, f"{name}, bf16")
    if precision == "bf16":
        raise ConfigError(f"precision='bf16' needs a GPU that supports it, and {name} does not; use fp16.")
    return ComputeDevice(
        device, torch.float32, f"{name}, fp32: it does not support bf16; precision=fp16 may be faster"
    )


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of a GPU, as `torch.manual_seed` does.

    That function also keeps, for every kind of device that is not there, its stack and a call for later: half
    a millisecond in every step, and memory that only grows.
    """
    seed &= 2**63 - 1
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
