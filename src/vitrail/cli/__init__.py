"""The command line: one file per command; heavy imports inside the functions.

Exit codes: 0 done, 1 done with failures that are listed, 2 wrong use or bad input, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
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
from vitrail.cli.train import train
from vitrail.cli.verify import verify
from vitrail.cli.walk import walk
from vitrail.errors import VitrailError

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
    for stream in (sys.stdout, sys.stderr):  # a terminal without our letters shows "?", and goes on
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    keep_freed_memory()
    try:
        _run()
    except VitrailError as error:
        _fail(str(error), 2)
    except BrokenPipeError:  # whoever read our output (`| head`) has gone: nothing to say to
        _give_up_output()
        sys.exit(1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _fail(
            f"The system refused{where}: {error.strerror or error}. Check the path, its rights and the disk.",
            2,
        )
    except SystemExit as stop:
        if stop.code == 130:  # how typer ends an interrupted command
            _stop()
        raise
    except Exception as error:
        if "VITRAIL_DEBUG" in os.environ:
            raise
        _fail(f"{type(error).__name__}: {error}. This is a bug in vitrail; VITRAIL_DEBUG=1 shows where.", 1)


def _run() -> None:
    """The command, to its last letter: what cannot be written is our affair, not Python's at the very end."""
    try:
        app()
    except SystemExit:
        sys.stdout.flush()
        raise


def _fail(message: str, code: int) -> None:
    print(f"vitrail: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more, complain, and leave with a code of its own
        _give_up_output()
    sys.exit(code)


def _give_up_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop() -> None:
    """End with 130 whatever was interrupted: after an interrupt inside exec() or an import, Python
    itself would leave by killing itself with the signal instead of returning our code."""
    print("vitrail: Stopped.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)
