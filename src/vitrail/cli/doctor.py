"""`vitrail doctor`: what is wrong with my data?"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vitrail.errors import printable

if TYPE_CHECKING:
    from vitrail.data.doctor import Findings

MOST = 5  # lines of each kind; all of them are in the JSON
WIDTH = 80


def doctor(
    data: Annotated[str, typer.Argument(help="A folder of images, a table, an array file, or: digits.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Threads that decode files.")] = 2,
) -> None:
    """Decode every image and say what is wrong: corrupt files, images in two splits, odd classes.

    No file is changed. The exit code is 1 where something must be repaired: files that cannot be read or
    are not read, the same image in two splits or under two labels, classes without training images or
    with almost the same name, and whatever training would refuse. What is only worth knowing (small
    classes, duplicates, other files) does not change it. It is 2 where the data cannot be opened.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vitrail.data.doctor import examine, open_to_examine, splits_of

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the names", total=None)
        images, problems = open_to_examine(data)
        total = sum(map(len, splits_of(images).values()))
        bar.update(task, description=f"decoding {total:,} images", total=total)
        found = examine(images, workers, lambda done: bar.update(task, completed=done))
    found.problems = problems
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(found)
    if found.ill:
        raise typer.Exit(1)


class Section(NamedTuple):
    """A kind of finding: its title, how many, and the lines of the first few."""

    title: str
    total: int
    lines: list[str]


def show(found: Findings) -> None:
    counts = ", ".join(f"{count:,} in {name}" for name, count in found.pictures.items()) or "none"
    say(f"images: {counts}; {found.classes:,} class{'es' * (found.classes != 1)}")
    say(f"modes: {', '.join(f'{mode} {count:,}' for mode, count in found.modes.items()) or 'none'}")
    for note in found.notes:
        say(printable(note, 400))
    wrong, known = list(faults(found)), list(remarks(found))
    for title, sections in (("MUST BE REPAIRED", wrong), ("WORTH KNOWING", known)):
        if sections:
            print(f"\n{title}")
        for section in sections:
            print(f"{section.title} ({section.total:,}):")
            print("\n".join(section.lines))
    repair = "Nothing must be repaired."
    if found.ill:
        repair = f"{len(wrong)} kind{'s' * (len(wrong) > 1)} of fault must be repaired."
    print(f"\n{repair}")


def faults(found: Findings) -> Iterator[Section]:
    """What makes the exit code 1."""
    from vitrail.data.folders import FAULTS

    if found.problems:
        lines = [line for one in found.problems for line in wrapped(printable(one, 600))]
        yield Section("training would refuse this data", len(found.problems), lines)
    if found.corrupt:
        yield Section("cannot be read", len(found.corrupt), by_reason(found.corrupt))
    yield from groups("the same image in two splits", found.leaked)
    yield from groups("the same image under two labels", found.disputed)
    if names := found.absent.get("train"):
        yield names_of("classes without a training image", names)
    if found.alike:
        title = "classes whose names differ only in case, blanks or separators"
        yield names_of(title, found.alike)
    for kind, title in FAULTS.items():
        if names := found.skipped.get(kind):
            yield names_of(f"not read: {title}", names)


def remarks(found: Findings) -> Iterator[Section]:
    """What may be as it should be."""
    from vitrail.data.folders import HARMLESS

    yield from groups("the same image twice", found.twice)
    for split, names in found.absent.items():
        if split != "train":
            yield names_of(f"classes without an image in {split}", names)
    if found.few:
        few = [f"{name}: {count}" for name, count in found.few.items()]
        yield names_of("classes with few training images", few)
    if found.small:
        yield names_of("very small images", found.small)
    for kind, title in HARMLESS.items():
        if kind in found.skipped:
            yield names_of(f"not read: {title}", found.skipped[kind])


# ---- lines of at most 80 columns ------------------------------------------------------------


def say(text: str) -> None:
    print(textwrap.fill(text, WIDTH, subsequent_indent="  "))


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def names_of(title: str, names: Sequence[str], indent: str = "  ") -> Section:
    """The first few in one line, or in a line each if they are long."""
    more = [f"and {len(names) - MOST:,} more (--json has all)"] if len(names) > MOST else []
    line = indent + " ".join([", ".join(names[:MOST]), *more])
    if len(line) <= WIDTH:
        return Section(title, len(names), [line])
    lines = [indent + printable(name, WIDTH - len(indent)) for name in names[:MOST]]
    return Section(title, len(names), lines + [indent + text for text in more])


def groups(title: str, found: list[list[str]]) -> Iterator[Section]:
    """A line for each group of images that are the same."""
    if found:
        lines = []
        for names in found[:MOST]:
            more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
            room = (WIDTH - len("   = ") - len(more)) // 2
            lines.append("  " + " = ".join(printable(name, room) for name in names[:2]) + more)
        if len(found) > MOST:
            lines.append(f"  and {len(found) - MOST:,} more (--json has all)")
        yield Section(title, len(found), lines)


def by_reason(corrupt: dict[str, str]) -> list[str]:
    """Files under the reason why they cannot be read."""
    files = defaultdict(list)
    for name, reason in corrupt.items():
        files[reason].append(name)
    lines = []
    for reason, names in list(files.items())[:MOST]:
        lines += [*wrapped(f"{len(names):,}: {reason}"), *names_of("", names, "    ").lines]
    if len(files) > MOST:
        lines.append(f"  and {len(files) - MOST:,} more reasons (--json has all)")
    return lines
