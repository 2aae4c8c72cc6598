"""The fields of a config: each is declared with its meaning and its check.

    width: int = whole("D, the length of every token vector")
    pool: Literal["class", "mean"] = choice("How tokens become one vector", default="class")

A check takes what the user gave and returns it in one form, or raises a ConfigError.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from vitrail.errors import ConfigError, suggest

MOST = 10**12  # for any single number

Check = Callable[[str, Any, Any], Any]  # (name, value, type hint) -> the value in its one form


class Config:
    """Base of all configs: frozen dataclasses that check themselves, field by field."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__} takes only the fields it has.",
                    f"{name}={show(given[name])}",
                    suggest(name, known),
                )
        missing = [name for name in known if name not in given and is_required(cls, name)]
        if given and missing:  # copying and unpickling come here with nothing
            raise ConfigError(
                f"{cls.__name__} needs {', '.join(name for name in known if is_required(cls, name))}.",
                f"no {', '.join(missing)}",
                "Give them by name, or start from a preset.",
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = type_hints(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None or field.default is not None:  # None only where it is the default
                self.set(field.name, field.metadata["check"](field.name, value, hints[field.name]))

    def set(self, name: str, value: Any) -> None:
        """The one way round `frozen`, for __post_init__ alone."""
        object.__setattr__(self, name, value)


def is_required(cls: type, name: str) -> bool:
    return cls.__dataclass_fields__[name].default is dataclasses.MISSING  # type: ignore[attr-defined]


@cache
def type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def describe(cls: type) -> dict[str, str]:
    """Each field of a config and what it means."""
    return {field.name: field.metadata["doc"] for field in dataclasses.fields(cls)}


def declare(doc: str, check: Check, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "check": check})


def whole(doc: str, *, least: int = 1, most: int = MOST, default: Any = dataclasses.MISSING) -> Any:
    """A whole number (numpy's too, but not True and not 3.0) from `least` to `most`."""
    return declare(doc, lambda name, value, hint: as_whole(name, value, least, most), default)


def sides(doc: str, default: Any = dataclasses.MISSING) -> Any:
    """A side, or one for each axis; how many axes there are is for the config to say."""

    def check(name: str, value: Any, hint: Any) -> int | tuple[int, ...]:
        if not isinstance(value, (tuple, list)):
            return as_whole(name, value, 1)
        return tuple(as_whole(name, side, 1) for side in value)

    return declare(doc, check, default)


def per_axis(name: str, value: int | tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
    """Sides for exactly these axes, such as ("height", "width"); one number stands for all."""
    found = (value,) * len(axes) if isinstance(value, int) else value
    if len(found) != len(axes):
        raise ConfigError(
            f"{name} must be one number, or ({', '.join(axes)}).",
            f"{name}={show(value)}",
            f"Give one number or {len(axes)}.",
        )
    return found


def rate(doc: str) -> Any:
    """A probability below 1; 0 unless given."""
    return number(doc, "at least 0 and below 1", lambda p: 0 <= p < 1, default=0.0)


def number(doc: str, must: str, holds: Callable[[float], bool], default: Any) -> Any:
    """A real number for which `holds` is true (it is false for NaN)."""

    def check(name: str, value: Any, hint: Any) -> float:
        if not is_real(value) or not holds(float(value)):
            raise ConfigError(
                f"{name} must be {must}.", f"{name}={show(value)}", f"Set {name} to such a number."
            )
        return float(value)

    return declare(doc, check, default)


def choice(doc: str, *, default: str, aliases: Mapping[str, str] = {}, or_number: bool = False) -> Any:
    """One of the words in the field's Literal type; `aliases` are other words for them."""

    def check(name: str, value: Any, hint: Any) -> Any:
        if or_number and is_real(value):
            return float(value)
        words = literal_words(hint)
        value = aliases.get(value, value) if isinstance(value, str) else value
        if value not in words:
            raise ConfigError(
                f"{name} must be one of its words{' or a number' if or_number else ''}.",
                f"{name}={show(value)}",
                suggest(str(value) if isinstance(value, str) else "", words),
            )
        return value

    return declare(doc, check, default)


def literal_words(hint: Any) -> list[str]:
    """The words of Literal["a", "b"], also inside Literal["a", "b"] | float."""
    parts = [hint] if get_origin(hint) is Literal else get_args(hint)
    return [word for part in parts if get_origin(part) is Literal for word in get_args(part)]


def switch(doc: str, *, default: bool) -> Any:
    """True or False, and nothing that merely resembles them."""

    def check(name: str, value: Any, hint: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(
                f"{name} must be True or False.", f"{name}={show(value)}", f"Set {name} to True or False."
            )
        return value

    return declare(doc, check, default)


def as_whole(name: str, value: Any, least: int, most: int = MOST) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if isinstance(value, bool) or not least <= found <= most:
        raise ConfigError(
            f"{name} must be a whole number from {least} to {most:,}.",
            f"{name}={show(value)}",
            f"Set {name} to a whole number.",
        )
    return found


def is_real(value: Any) -> bool:
    """A number that a float can hold: not True, not NaN, not infinite, not an int of 400 digits."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(abs(value) < MOST)  # type: ignore[operator]


def show(value: object) -> str:
    """A repr that is short, and never fails (Python will not print an int of 5,000 digits)."""
    if isinstance(value, int) and abs(value) > MOST:
        return "a number beyond a million million"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
