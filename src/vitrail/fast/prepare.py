"""The one way to execute a model: `prepare(model, execution)` returns an executable beside it.

    prepare(model, InferenceExecution("int8", calibrate=images))     # vt.accelerate(model, "int8", ...)
    prepare(model, TrainingExecution())                              # what a step of vt.train computes

Nothing else replaces parts of a model. It holds the parameters, stays the paper's, and is what users, EMA,
evaluation and taps hold.
"""

from __future__ import annotations

from typing import overload

from vitrail.base.errors import InputError
from vitrail.base.fields import short_repr
from vitrail.fast.accelerate import InferenceExecution, accelerate_as
from vitrail.fast.executable import Executable
from vitrail.fast.inference_routes import Accelerated
from vitrail.fast.training import TrainingExecutable, TrainingExecution
from vitrail.model import ViT


@overload
def prepare(model: ViT, execution: TrainingExecution) -> TrainingExecutable: ...
@overload
def prepare(model: ViT, execution: InferenceExecution) -> Accelerated: ...


def prepare(model: ViT, execution: TrainingExecution | InferenceExecution) -> Executable:
    """Build what computes a model on its device in this way; the model is not changed."""
    match execution:
        case TrainingExecution():
            return TrainingExecutable(model, execution)
        case InferenceExecution():
            return accelerate_as(model, execution)
    raise InputError(
        f"execution must be a TrainingExecution or an InferenceExecution, not {short_repr(execution)}."
    )
