"""The process of a training command: who prints, and the exit code after a signal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from vitrail.training.callbacks import Callback


@contextmanager
def training_process(*, quiet: bool = False) -> Iterator[tuple[Callback, bool]]:
    """The callback of this process, and whether it is the main one, which alone prints.

    A signal that stops a run becomes the exit code.

    Args:
        quiet: print nothing about the run; its log.txt has it.
    """
    from vitrail.training.callbacks import NullCallback
    from vitrail.training.console import ConsoleCallback
    from vitrail.training.parallel import destroy_process_group, init_process_group
    from vitrail.training.trainer import Interrupted

    is_main = init_process_group().is_main
    try:
        with ConsoleCallback() as console:
            yield (console if is_main and not quiet else NullCallback()), is_main
    except Interrupted as stop:
        sys.stdout.flush()
        raise typer.Exit(128 + stop.signal) from None
    finally:
        destroy_process_group()
