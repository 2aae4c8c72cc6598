"""report.html at the end of a run: evaluate the best weights and write the page."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

from vitrail.base.errors import FileError, MissingExtra, VitrailError, option, printable
from vitrail.base.safe_files import DISK_FULL
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.training.callbacks import Callback
from vitrail.training.run_plan import RunPlan
from vitrail.views.html_page import check_extras, write_page
from vitrail.views.run_page import REPORT_NAME, run_page
from vitrail.weights.bundle.bundle import Bundle


def write_report(out: Path, bundle: Bundle, plan: RunPlan, callback: Callback) -> None:
    """Evaluate the best weights and write report.html, unless it exists.

    A finished run does not fail because of its report: an error becomes a message. Only a full disk is
    raised, since more than the page may be missing then. All processes evaluate; the main one writes.
    """
    data, ranks = plan.data, plan.ranks
    try:
        missing = ranks.is_main and not (out / REPORT_NAME).exists()
        if missing:
            check_extras()
    except MissingExtra:
        callback.on_message("No report: install vitrail[inspect].")
        missing = False
    if not ranks.any(missing):
        return
    try:
        on_device = replace(bundle, model=copy.deepcopy(bundle.model).to(plan.compute.device))
        evaluation = evaluate(on_device, data, split="val" if data.val else "test")
        if ranks.is_main:
            write_page(out / REPORT_NAME, run_page(out, bundle, data, evaluation))
    except OSError as error:
        if error.errno in DISK_FULL:
            name, reason = printable(out / REPORT_NAME), printable(error.strerror)
            raise FileError(
                f"the report {name} could not be written: {reason}. The run itself is complete and saved. "
                f"Free some disk space, then write the report with {option('resume', True)}."
            ) from error
        where = f"{printable(error.filename)}: " if error.filename else ""
        callback.on_message(f"No report: {where}{printable(error.strerror or error)}.")
    except Exception as error:  # whatever it is, the run is finished
        reason = str(error) if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
        callback.on_message(f"No report: {printable(reason, 400)}")
