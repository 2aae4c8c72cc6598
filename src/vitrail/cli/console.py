"""The process of a training command: who prints, and the exit code after a signal."""

from __future__ import annotations

import os
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
    from vitrail.training.signals import Interrupted, stop_early

    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with stop_early(lambda: "nothing has begun; start it again."), _process_group() as is_main:
            from vitrail.training.callbacks import NullCallback
            from vitrail.training.console_lines import ConsoleCallback

            with ConsoleCallback() as console:
                yield (console if is_main and not quiet else NullCallback()), is_main
    except Interrupted as stop:
        if is_main and not stop.saved:
            print(stop)
        sys.stdout.flush()
        raise typer.Exit(128 + stop.signal) from None


@contextmanager
def _process_group() -> Iterator[bool]:
    """Join the processes of torchrun while the block runs; whether this is the main one."""
    from vitrail.training.parallel import destroy_process_group, init_process_group

    try:
        yield init_process_group().is_main
    finally:
        destroy_process_group()
