"""The command line: one file per command; heavy imports inside the functions.

Exit codes: 0 done, 1 done with failures that are listed, 2 wrong use or bad input, 130 interrupted, 141 when
whoever read the output has gone (`vitrail predict ... | head`): quietly, with the code that a shell gives any
command for it. `train` and `notes --run` do not stop for that; they go on to the end, and 0.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from vitrail import __version__
from vitrail.cli.check import check
from vitrail.cli.convert import convert
from vitrail.cli.demo import demo
from vitrail.cli.doctor import doctor
from vitrail.cli.evaluate import evaluate
from vitrail.cli.export import export
from vitrail.cli.info import info
from vitrail.cli.inspect import inspect
from vitrail.cli.lab import lab, notes
from vitrail.cli.memory import keep_freed_memory
from vitrail.cli.predict import predict
from vitrail.cli.serve import serve
from vitrail.cli.streams import give_up_output, open_streams, say
from vitrail.cli.train import train
from vitrail.cli.verify import verify
from vitrail.cli.walk import walk
from vitrail.errors import InputError, VitrailError, printable

app = typer.Typer(
    name="vitrail",
    help="A Vision Transformer you can train, see through and ship.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # so that paragraphs are wrapped anew
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    *(demo, train, evaluate, predict, serve, doctor, inspect, walk, lab, notes, check),
    *(export, info, convert, verify),
)
for command in COMMANDS:
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command; whatever goes wrong, the user reads a sentence, not a stack trace."""
    open_streams()
    keep_freed_memory()
    try:
        check_arguments(sys.argv[1:])
        _run()
    except VitrailError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        _reader_has_gone()
    except OSError as error:
        where = f" {printable(error.filename)}" if error.filename else ""
        _fail(
            f"The system refused{where}: {error.strerror or error}. Check the path, its rights and the disk.",
            2,
        )
    except SystemExit as stop:
        if stop.code == 130:  # how typer ends an interrupted command
            _stop()
        if isinstance(stop.__context__, BrokenPipeError):  # how typer and rich end when the reader has gone
            _reader_has_gone()
        raise
    except Exception as error:
        _explain(error)


def check_arguments(arguments: list[str]) -> None:
    """No argument may be empty: as a path it would mean the current folder, which nobody wrote."""
    for number, argument in enumerate(arguments, start=1):
        if not argument:
            before = f" (after {printable(arguments[number - 2])})" if number > 1 else ""
            raise InputError(f"argument {number}{before} is empty; is a variable of your shell not set?")


def _run() -> None:
    """The command, to its last letter: what cannot be written is our affair, not Python's at the very end."""
    try:
        app()
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            sys.stdout.flush()
        raise


def _explain(error: Exception) -> None:
    """An error that nothing has foreseen: memory has run out, or it is a mistake of ours."""
    from vitrail.memory import as_text, asked_for, is_out_of_memory, memory_limit

    if "VITRAIL_DEBUG" in os.environ:
        raise error
    if is_out_of_memory(error):
        more, limit = asked_for(error), memory_limit()
        wanted = f": {more} more were needed" if more else ""
        there = f" ({as_text(limit)} in all)" if limit else ""
        do = "Use a smaller --batch, --size or model, or a machine with more."
        _fail(f"there is not enough memory{wanted}{there}. {do}", 2)
    _fail(f"{type(error).__name__}: {error}. This is a bug in vitrail; VITRAIL_DEBUG=1 shows where.", 1)


def _fail(message: str, code: int) -> None:
    say(message)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more, complain, and leave with a code of its own
        give_up_output()
    sys.exit(code)


def _reader_has_gone() -> None:
    give_up_output()
    sys.exit(141)  # 128 + SIGPIPE


def _stop() -> None:
    """End with 130 whatever was interrupted: after an interrupt inside exec() or an import, Python
    itself would leave by killing itself with the signal instead of returning our code."""
    say("Stopped.")
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(130)
