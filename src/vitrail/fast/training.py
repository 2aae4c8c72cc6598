"""How a model is executed in training: by a twin with the same parameters, in which parts are replaced.

    executable = prepare(model, TrainingExecution())
    executable(images)                                     # model(images) and its gradients, to rounding

Order matters, and is: LoRA, short last block, dropout drawn for all processes, shards or copies; then, when
the cost of a step is known, bf16 residual stream, fused kernels, and compilation of what came before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitrail.fast.executable import Executable, share_parameters
from vitrail.fast.lora import plain_state
from vitrail.fast.parallelism import Parallelism
from vitrail.fast.variants import (
    Rows,
    draw_for_all,
    shorten_last_block,
    use_bf16_residual,
    use_fused_kernels,
)
from vitrail.model import ViT


@dataclass(frozen=True, kw_only=True)
class TrainingExecution:
    """How a training step computes a model. Nothing here changes its numbers, except for rounding."""

    trained: ViT | None = None
    """A twin of the model with LoRA, whose parameters are trained instead of the model's."""
    rows: Rows | None = None
    """Which rows of every random number drawn for all processes are this one's; None to draw for itself."""
    around: Callable[[ViT], nn.Module] | None = None
    """Puts a module around the model, such as one that returns two logits."""
    parallel: Parallelism = field(default_factory=Parallelism)
    dtype: torch.dtype = torch.float32
    """The dtype of products; weights of shards are gathered in it."""


class TrainingExecutable(Executable):
    """The forward pass of a model in training. Call it as the model.

    Attributes:
        trained: what holds the parameters that are trained: the model, or its twin with LoRA.
        twin: computes with them.
        chosen: what was replaced in the twin, in words for the plan.
    """

    def __init__(self, model: ViT, execution: TrainingExecution) -> None:
        super().__init__(model)
        self.parallel, self.trained = execution.parallel, execution.trained or model
        self.twin = share_parameters(self.trained)
        self.chosen = ["short last block"] if shorten_last_block(self.twin) else []
        if execution.rows is not None:
            draw_for_all(self.twin, execution.rows)
            self.chosen.append("dropout drawn for all processes")
        around = execution.around
        self.plain, root = (one if around is None else around(one) for one in (model, self.twin))
        if self.parallel.sharded:
            self.parallel.cut(self.trained, self.twin, root, execution.dtype)
        self.wrapped = self.parallel.wrap(root)
        self.compiled: Any = self.wrapped

    def use(
        self,
        *,
        kernels: bool = False,
        compiled: bool = False,
        bf16_residual: bool = False,
        recomputed: int = 0,
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
        words = {"residual stream in bf16": bf16_residual, f"{recomputed} blocks recomputed": recomputed}
        self.chosen += [name for name, used in words.items() if used]

    def forward(self, images: Any) -> Any:
        """Logits (B, K), or what the module around the model returns."""
        return self.plain(images) if self.watched else self.compiled(images)

    def set_mode(self, encoder: bool = True) -> None:
        """Set training mode; with `encoder` False only that of the head, as for a frozen encoder."""
        for model in (self.twin, self.model) if self.watched else (self.twin,):
            model.train(encoder).head.train()

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch: processes exchange gradients with the last one."""
        return self.parallel.accumulate(self.wrapped, last)

    def why_not_watched(self) -> str | None:
        if self.trained is not self.model:
            return "a training step with LoRA"
        return None if self.parallel.mode == "one" else "a training step of several processes"

    def merge_lora(self) -> None:
        """Write the sums of weights and updates into the model. All processes must call it."""
        if self.trained is not self.model:
            self.model.load_state_dict(plain_state(self.trained))
