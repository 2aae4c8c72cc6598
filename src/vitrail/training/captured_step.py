"""A training step captured as one CUDA graph: the CPU launches it once, and not each of its kernels.

For small models a step takes as long as its launches: some thousand kernels of a few microseconds. Whatever
changes from step to step is then a tensor that the graph reads: the images, the learning rate, the epoch and
the weight of the EMA (`StepValues`). Dropout is a function of the step here too: a replay reads the seed of
torch's generator, which the trainer sets before every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.base.machine import is_out_of_memory
from vitrail.images.loader import Batch

WARM_UP = 3
"""Steps before a capture: they compile, allocate the optimizer's state and choose kernels."""


@dataclass(frozen=True)
class StepValues:
    """The numbers that change from step to step; tensors on the device while a step is captured."""

    lr: float | Tensor
    epoch: int | Tensor
    ema_weight: float | Tensor


class CaptureError(Exception):
    """A step could not be captured; the message is the reason."""


class CapturedStep:
    """A step that is computed as it is for `WARM_UP` steps, then captured, then replayed.

    Args:
        compute: computes a step on its micro-batches; returns a tensor. It must launch the same kernels for
            every step, and read no tensor back to the CPU.
        bind: called with the values as tensors before `compute`, which reads them.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Batch]], Tensor],
        bind: Callable[[StepValues], None],
        device: torch.device,
    ) -> None:
        self.compute, self.bind, self.device = compute, bind, device
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device)
        self.numbers = torch.zeros(3, dtype=torch.float64, device=device)
        self.parts: list[Batch] = []
        self.result = torch.zeros((), device=device)

    def __call__(self, parts: Sequence[Batch], values: StepValues) -> Tensor:
        """Take a step."""
        with torch.cuda.device(self.device):
            numbers = torch.tensor([values.lr, values.epoch, values.ema_weight], dtype=torch.float64)
            self.numbers.copy_(numbers, non_blocking=True)
            if self.graph is None and self.taken < WARM_UP:
                self.taken += 1
                # On the stream of the capture, so that what the step allocates belongs to that stream.
                self.stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self.stream):
                    self._bind()
                    result = self.compute(parts)
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
                return result
            if self.graph is None:
                self.parts = [part.to(self.device).clone() for part in parts]
                self.graph = self._capture()
            else:
                for static, part in zip(self.parts, parts, strict=True):
                    static.copy_(part)
            self.graph.replay()
            return self.result.clone()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record the kernels of a step; none of them runs yet."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile: the loader's pins memory.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._bind()
                self.result = self.compute(self.parts)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())  # the old one waits for the capture's end
            raise CaptureError(str(error).partition("\n")[0]) from error
        return graph

    def _bind(self) -> None:
        """Bind tensors, so that torch.compile does not specialize on values."""
        lr, epoch, weight = self.numbers.unbind()
        self.bind(StepValues(lr.float(), epoch.long(), weight.float()))
