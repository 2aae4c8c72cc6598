"""report.html at the end of a run: evaluate the best weights and write the page."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from vitrail.base.errors import FileError, MissingExtra, VitrailError, option, printable
from vitrail.base.safe_files import DISK_FULL
from vitrail.evaluation.evaluate_model import Evaluation, evaluate
from vitrail.images.formats.sources import Dataset
from vitrail.training.callbacks import Callback
from vitrail.training.parallel import ProcessGroup
from vitrail.views.html_page import check_extras, write_page
from vitrail.views.run_page import REPORT_NAME, run_page
from vitrail.weights.bundle.bundle import Bundle


def write_report(
    out: Path,
    bundle: Bundle,
    dataset: Dataset,
    ranks: ProcessGroup,
    device: torch.device,
    callback: Callback,
) -> None:
    """Evaluate the best weights and write report.html, unless it exists.

    A finished run does not fail because of its report: an error becomes a message. Only a full disk is
    raised, since more than the page may be missing then. All processes evaluate; the main one writes.
    """
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
        evaluation = _evaluate_best(bundle, dataset, device)
        if ranks.is_main:
            write_page(out / REPORT_NAME, run_page(out, bundle, dataset, evaluation))
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


def _evaluate_best(bundle: Bundle, dataset: Dataset, device: torch.device) -> Evaluation:
    """Evaluate the model on the held-out images, on the device it was trained on."""
    on_device = replace(bundle, model=copy.deepcopy(bundle.model).to(device))
    return evaluate(on_device, dataset, split="val" if dataset.val else "test")
