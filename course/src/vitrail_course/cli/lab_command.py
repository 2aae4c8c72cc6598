"""`vitrail lab` and `vitrail notes`: experiments that test the claims of the lecture notes."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.base.errors import InputError, printable, suggest
from vitrail.cli.outputs import check_empty_folder
from vitrail.cli.streams import outlasting


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
    from vitrail_course.labs.verdict import format_verdict

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
            "verdict": format_verdict(result["verdict"], result["condition"]),
        }
    )
    print(textwrap.fill(result["sentence"], _width()))
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
        bool, typer.Option("--full", help="Print each claim with its measurement and the whole verdict.")
    ] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Run all labs first, which takes an hour on two cores.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="With --run, the output folder, new or empty.", show_default="notes"),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="With --run, run smaller experiments.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Print the published results in the lecture notes beside ours.")
    ] = False,
) -> None:
    """List the claims of the lecture notes, with the measurement and the verdict of each lab.

    The results are ours; with --run they are yours, and the output folder gets all numbers and figures.
    """
    from vitrail_course.errata.erratum import NOTES
    from vitrail_course.labs import lab as labs

    if note is not None and note not in NOTES:
        raise InputError(f"There is no lecture note {printable(note)!r}. {suggest(note, NOTES)}")
    if (small or out is not None) and not run:
        option = "--small" if small else "--out"
        raise InputError(f"{option} is an option for --run; add --run, or remove {option}.")
    if table:
        if run:
            raise InputError(
                "--table prints published results and cannot be combined with --run; remove one."
            )
        _show_published(markdown)
        return
    folder = Path("notes") if out is None else out
    with outlasting(printable(folder / "results.json")) if run else nullcontext():
        results = _run_labs(folder, small) if run else labs.load_results()
        if note is not None:
            results = [result for result in results if note in _note_numbers(result)]
        if markdown:
            print(labs.markdown_table(results), end="")
        elif full or note is not None:
            _show_results(results)
        else:
            _show_overview(results)
        if run:
            print(f"Saved {printable(folder / 'results.json')}, and the numbers and the figure of every lab")


def _show_published(markdown: bool) -> None:
    from vitrail_course.labs import published_results

    if markdown:
        print(published_results.published_markdown(), end="")
    else:
        published_results.print_published()


def _run_labs(out: Path, small: bool) -> list[dict[str, Any]]:
    from vitrail_course.labs.collect import collect_results, write_results

    def report(result: dict[str, Any]) -> None:
        print(f"{result['name']}: {result['verdict']} ({result['seconds']} s)", flush=True)

    check_empty_folder("--out", out)
    results = collect_results(out, "small" if small else "full", report)
    write_results(results, out / "results.json")
    return results


# ---- the terminal ---------------------------------------------------------------------------


_COLORS = {"holds": "green", "partly": "yellow", "does not hold": "red", "not clear here": "blue"}


def _note_numbers(result: Mapping[str, Any]) -> list[str]:
    """The notes that make a claim: "000", "003"."""
    return sorted(set(re.findall(r"\b00[0-9]\b", result["note"])))


def _show_overview(results: Sequence[dict[str, Any]]) -> None:
    """The notes, and a line of at most 80 columns for each claim."""
    from vitrail_course.errata.erratum import NOTES
    from vitrail_course.labs.lab import find_lab

    print("What five sets of lecture notes on Vision Transformers claim, tested:\n")
    for number, title in NOTES.items():
        print(f"  {number}  {title}")
    print(f"\n{'verdict':15}{'lab':19}{'claim':31}notes")
    for result in results:
        word = result["verdict"].removesuffix(" to judge")  # too small
        verdict = typer.style(f"{word:15}", fg=_COLORS.get(word))
        notes = " ".join(_note_numbers(result))
        typer.echo(f"{verdict}{result['name']:19}{find_lab(result['name']).TITLE:31}{notes}")
    print("\nvitrail notes 002: the claims of a note in full; --full: all of them.")
    print("vitrail lab NAME: run an experiment.")


def _show_results(results: Sequence[dict[str, Any]]) -> None:
    """A paragraph for each lab: a table of five columns would be unreadable in a terminal."""
    from vitrail_course.labs.lab import format_number
    from vitrail_course.labs.verdict import format_verdict

    for result in results:
        print(result["command"])
        fields = {
            "  note": result["note"],
            "  claim": result["claim"],
            "  measured": format_number(result),
            "  verdict": format_verdict(result["verdict"], result["condition"]),
        }
        if result["warnings"]:
            fields["  warning"] = " ".join(result["warnings"])
        _print_fields(fields)
        print()


def _print_fields(fields: Mapping[str, str]) -> None:
    """Print names and wrapped texts in two columns."""
    width = max(map(len, fields)) + 2
    for name, text in fields.items():
        print(textwrap.fill(text, _width(), initial_indent=f"{name:{width}}", subsequent_indent=" " * width))


def _width() -> int:
    """Columns of the terminal; without one, lines are not wrapped."""
    return max(40, shutil.get_terminal_size(fallback=(10_000, 24)).columns)
