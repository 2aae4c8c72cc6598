"""Training in a notebook: one output, updated in place, with progress, a table of epochs and curves."""

from __future__ import annotations

import sys
import time
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vitrail.base.errors import printable
from vitrail.base.summary import html_table
from vitrail.training.callbacks import Callback, Progress, epoch_line, progress_line
from vitrail.training.clock import Interval, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UPDATE_SECONDS = 0.5  # between updates of the progress
_DRAW_FRACTION = 0.1  # of the time, at most, is spent on drawing curves
_MAX_ROWS = 20  # of the table; of more epochs, the last ones are shown
_COLUMNS = ("epoch", "training loss", "training accuracy", "held-out loss", "held-out accuracy", "time")


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook; IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookCallback(Callback):
    """A callback that shows a run as one output of a notebook cell. Curves need matplotlib."""

    def __init__(self) -> None:
        self._id = f"vitrail-{uuid4().hex}"
        self._shown = False
        self._plan: dict[str, Any] = {}
        self._decisions: list[str] = []  # messages before the first step
        self._messages: list[str] = []  # and after it
        self._epochs: list[Mapping[str, Any]] = []
        self._progress: Progress | None = None
        self._curves = ""
        self._drawn = 0  # epochs in the curves
        self._next_drawing = 0.0
        self._due = Interval(_UPDATE_SECONDS)

    def __enter__(self) -> NotebookCallback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on_message(self, text: str) -> None:
        (self._messages if self._plan else self._decisions).append(printable(text, 400))
        self._show()

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        self._plan = dict(plan)
        self._show()

    def on_progress(self, progress: Progress) -> None:
        self._progress = progress
        if self._due():
            self._show()

    def on_epoch(self, metrics: Mapping[str, Any]) -> None:
        self._epochs.append(dict(metrics))
        if time.monotonic() >= self._next_drawing:
            self._draw()
        self._show()

    def close(self) -> None:
        """Remove the progress, and show the curves of all epochs."""
        self._progress = None
        if self._drawn < len(self._epochs):
            self._draw()
        if self._shown:
            self._show()

    # ---- the output -------------------------------------------------------------------------

    def _show(self) -> None:
        from IPython.display import display

        content = {"text/html": self._html(), "text/plain": self._text()}
        display(content, raw=True, display_id=self._id, update=self._shown)
        self._shown = True

    def _text(self) -> str:
        """For frontends without HTML."""
        return "\n".join([*self._decisions, *map(epoch_line, self._epochs), *self._messages])

    def _html(self) -> str:
        plan = [[name, printable(value, 400)] for name, value in self._plan.items()]
        details = f"<details><summary>Plan</summary>{html_table(plan)}</details>" if plan else ""
        before, after = (
            "".join(f"<div>{escape(text)}</div>" for text in some)
            for some in (self._decisions, self._messages)
        )
        bar = ""
        if p := self._progress:
            bar = f'<progress value="{p.step}" max="{p.steps}" style="width:16em"></progress>'
            bar = f"<div>{bar} {escape(progress_line(p))}</div>"
        return f"<div>{before}{details}{bar}{self._table()}{self._curves}{after}</div>"

    def _table(self) -> str:
        rows = [_cells(row) for row in self._epochs[-_MAX_ROWS:]]
        if not rows:
            return ""
        hidden = len(self._epochs) - len(rows)
        title = f"The last {len(rows)} of {len(self._epochs)} epochs" if hidden else ""
        return html_table(rows, title, _COLUMNS)

    # ---- curves -----------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw the curves, and do so again only when it costs little compared with the training."""
        if find_spec("matplotlib") is None:
            return
        from vitrail.views.charts import curve_figure

        start = time.monotonic()
        loss = {"loss": "training", "val_loss": "held out"}
        accuracy = {"accuracy": "training", "val_accuracy": "held out"}
        self._curves = _image(curve_figure(self._epochs, loss, "loss"), "Loss over epochs") + _image(
            curve_figure(self._epochs, accuracy, "accuracy, %", percent=True), "Accuracy over epochs"
        )
        self._drawn = len(self._epochs)
        now = time.monotonic()
        self._next_drawing = now + (now - start) / _DRAW_FRACTION


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    """A row of the table; an epoch that was not evaluated has empty cells."""
    row = [str(metrics["epoch"]), f"{metrics['loss']:.3f}", f"{metrics['accuracy']:.2%}"]
    if "val_accuracy" in metrics:
        row += [f"{metrics['val_loss']:.3f}", f"{metrics['val_accuracy']:.2%}"]
    else:
        row += ["", ""]
    return [*row, format_seconds(metrics["seconds"]) if "seconds" in metrics else ""]


def _image(figure: Figure, alt: str) -> str:
    """A figure as an HTML image: on a dark page, too, it is drawn on white."""
    from vitrail.views.canvas import png_bytes

    data = b64encode(png_bytes(figure)).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{alt}" style="max-width:23em">'
