"""The report on a cross-validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.base.errors import printable
from vitrail.views import charts
from vitrail.views.html_page import Figure, Page, Section, Table, percent
from vitrail.views.run_page import command_line

_HOW_TO_READ = (
    "Every image is predicted once, by a model that was not trained on it. The spread between folds has two "
    "causes: other images to predict, and another model, trained on other images. A difference between two "
    "settings that is smaller than the spread is no difference yet."
)


def folds_page(result: Mapping[str, Any]) -> Page:
    """Build the page from the contents of folds.json."""
    folds = result["folds"]
    low, high = (percent(min(1.0, max(0.0, end))) for end in result["interval"])
    images = sum(fold["val_images"] for fold in folds)
    scores = [fold["accuracy"] for fold in folds]
    lead = [
        f"{len(folds)} models were trained, each on the images of the other folds, and evaluated on their "
        f"own fold after the last epoch: {images:,} images in total."
    ]
    if result["unused_test_images"]:
        lead.append(f"The {result['unused_test_images']:,} images of the test set are in no fold.")
    rows = []
    for fold in folds:
        counts = (f"{fold[name]:,}" for name in ("val_images", "train_images"))
        rows.append([str(fold["number"]), percent(fold["accuracy"]), f"{fold['loss']:.3f}", *counts])
    header = ["fold", "accuracy", "loss", "images", "training images"]
    figures = [Figure(charts.scores(scores), "Accuracy of each fold, and their mean")]
    table = Table("Accuracy and loss of each fold", header, rows)
    return Page(
        title=f"Cross-validation on {printable(result['data'])}",
        lead=lead,
        headline=[
            (percent(result["mean"]), "mean accuracy"),
            (percent(result["deviation"]), "standard deviation between folds"),
            (f"{low} to {high}", "95 % confidence interval of the mean"),
        ],
        sections=[Section("Folds", figures=figures, tables=[table], how_to_read=_HOW_TO_READ)],
        command=command_line(result["environment"]),
    )
