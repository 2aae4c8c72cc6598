"""Where and how a model runs: its device, the dtype of a run, and evaluation mode.

An automatic choice states its reason.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.base.errors import ConfigError, DeviceWarning, option, printable
from vitrail.base.fields import short_repr
from vitrail.base.machine import format_bytes

_SPARE = 256 << 20
"""Bytes of a GPU that must be free beside the model: the activations of an image, and what libraries take."""
_TENSOR_CORES = (7, 0)
"""The compute capability from which products in fp16 are faster than in fp32."""


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
        """Bytes of a number in the residual stream, which is in bf16 only if products are."""
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
        """SDPA backends allowed in training, also in the backward pass, which runs checkpointed blocks again.

        cuDNN's attention, which torch prefers on an H100 or H200, is disabled: its backward gave NaN for
        valid bf16 inputs, at the same step every time, where torch's own kernels gave finite values
        (torch 2.11, cuDNN 9.19, H200; recipe cifar10-small, seed 0, step 1694).
        """
        if self.device.type != "cuda":
            yield
            return
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield


def choose_device(
    precision: str = "auto", local_rank: int | None = None, device: str = "auto"
) -> ComputeDevice:
    """Choose where a run trains, and its dtype: bf16 on a GPU, fp16 on older ones, fp32 on a CPU.

    bf16 and fp16 on a CPU are refused: where the processor only claims to support them, the process would be
    killed without an error.

    Args:
        local_rank, device: as in `find_device`.
    """
    half = precision in ("bf16", "fp16")
    if half and device == "mps":
        found, problem = torch.device("mps"), ""
    else:
        found, problem = find_device(device, local_rank)
    if found.type == "cuda":
        return _choose_dtype(precision, found)
    if half:
        slow = problem or "on a CPU it is slow or kills the process"
        where = "on MPS only fp32 is supported" if found.type == "mps" else slow
        raise ConfigError(
            f"precision={precision!r} needs a GPU of NVIDIA or AMD; {where}. Use precision fp32 or auto."
        )
    if found.type == "mps":
        return ComputeDevice(found, torch.float32, "MPS, fp32, which is not tested")
    why = problem or ("there is no GPU" if precision == "auto" and device == "auto" else "as requested")
    return ComputeDevice(found, torch.float32, f"the CPU, fp32: {why}")


def _choose_dtype(precision: str, device: torch.device) -> ComputeDevice:
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
    if torch.cuda.get_device_capability(device) < _TENSOR_CORES:
        why = "it supports no bf16, and has no tensor cores for fp16"
        return ComputeDevice(device, torch.float32, f"{name}, fp32: {why}")
    return ComputeDevice(device, torch.float16, f"{name}, fp16 with loss scaling: it does not support bf16")


# ---- the device -----------------------------------------------------------------------------


def find_device(
    device: str | torch.device = "auto", local_rank: int | None = None, needed: int = 0
) -> tuple[torch.device, str]:
    """The device to compute on; and if that is the CPU although there is a GPU, why.

    "auto" is this process's GPU if it computes and has enough free memory, and the CPU otherwise. Any other
    device is obeyed, and is an error if it cannot be used.

    Args:
        local_rank: the number of the GPU where none is given; that of torchrun by default.
        needed: bytes that a model takes there.
    """
    device = str(device)
    number = int(os.environ.get("LOCAL_RANK", 0)) if local_rank is None else local_rank
    if device == "auto":
        return _find_gpu(number, needed)
    if device.startswith("cuda"):
        found = torch.device("cuda", _gpu_number(device, number))
        if problem := _try_gpu(found, 0):
            raise ConfigError(f"{option('device', device)} cannot be used: {problem}. {_instead()}")
        return found, ""
    if device == "mps":
        if torch.backends.mps.is_available():
            return torch.device("mps"), ""
        raise ConfigError(
            f"{option('device', 'mps')} needs a Mac with MPS, and torch finds none; use "
            f"{option('device', 'cpu')}."
        )
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {short_repr(device)} is not available; use auto, cpu, cuda or cuda:1. torch: "
            f"{_first_line(error)}"
        ) from error
    return found, ""


def place(model: nn.Module, device: str | torch.device = "auto") -> None:
    """Move a model to the device that is chosen for it; a GPU that cannot be used is a DeviceWarning."""
    needed = 6 * sum(parameter.numel() for parameter in model.parameters())  # in fp32, and a copy in bf16
    found, problem = find_device(device, needed=needed)
    if problem:
        warnings.warn(f"Computing on the CPU: {problem}.", DeviceWarning, stacklevel=3)
    model.to(found)


def _find_gpu(number: int, needed: int) -> tuple[torch.device, str]:
    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        return cpu, _why_no_gpu()
    found = torch.device("cuda", _gpu_number("cuda", number))
    problem = _try_gpu(found, needed + _SPARE)
    if not problem:
        return found, ""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # the other processes would wait for this one's GPU
        raise ConfigError(f"The GPU of process {number} cannot be used: {problem}. {_instead()}")
    return cpu, problem


def _instead() -> str:
    return f"Free it, choose another, or use {option('device', 'cpu')}."


def _gpu_number(device: str, local_rank: int) -> int:
    """The number of a GPU that exists; each process of torchrun has its own."""
    _, colon, number = device.partition(":")
    index = int(number) if colon and number.isdecimal() else local_rank
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or index >= count:
        there = f"there {'is' if count == 1 else 'are'} {count}" if count else "torch finds none"
        why = _why_no_gpu()
        raise ConfigError(
            f"{option('device', device)} needs GPU {index}, and {there}{why and f' ({why})'}; use "
            f"{option('device', 'cpu')}, or remove it."
        )
    return index


def _try_gpu(device: torch.device, needed: int) -> str:
    """Why a GPU cannot be used: it does not compute, or has too little free memory; empty if it can."""
    try:
        torch.ones(8, device=device).sum().item()
        name, (free, _) = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except (RuntimeError, AssertionError) as error:  # a driver, a kernel that is not there, no memory at all
        return f"{device} does not compute ({_first_line(error)})"
    if free >= needed:
        return ""
    return f"{name} has {format_bytes(free)} of free memory, and {format_bytes(needed)} are needed"


def _why_no_gpu() -> str:
    """Why torch finds no GPU although there may be one; empty if there is simply none."""
    if torch.cuda.is_available() or not torch.backends.cuda.is_built():
        return ""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={printable(hidden)!r} leaves no GPU"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = _first_line(error)
        none = any(words in reason for words in ("No CUDA GPUs", "Found no NVIDIA driver"))
        return "" if none else f"the GPU does not work ({reason})"
    return ""


def _first_line(error: BaseException) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0].rstrip("."), 200)


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


# ---- evaluation mode ------------------------------------------------------------------------

_modes_lock = threading.Lock()
_entered: dict[nn.Module, tuple[int, bool]] = {}
"""How many `eval_mode` blocks each module is in now, and its own mode from before the first of them."""


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each submodule's own mode is restored afterwards.

    The mode is a flag of the module, which all threads see: the first of them to enter sets it, the last one
    to leave restores it. So a model that is being trained may be evaluated between two steps, by several
    threads too, but must not take a step in one thread while another evaluates it.
    """
    modules = list(model.modules())
    try:
        with _modes_lock:
            before = [_entered.get(module, (0, module.training)) for module in modules]
            for module, (count, own) in zip(modules, before, strict=True):
                _entered[module] = count + 1, own
            if any(module.training for module in modules):
                model.eval()
        with torch.no_grad():
            yield
    finally:
        with _modes_lock:
            for module in modules:
                count, own = _entered.pop(module, (0, module.training))  # none if interrupted above
                if count > 1:
                    _entered[module] = count - 1, own
                elif module.training != own:
                    module.training = own
