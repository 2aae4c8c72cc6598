"""`vitrail lab` and `vitrail notes`: experiments that test the claims of the lecture notes."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.base.errors import InputError, printable, suggest
from vitrail.cli.outputs import check_empty_folder


def lab(
    name: Annotated[str | None, typer.Argument(help="The lab to run.", show_default="list all labs")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data for the lab, such as MNIST files, a text file or sounds.", show_default="built-in data"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The output folder, new or empty.", show_default="lab-NAME")
    ] = None,
    small: Annotated[
        bool,
        typer.Option("--small", help="Run a smaller experiment, which takes seconds and gives no verdict."),
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="Where models are trained: auto, cpu or cuda.", metavar="DEVICE")
    ] = "auto",
    save: Annotated[
        Path | None,
        typer.Option(
            help="With the lab characters, the file for the trained model, for `vitrail generate`.",
            show_default="not saved",
        ),
    ] = None,
) -> None:
    """Test a claim of the lecture notes with an experiment.

    The output folder gets NAME.json with all measurements, and the figure as NAME.png and NAME.svg.
    """
    from vitrail_course.labs.lab import LABS, find_lab, format_number, run_lab

    if name is None:
        _print_fields({each: find_lab(each).CLAIM for each in LABS})
        return
    find_lab(name)
    folder = Path(f"lab-{name}") if out is None else out
    check_empty_folder("--out", folder)
    result = run_lab(name, folder, "small" if small else "full", data, device, save)
    _print_fields(
        {
            "note": result["note"],
            "claim": result["claim"],
            "measured": format_number(result),
            "setting": result["setting"],
            "verdict": result["verdict"],
        }
    )
    _print_statements(result["statements"])
    for warning in result["warnings"]:
        print(textwrap.fill(f"Warning: {warning}", _width()))
    for ending in ("json", "png", "svg"):
        print(f"Saved {printable(folder / name)}.{ending}")
    if save is not None:
        print(f"Saved {printable(save)}: vitrail generate {printable(save)}")


def notes(
    note: Annotated[
        str | None,
        typer.Argument(
            metavar="[NOTE]",
            help="Only the claims of this note, 000 to 004, in full.",
            show_default="all notes, a line for each claim",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print each claim with its measurement and all statements.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Print the published results in the lecture notes beside ours.")
    ] = False,
) -> None:
    """List the claims of the lecture notes, with the measurement and the verdict of each lab."""
    from vitrail_course.errata.erratum import NOTES
    from vitrail_course.labs.lab import load_results

    if note is not None and note not in NOTES:
        raise InputError(f"There is no lecture note {printable(note)!r}. {suggest(note, NOTES)}")
    if table:
        from vitrail_course.labs.published_results import print_published

        print_published()
        return
    results = [result for result in load_results() if note is None or note in result["note"]]
    if full or note is not None:
        _show_results(results)
    else:
        _show_overview(results)


# ---- the terminal ---------------------------------------------------------------------------


_COLORS = {"holds": "green", "replicated": "green", "seen": "green", "not clear": "blue"}


def _color(word: str) -> str:
    return _COLORS.get(word, "yellow" if "partly" in word else "red")


def _show_overview(results: Sequence[dict[str, Any]]) -> None:
    """The notes, and a line of at most 80 columns for each kind of statement of a claim."""
    from vitrail_course.errata.erratum import NOTES
    from vitrail_course.labs.lab import find_lab, result_verdict

    print("What five sets of lecture notes on Vision Transformers claim, tested:\n")
    for number, title in NOTES.items():
        print(f"  {number}  {title}")
    print(f"\n{'kind':13}{'verdict':16}{'lab':19}claim")
    for result in results:
        for kind, word in result_verdict(result).words.items():
            verdict = typer.style(f"{word:16}", fg=_color(word))
            title = find_lab(result["name"]).TITLE
            typer.echo(f"{kind.removesuffix(' experiment'):13}{verdict}{result['name']:19}{title}")
    print("\nidentity: computed; replication: the source's setting; toy: a small one of ours.")
    print("vitrail notes 002: the claims of a note in full; --full: all of them.")
    print("vitrail lab NAME: run an experiment.")


def _show_results(results: Sequence[dict[str, Any]]) -> None:
    from vitrail_course.labs.lab import format_number, verdict_fields

    for result in results:
        verdict = verdict_fields(result)
        print(result["command"])
        fields = {name: result[name] for name in ("note", "claim", "setting")}
        fields |= {"measured": format_number(result), "verdict": verdict["verdict"]}
        if result["warnings"]:
            fields["warning"] = " ".join(result["warnings"])
        _print_fields({f"  {name}": text for name, text in fields.items()})
        _print_statements(verdict["statements"])
        print()


def _print_statements(statements: Sequence[Mapping[str, Any]]) -> None:
    """A line or two for each statement, with its threshold and the source of that."""
    from vitrail_course.labs.verdict import Statement

    for fields in statements:
        print(
            textwrap.fill(str(Statement(**fields)), _width(), initial_indent="  - ", subsequent_indent="    ")
        )


def _print_fields(fields: Mapping[str, str]) -> None:
    """Print names and wrapped texts in two columns."""
    width = max(map(len, fields)) + 2
    for name, text in fields.items():
        print(textwrap.fill(text, _width(), initial_indent=f"{name:{width}}", subsequent_indent=" " * width))


def _width() -> int:
    """Columns of the terminal; without one, lines are not wrapped."""
    return max(40, shutil.get_terminal_size(fallback=(10_000, 24)).columns)
