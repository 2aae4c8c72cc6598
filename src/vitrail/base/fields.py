"""Config fields: each is declared with its documentation and its check.

    width: int = integer("D, the length of every token vector")
    pool: Literal["class", "mean"] = choice("How tokens become one vector", default="class")

A check returns the user's value in canonical form, or raises a ConfigError.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from vitrail.base.errors import ConfigError, setting, suggest

_MAX_NUMBER = 10**12  # for any single number

# The names of our fields in other libraries, for error messages.
FOREIGN_NAMES = {
    "num_classes": "classes",
    "num_labels": "classes",
    **dict.fromkeys(("img_size", "image_size", "input_size"), "size"),
    "patch_size": "patch",
    **dict.fromkeys(("embed_dim", "hidden_size", "hidden_dim", "dim"), "width"),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "n_layers"), "depth"),
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_heads"), "heads"),
    "dim_head": "head_width",
    **dict.fromkeys(("mlp_dim", "intermediate_size"), "mlp_width"),
    **dict.fromkeys(("in_chans", "in_channels", "num_channels"), "channels"),
    **dict.fromkeys(("reg_tokens", "num_register_tokens"), "registers"),
    "global_pool": "pool",
    "drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout",
    "patch_drop_rate": "patch_dropout",
    "drop_path_rate": "drop_path",
    "init_values": "layer_scale",
    **dict.fromkeys(("layer_norm_eps", "norm_eps"), "eps"),
    **dict.fromkeys(("hidden_act", "act_layer"), "activation"),
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "batch"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulate"),
    **dict.fromkeys(("label_smoothing", "label_smoothing_factor"), "smoothing"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip_grad"), "clip"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps", "warmup_epochs"), "warmup"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "workers"),
    **dict.fromkeys(("min_lr", "lr_min", "end_lr"), "last_lr"),
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler", "lr_scheduler_type"), "schedule"),
    **dict.fromkeys(("opt", "optim"), "optimizer"),
    **dict.fromkeys(("ema_decay", "model_ema", "model_ema_decay"), "ema"),
    **dict.fromkeys(("amp", "amp_dtype", "mixed_precision", "fp16", "bf16"), "precision"),
    **dict.fromkeys(("torchcompile", "torch_compile"), "compile"),
    **dict.fromkeys(("lora_r", "rank"), "lora_rank"),
    **dict.fromkeys(("save_total_limit", "checkpoint_hist"), "keep"),
    **dict.fromkeys(("hflip", "horizontal_flip"), "flip"),
    **dict.fromkeys(("color_jitter",), "brightness"),
    **dict.fromkeys(("reprob", "random_erasing", "random_erase"), "erase"),
    **dict.fromkeys(("aa", "auto_augment", "randaugment"), "policy"),
    "mixup_alpha": "mixup",
    "cutmix_alpha": "cutmix",
}

T = TypeVar("T")
Check = Callable[[str, Any, Any], Any]  # (name, value, type hint) -> the value in its canonical form


class Config:
    """Base class of configs: frozen dataclasses that check their fields on construction."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        names, required = _field_names(cls)  # type: ignore[arg-type]
        for name in values:
            if name not in names:
                raise ConfigError(unknown_field(cls.__name__, name, names))
        if values and not required <= values.keys():  # copy and pickle call this without any
            missing = [name for name in names if name in required and name not in values]
            raise ConfigError(
                f"{cls.__name__} needs {', '.join(n for n in names if n in required)}, but got no "
                f"{', '.join(missing)}; pass it by keyword, or start from a preset."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = type_hints(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None or field.default is not None:  # None only where it is the default
                self._set(field.name, field.metadata["check"](field.name, value, hints[field.name]))

    def _set(self, name: str, value: Any) -> None:
        """Set a field despite `frozen`; for __post_init__ only."""
        object.__setattr__(self, name, value)


@cache
def _field_names(cls: type) -> tuple[list[str], set[str]]:
    """The names of all fields, and of those without a default."""
    fields = dataclasses.fields(cls)
    return [one.name for one in fields], {one.name for one in fields if one.default is dataclasses.MISSING}


def unknown_field(owner: str, name: str, names: list[str]) -> str:
    """The message for a keyword that is not a field of `owner`."""
    ours = FOREIGN_NAMES.get(name)
    if ours in names:
        return f"{owner} has no field {name!r}; here it is called {ours!r}."
    return f"{owner} has no field {name!r}. {suggest(name, names)}"


@cache
def type_hints(cls: type) -> dict[str, Any]:
    """The types of a config's fields, evaluated."""
    return get_type_hints(cls)


def documented(cls: type[T]) -> type[T]:
    """Class decorator: append each field with its default and documentation to the docstring, for help()."""
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Fields:"]
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING
        default = "required" if required else f"default {field.default!r}"
        lines.append(f"    {field.name} ({default}): {field.metadata['doc']}.")
    cls.__doc__ = "\n".join(lines)
    return cls


def declare(doc: str, check: Check, default: Any, must: str = "") -> Any:
    """A dataclass field with documentation and a check of its own.

    Args:
        must: what the check demands, in words, for the documentation.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check, "must": must})


def integer(doc: str, *, least: int = 1, most: int = _MAX_NUMBER, default: Any = dataclasses.MISSING) -> Any:
    """An integer (NumPy's too, but not True and not 3.0) from `least` to `most`."""
    must = f"an integer from {least} to {most:,}" if most < _MAX_NUMBER else f"an integer, at least {least}"
    return declare(doc, lambda name, value, hint: as_integer(name, value, least, most), default, must)


def side_lengths(doc: str, default: Any = dataclasses.MISSING) -> Any:
    """One side length, or one for each axis; the config checks the number of axes with `per_axis`."""

    def check(name: str, value: Any, hint: Any) -> int | tuple[int, ...]:
        if not isinstance(value, (tuple, list)):
            return as_integer(name, value, 1)
        return tuple(as_integer(name, side, 1) for side in value)

    return declare(doc, check, default)


def per_axis(name: str, value: int | tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """One side length for each axis, such as ("height", "width"); a single integer is used for all."""
    sides = (value,) * len(axes) if isinstance(value, int) else value
    if len(sides) != len(axes):
        raise ConfigError(f"{name} must be one integer or ({', '.join(axes)}), not {short_repr(value)}.")
    return sides


def probability(doc: str) -> Any:
    """A probability below 1; 0 by default."""
    return number(doc, "at least 0 and below 1", lambda p: 0 <= p < 1, default=0.0)


def number(doc: str, must: str, holds: Callable[[float], bool], default: Any) -> Any:
    """A real number for which `holds` is true; NaN is refused.

    Args:
        must: the condition in words, for the message "eps must be above 0".
    """

    def check(name: str, value: Any, hint: Any) -> float:
        if not is_real(value) or not holds(float(value)):
            raise ConfigError(f"{name} must be {must}, not {short_repr(value)}.{_none_hint(name, hint)}")
        return float(value)

    return declare(doc, check, default, must)


def _none_hint(name: str, hint: Any) -> str:
    """How to disable an optional number, which 0 does not do."""
    return f" Use {setting(name, None)} to switch it off." if type(None) in get_args(hint) else ""


def choice(doc: str, *, default: str, aliases: Mapping[str, str] = {}, or_number: bool = False) -> Any:
    """One of the values of the field's Literal type.

    Args:
        aliases: other spellings, each with the value that it stands for.
        or_number: whether any real number is allowed as well.
    """

    def check(name: str, value: Any, hint: Any) -> Any:
        if or_number and is_real(value):
            return float(value)
        values = literal_values(hint)
        value = aliases.get(value, value) if isinstance(value, str) else value
        if value not in values:
            near = suggest(value if isinstance(value, str) else "", values)
            raise ConfigError(f"unknown {name} {short_repr(value)}. {near}{' Or a number.' * or_number}")
        return value

    return declare(doc, check, default)


def literal_values(hint: Any) -> list[str]:
    """The values of Literal["a", "b"], also inside Literal["a", "b"] | float."""
    parts = [hint] if get_origin(hint) is Literal else get_args(hint)
    return [value for part in parts if get_origin(part) is Literal for value in get_args(part)]


def boolean(doc: str, *, default: bool) -> Any:
    """True or False; 0 and 1 are refused."""

    def check(name: str, value: Any, hint: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, not {short_repr(value)}.")
        return value

    return declare(doc, check, default, "`true`, `false`")


def as_integer(name: str, value: Any, least: int, most: int = _MAX_NUMBER) -> int:
    """The value as an int, or a ConfigError that names the range."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise ConfigError(f"{name} must be an integer from {least} to {most:,}, not {short_repr(value)}.")
    return number


def as_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config from JSON, which has lists where configs have tuples."""
    return {str(name): tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def is_real(value: Any) -> bool:
    """Whether a value is a finite real number of reasonable size; False for True, NaN and infinity."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(abs(value) < _MAX_NUMBER)  # type: ignore[operator]


def short_repr(value: object) -> str:
    """A repr of at most 80 characters that never fails (Python refuses to print an int of 5,000 digits)."""
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        return f"an integer {'above' if value > 0 else 'below'} {'-' * (value < 0)}10^12"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
