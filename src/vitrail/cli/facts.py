"""What commands that open a weight file take: facts about the model that the file does not tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.errors import InputError, printable, suggest

Family = Annotated[str | None, typer.Option(help="Read the file as one of this family.")]
Keys = Annotated[
    Path | None,
    typer.Option(
        help='A JSON file with a table of your own: [["their.{i}.name", "our.{i}.name"], ...]; '
        '["decoder.*", null] ignores tensors.'
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="What the file does not say: heads=6, activation=relu, eps=1e-5, block=post-norm; "
        "preprocess.mean=0.485,0.456,0.406 and other fields of the preprocessing; checkpoint_key=model_ema.",
    ),
]
Size = Annotated[str | None, typer.Option(help="The picture's side, or HxW.")]


def facts(
    family: str | None = None,
    keys: Path | None = None,
    given: Iterable[str] | None = None,
    size: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The keywords of `vitrail.load`, from a command's options."""
    found = {"family": family, "size": sides(size) if size else None, **more}
    if keys is not None:
        found["keys"] = read_keys(keys)
    return {name: value for name, value in {**found, **settings(given or [])}.items() if value is not None}


def settings(given: Iterable[str]) -> dict[str, Any]:
    """FIELD=VALUE, again and again, as `vitrail.load` takes them.

    A field is one of ViTConfig, "preprocess." and one of Preprocess, or checkpoint_key.
    """
    from vitrail.config import ViTConfig
    from vitrail.fields import type_hints
    from vitrail.preprocess import Preprocess

    model, images = type_hints(ViTConfig), type_hints(Preprocess)
    known = [*model, *(f"preprocess.{name}" for name in images), "checkpoint_key"]
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise InputError(
                "--set takes FIELD=VALUE, with a field of the model or of its preprocessing, and not "
                f"{printable(text)!r}. {suggest(name, known)}"
            )
        field = name.removeprefix("preprocess.")
        if name == "checkpoint_key":
            found[name] = value
        elif field != name:
            found.setdefault("preprocess", {})[field] = as_value(value, images[field])
        else:
            found[name] = as_value(value, model[name])
    return found


def as_value(text: str, hint: Any) -> Any:
    """One of the field's words, even "none"; numbers with commas between; or what `parsed` makes of it."""
    from vitrail.fields import literal_words

    found = tuple(parsed(part.strip()) for part in text.split(","))
    plain = len(found) > 1 and all(isinstance(part, (int, float)) for part in found)
    return text if text in literal_words(hint) else found if plain else parsed(text)


def parsed(text: str) -> Any:
    """A number, a yes or no, HxW, or the word itself; the field checks the rest."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    parts = text.split("x")
    return tuple(map(int, parts)) if len(parts) > 1 and all(p.isdecimal() for p in parts) else text


def sides(text: str) -> Any:
    found = parsed(text)
    if not isinstance(found, (int, tuple)) or isinstance(found, bool):
        raise InputError("--size must be a number or HxW.", repr(text), "Such as 224 or 256x128.")
    return found


def read_keys(path: Path) -> list[Any]:
    """The user's table of keys."""
    from vitrail.weights.folder import read_json_value

    rows = read_json_value(path)
    if not isinstance(rows, list):
        raise InputError("--keys must name a JSON file with a list of rows.", repr(str(path)), "See --help.")
    return rows
