"""The command line: one file per command; heavy imports inside the functions.

Exit codes: 0 done, 1 done with failures that are listed, 2 wrong use or bad input, 130 interrupted, 141 if
the reader of the output is gone (`vitrail predict ... | head`), as shells report it for any command. `train`
ignores a closed output and run to the end.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points

import typer
from typer import Option

from vitrail.base.errors import InputError, VitrailError, command_line_names, printable
from vitrail.base.version import __version__
from vitrail.cli.malloc import keep_freed_memory
from vitrail.cli.option_groups import flatten
from vitrail.cli.streams import discard_output, open_streams, print_error, show_device_lines
from vitrail.cli.train import check_options

app = typer.Typer(
    name="vitrail",
    help="Train, inspect and deploy Vision Transformers.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # otherwise the line breaks of docstrings are kept
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS = {  # a command is the function of its name in the module of its name
    "Everyday": ("train", "evaluate", "predict", "inspect", "serve"),
    "Train": ("doctor", "probe", "sweep", "plan"),
    "Use": ("embed", "search", "bench"),
    "Look inside": ("walk", "info", "verify"),
    "Files": ("convert", "export", "pack"),
    "Learn": ("demo",),
}
_COURSE = {}
for _point in entry_points(group="vitrail.commands"):
    with suppress(ImportError):  # a course of another version must not take the other commands with it
        _COURSE[_point.name] = _point.load()
for _panel, _names in _PANELS.items():
    for _name in _names:
        _command = getattr(import_module(f"vitrail.cli.{_name}"), _name)
        app.command(_name, rich_help_panel=_panel)(flatten(_command))
for _name, _command in _COURSE.items():
    app.command(_name, rich_help_panel="Learn")(flatten(_command))


def _print_version(requested: bool) -> None:
    if requested:
        print(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    context.with_resource(command_line_names())


def main() -> None:
    """Run a command; errors become one line on stderr instead of a traceback."""
    open_streams()
    show_device_lines()
    keep_freed_memory()
    try:
        _check_arguments(sys.argv[1:])
        _run_app()
    except VitrailError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        _exit_broken_pipe()
    except OSError as error:
        where = f"{printable(error.filename)}: " if error.filename else ""
        reason = error.strerror or error
        _fail(f"{where}{reason}. Check the path, its permissions and the disk space.", 2)
    except SystemExit as stop:
        if stop.code == 130:  # typer's code for an interrupted command
            _exit_interrupted()
        if isinstance(stop.__context__, BrokenPipeError):  # typer and rich exit this way
            _exit_broken_pipe()
        raise
    except Exception as error:
        _report_unexpected(error)


def _check_arguments(arguments: list[str]) -> None:
    """Refuse empty arguments: as a path, "" would mean the current folder. Name options that are settings."""
    if arguments[:1] == ["train"]:
        check_options(arguments[1:])
    if arguments and arguments[0] in {"lab", "notes", "generate", "check"} - set(_COURSE):
        raise InputError(
            f"vitrail {arguments[0]} is a command of the course; install the one of this version with "
            f"pip install vitrail-course=={__version__}."
        )
    for number, argument in enumerate(arguments, start=1):
        if not argument:
            before = f" (after {printable(arguments[number - 2])})" if number > 1 else ""
            raise InputError(f"argument {number}{before} is empty; is a shell variable unset?")


def _run_app() -> None:
    """Run the command and flush its output, so that a write error is reported here and not at exit."""
    try:
        app()
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            sys.stdout.flush()
        raise


def _report_unexpected(error: Exception) -> None:
    """Report an error that no command handles: out of memory, or a bug."""
    from vitrail.base.machine import failed_allocation, format_bytes, is_out_of_memory, memory_limit

    if "VITRAIL_DEBUG" in os.environ:
        raise error
    if is_out_of_memory(error):
        needed, limit = failed_allocation(error), memory_limit()
        request = f": an allocation of {needed} failed" if needed else ""
        total = f" ({format_bytes(limit)} in total)" if limit else ""
        hint = "Use a smaller --batch, --size or model, or a machine with more memory."
        _fail(f"out of memory{request}{total}. {hint}", 2)
    message = f"{type(error).__name__}: {error}. This is a bug in vitrail"
    _fail(f"{message}; set VITRAIL_DEBUG=1 to see the traceback.", 1)


def _fail(message: str, code: int) -> None:
    print_error(message)
    try:
        sys.stdout.flush()
    except OSError:  # Python would flush again at exit, complain, and change the exit code
        discard_output()
    sys.exit(code)


def _exit_broken_pipe() -> None:
    discard_output()
    sys.exit(141)  # 128 + SIGPIPE


def _exit_interrupted() -> None:
    """Exit with 130. After an interrupt inside exec() or an import, Python would otherwise kill itself
    with the signal instead of returning this code."""
    print_error("Stopped.")
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(130)
