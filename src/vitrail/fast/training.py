"""How a model is executed in training: `prepare` builds an executable beside it that trains its parameters.

    executable = prepare(model, Execution(kernels=True, bf16_residual=True))
    executable(images)                                     # model(images) and its gradients, to rounding

The executable computes with a twin of the model (`vitrail.fast.twin`), in which parts are replaced by faster
ones. The model itself stays the paper's: EMA, evaluation, `vt.record` and callbacks hold it. While something
watches its activations, it computes the steps itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import InputError
from vitrail.fast.draws import Rows, draw_for_all
from vitrail.fast.lora import plain_state
from vitrail.fast.shards import Parallelism
from vitrail.fast.twin import share_parameters
from vitrail.fast.variants import shorten_last_block, use_bf16_residual, use_fused_kernels
from vitrail.model import ViT


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a training step computes a model. Nothing here changes what is learned, but for rounding."""

    trained: ViT | None = None
    """A twin of the model with LoRA, whose parameters are trained instead of the model's."""
    rows: Rows | None = None
    """Which rows of every random number drawn for all processes are this one's; None to draw for itself."""
    around: Callable[[ViT], nn.Module] | None = None
    """A module to put around the model, such as one that returns two logits."""
    parallel: Parallelism = Parallelism()
    dtype: torch.dtype = torch.float32
    """Of products; weights of shards are gathered in it."""


class Executable:
    """The forward pass of a model in training. Call it as the model.

    Attributes:
        model: the paper's, which holds the parameters; never changed.
        trained: the same, or its twin with LoRA.
        twin: computes with the parameters.
    """

    def __init__(self, model: ViT, execution: Execution) -> None:
        self.model, self.execution, self.parallel = model, execution, execution.parallel
        self.trained = execution.trained or model
        self.say: Callable[[str], None] = lambda text: None
        """Called with what a user should know."""
        self.twin = share_parameters(self.trained)
        self.chosen = ["short last block"] if shorten_last_block(self.twin) else []
        """What was done to the twin, in words."""
        if execution.rows is not None:
            draw_for_all(self.twin, execution.rows)
            self.chosen.append("dropout drawn for all processes")
        self.plain = self._around(model)
        root = self._around(self.twin)
        if self.parallel.sharded:
            self.parallel.cut(self.trained, self.twin, root, execution.dtype)
        self.wrapped = self.parallel.wrap(root)
        self.compiled: Any = self.wrapped
        self._modules, self._told = list(model.modules()), False

    def use(
        self, *, kernels: bool = False, compiled: bool = False, bf16_residual: bool = False, recomputed: int = 0
    ) -> None:
        """Choose faster parts for the twin, once, before the first step.

        Args:
            kernels: fused Triton kernels, in bf16 on a GPU.
            bf16_residual: whether tokens between blocks are in bf16.
            recomputed: blocks of which the backward pass computes the activations again, to save memory.
        """
        self.twin.checkpointed_blocks = recomputed
        if bf16_residual:
            use_bf16_residual(self.twin)
        if kernels:
            use_fused_kernels(self.twin, compiled=compiled)
        if compiled:
            self.compiled = self.parallel.compile(self.wrapped, self.twin)
        words = {
            "residual stream in bf16": bf16_residual,
            "fused kernels": kernels,
            "compiled": compiled,
            f"{recomputed} blocks recomputed": recomputed,
        }
        self.chosen += [name for name, used in words.items() if used]

    def __call__(self, images: Any) -> Any:
        """Logits (B, K), or what the module around the model returns."""
        return self.plain(images) if self.watched else self.compiled(images)

    def train(self, encoder: bool = True) -> None:
        """Set training mode; with `encoder` False only that of the head, as for a frozen encoder."""
        for model in (self.twin, self.model) if self.watched else (self.twin,):
            model.train(encoder).head.train()

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch: processes exchange gradients with the last one."""
        return self.parallel.accumulate(self.wrapped, last)

    @property
    def watched(self) -> bool:
        """Whether activations of the model are recorded or edited, so that it must compute the step itself."""
        if not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in self._modules):
            return False
        lora = self.trained is not self.model
        if self.parallel.mode != "one" or lora:
            what = "LoRA" if lora else "several processes"
            raise InputError(
                f"Activations of a training step with {what} cannot be recorded or edited, because another "
                "module computes it; record them of the trained model, after the epoch."
            )
        if not self._told:
            self.say("Activations are recorded or edited, so steps are computed by the plain model meanwhile.")
            self._told = True
        return True

    def merge_lora(self) -> None:
        """Write the sums of weights and updates into the model. All processes must call it."""
        if self.trained is not self.model:
            self.model.load_state_dict(plain_state(self.trained))

    def _around(self, model: ViT) -> nn.Module:
        return model if self.execution.around is None else self.execution.around(model)


def prepare(model: ViT, execution: Execution | None = None) -> Executable:
    """Build an executable that trains the parameters of a model on its device; the model is not changed."""
    return Executable(model, execution or Execution())
