"""Options that several commands share, written once: a frozen dataclass with a field for each option.

    @options
    class SpeedOptions:
        precision: str | None = Option(None, help="Accelerate the model.")

    def predict(model: str, speed: SpeedOptions) -> None: ...

The command that `flatten(predict)` returns has --precision; `predict` gets it as `speed.precision`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, TypeVar, dataclass_transform, get_type_hints

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(cls: type[T]) -> type[T]:
    """Make a frozen dataclass of a class whose fields are declared by `typer.Option`."""
    for name in vars(cls).get("__annotations__", {}):
        declared = vars(cls)[name]
        setattr(cls, name, field(default=declared.default, metadata={"option": declared}))
    return dataclass(frozen=True, kw_only=True)(cls)


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass of options by the fields of the dataclass, for typer."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group
        types = get_type_hints(group)
        parameters += [
            Parameter(
                one.name, Parameter.KEYWORD_ONLY, default=one.metadata["option"], annotation=types[one.name]
            )
            for one in fields(group)
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
