"""log.txt of a run: every note, the plan and every epoch, a line each, after its time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from os import SEEK_END
from pathlib import Path
from typing import Any

from vitrail.errors import FileError, printable
from vitrail.training.listen import Listener, Progress, epoch_line

LONGEST = 1000  # characters of a line


class Log:
    """A listener that writes down what it hears and passes it on.

    A run speaks before it has a folder: until `begin`, lines wait. They are added to those of the
    run that is gone on with. A file that cannot be written to ends the run, as any other would.
    """

    def __init__(self, inner: Listener, file: Path, writes: bool = True) -> None:
        self.inner, self.file, self.writes = inner, file, writes
        self.waiting: list[str] | None = []

    def begin(self) -> None:
        """The folder is there: write what has been said so far, and all that follows at once."""
        waiting, self.waiting = self.waiting or [], None
        self.append("".join(waiting))

    def line(self, text: object) -> None:
        stamped = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {printable(text, LONGEST)}\n"
        if self.waiting is None:
            self.append(stamped)
        else:
            self.waiting.append(stamped)

    def append(self, text: str) -> None:
        if not self.writes:
            return
        try:
            with self.file.open("ab+") as opened:
                if opened.tell():
                    opened.seek(-1, SEEK_END)
                    text = text if opened.read(1) == b"\n" else "\n" + text  # a full disk had cut it off
                opened.write(text.encode())
        except OSError as error:
            raise FileError(
                "A run must be able to write its log.",
                f"{printable(self.file)}: {printable(error.strerror or error)}",
                "Free some space or check the rights, then go on with --resume.",
            ) from error

    # ---- what a listener hears ------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.inner.note(text)
        self.line(text)

    def plan(self, facts: Mapping[str, Any]) -> None:
        self.inner.plan(facts)
        for word, value in facts.items():
            self.line(f"{word}: {value}")

    def progress(self, progress: Progress) -> None:
        self.inner.progress(progress)

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        self.inner.epoch(metrics)
        self.line(epoch_line(metrics))
