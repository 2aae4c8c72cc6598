"""Evaluate a model on a data set: one forward pass over the images, then everything computed from it.

result = vt.evaluate("pets.safetensors", "pets/", probe=["knn"])
result.metrics.top1, result.calibration.temperature, result.probes
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vitrail.base.errors import InputError, printable
from vitrail.base.fields import short_repr
from vitrail.base.summary import Summary
from vitrail.evaluation.calibration import Calibration, calibrate, check_target_accuracy
from vitrail.evaluation.forward import BATCH, run_split
from vitrail.evaluation.metrics import (
    ClassificationMetrics,
    ImagePredictions,
    RealAccuracy,
    compute_metrics,
    predict_images,
    real_accuracy,
)
from vitrail.evaluation.probes import Layers, ProbeResult, check_layers, check_probes, run_probes
from vitrail.evaluation.selection import Progress, read_real_labels, select_images
from vitrail.evaluation.trained_images import OutOfDistribution, TrainedOn, count_flagged, score_others
from vitrail.fast.accelerate import Speedup, accelerate_bundle
from vitrail.images.classes import ClassNames
from vitrail.images.content import content_keys
from vitrail.images.formats.sources import Split
from vitrail.images.loader import CorruptFiles
from vitrail.model import ViT
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.scores import DEFAULT_THRESHOLD, Scores
from vitrail.weights.load import as_bundle

_MAX_BATCH = 1_000_000


@dataclass(frozen=True, repr=False)
class Evaluation(Summary):
    """Result of evaluating a model on a data set."""

    data: str
    split: str
    images: int
    """Images in the split; `metrics.count` of them could be read."""
    classes: list[str]
    metrics: ClassificationMetrics | None
    """None for a model without a head."""
    calibration: Calibration | None = None
    """None for multi-label data."""
    real: RealAccuracy | None = None
    probes: list[ProbeResult] = field(default_factory=list)
    corrupt: dict[str, str] = field(default_factory=dict)
    """Images that could not be read, with the reason. They are excluded from all numbers."""
    notes: list[str] = field(default_factory=list)
    """Automatic decisions, one sentence each."""
    seconds: float = 0.0
    predictions: ImagePredictions | None = field(default=None, compare=False)
    """The prediction for each image that could be read; None for a model without a head."""
    trained_on: TrainedOn | None = None
    """The images that the model was trained on; None if its file does not say which these were."""
    out_of_distribution: OutOfDistribution | None = None
    """The images that are unlike those of the training set; None if the file has no statistics of these."""
    evaluated: Split | None = field(default=None, compare=False)
    """The images, with labels that count in `classes`."""

    def first_line(self) -> str:
        """Which images were evaluated, and how many of them the model was trained on."""
        count = f"{self.images:,} image{'s' * (self.images != 1)}"
        data = printable(self.data)
        every = self.split == "all"
        of = f"All {count} of {data}." if every else f"The {self.split} split of {data}: {count}."
        return of if self.trained_on is None else f"{of} {self.trained_on.sentence()}"

    def summary(self) -> dict[str, str]:
        """The images, and the main metrics."""
        rows = {"images": self.first_line()}
        if (metrics := self.metrics) is not None:
            values = {
                "accuracy": metrics.top1,
                "top-5 accuracy": metrics.top5,
                "mean average precision": metrics.mean_ap,
                "macro-F1": metrics.macro_f1,
                "calibration error": metrics.ece,
            }
            rows |= {name: f"{value:.2%}" for name, value in values.items() if value is not None}
        if self.out_of_distribution is not None:
            rows["out of distribution"] = self.out_of_distribution.sentence()
        if best := max(self.probes, key=lambda probe: probe.top1, default=None):
            rows["best probe"] = f"{best.probe} {best.setting} at block {best.layer}: {best.top1:.2%}"
        if self.corrupt:
            rows["could not be read"] = f"{len(self.corrupt):,}"
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The result as nested dictionaries and lists, ready for JSON; without the images."""
        fields = asdict(replace(self, predictions=None, evaluated=None))
        del fields["evaluated"]
        rows = None if self.predictions is None else list(self.predictions.as_rows())
        return {**fields, "predictions": rows}


def evaluate(
    bundle: Bundle | ViT | str | Path,
    data: Any,
    *,
    split: str | None = None,
    classes: ClassNames | None = None,
    map: Mapping[str, str] | None = None,
    batch: int = BATCH,
    workers: int | Literal["auto"] = "auto",
    real: str | Path | Sequence[Sequence[int]] | None = None,
    probe: Sequence[str] = (),
    layers: Layers = None,
    target_accuracy: float = 0.95,
    speedup: Speedup | None = None,
    progress: Progress = lambda split, done, total: None,
) -> Evaluation:
    """Evaluate a model on a data set. Images that cannot be read are listed and skipped.

    Args:
        bundle: a bundle or a ViT with default preprocessing, evaluated where it is; or anything that
            `vitrail.load` accepts, evaluated on a GPU if one can be used.
        data: a data set, or anything that `open_dataset` accepts. It may lack classes of the model, and
            have a test set only.
        split: train, val, test or all. By default test, or val if there is no test split, or all images if
            the data has no splits; then train and val are those of training by default.
        classes: names for numbered classes of the data, as `vitrail.train` takes them: a list, a mapping from
            class to name, or a file.
        map: names of the data's classes that the model has under other names: {"tabby": "cat"}.
        batch: images per forward pass; it changes results by rounding only, and the number of
            torch.distributed processes not at all.
        workers: processes or threads that decode files; "auto" chooses by the cores and the images.
        real: ImageNet-ReaL labels, or a file with them.
        probe: any of knn, linear and fewshot; they are fitted on the training split.
        layers: blocks to probe, counted from 0, or "all". By default the last block.
        target_accuracy: the accuracy that predictions above the confidence threshold must reach.
        speedup: how to accelerate the model: `Speedup(precision="int8", calibration="photos/")`. By default
            it is computed in bf16 on a GPU, and as it is on a CPU. The notes say what was done. Probes need
            the model as it is.
        progress: called as progress(split, images done, images in total); while the rows of a table are read,
            as progress("reading rows", rows done, None).
    """
    start = time.perf_counter()
    probes = check_probes([probe] if isinstance(probe, str) else probe) if probe else ()
    check_target_accuracy(target_accuracy)
    if not isinstance(batch, int) or not 1 <= batch <= _MAX_BATCH:
        raise InputError(f"batch must be an integer from 1 to {_MAX_BATCH:,}, not {short_repr(batch)}.")
    bundle = as_bundle(bundle, default_device="auto")
    config = bundle.model.config
    if config.classes or not probes:
        bundle.require_classes('give it some with bundle.zero_shot(["cat", "dog"]).')
    selected = select_images(bundle, data, split, map, probes, classes, progress)
    images, labels, notes = selected.images, selected.images.labels, selected.notes
    real_labels = None if real is None else read_real_labels(real, images.names, config.classes, notes)
    blocks = check_layers(layers, config.depth) if probes else []
    if speedup is not None and probes:
        raise InputError("Probes read the features inside the model itself; remove probe or the precision.")
    if speedup is not None and bundle.native is not None:
        raise InputError(
            "The model was trained on images in their own shape, and an accelerated model takes one shape; "
            "remove precision."
        )
    accelerated = None
    if not probes and bundle.native is None:  # both need the code of the model itself
        accelerated = accelerate_bundle(bundle, speedup)
        notes += accelerated.report.sentences() if accelerated is not None else []
    corrupt = CorruptFiles("skip")

    run = partial(
        run_split,
        bundle,
        layers=blocks,
        batch=batch,
        workers=workers,
        corrupt=corrupt,
        progress=progress,
        accelerated=accelerated,
    )
    overlap, fingerprint = None, bundle.fingerprint
    keys = None
    if fingerprint is not None:
        keys = content_keys(images, selected.source, partial(progress, "content keys"))
    outputs = run(images, name=selected.split)
    valid = outputs.valid
    if not valid.any():
        reason = next(iter(corrupt.reasons.values()), "check the data")
        raise InputError(
            f"None of the {len(valid):,} images of {printable(selected.data)} (split {selected.split}) could "
            f"be read. The first error: {reason}"
        )
    metrics = calibration = predictions = matched = None
    if selected.columns is not None:
        matched = outputs.logits.numpy()[:, selected.columns]
        scale = match_scale(bundle, selected.columns, labels.ndim == 2)
        metrics = compute_metrics(matched, labels, selected.classes, valid, images.names, scores=scale)
        predictions = predict_images(matched, labels, selected.classes, valid, images.names, scale)
        if labels.ndim == 1:
            stored = dict(bundle.card.metrics)
            calibration = calibrate(matched[valid], labels[valid], target_accuracy, stored, scale.activation)
            if not calibration.fitted:
                notes.append("No temperature could be fitted to these images; it stays 1.")
    if fingerprint is not None and keys is not None:
        trained = fingerprint.contains(keys)
        overlap = score_others(trained, valid, matched, labels, selected.classes, fingerprint.is_exact)
    results = []
    if probes:
        fitted = run(selected.train, name="train")
        train, test = fitted.labeled(selected.train.labels), outputs.labeled(labels)
        device = next(bundle.model.parameters()).device
        results = run_probes(probes, train, test, len(selected.classes), blocks, device)
        if selected.split in ("train", "all"):
            notes.append("The probes were evaluated on the images they were fitted on.")
    return Evaluation(
        data=selected.data,
        split=selected.split,
        images=len(images),
        classes=selected.classes,
        metrics=metrics,
        calibration=calibration,
        real=real_accuracy(outputs.logits.numpy(), real_labels, valid) if real_labels else None,
        probes=results,
        corrupt=corrupt.reasons,
        notes=notes,
        seconds=time.perf_counter() - start,
        predictions=predictions,
        trained_on=overlap,
        out_of_distribution=None if outputs.ood is None else count_flagged(outputs.ood[valid]),
        evaluated=images,
    )


def match_scale(bundle: Bundle, columns: Sequence[int], multilabel: bool) -> Scores:
    """How the logits of these columns become scores, as `predict` computes them.

    Multi-label data needs sigmoid scores: a file that does not record thresholds is evaluated at 0.5.
    """
    classes, metrics = bundle.model.config.classes, bundle.card.metrics
    scale = bundle.scores.calibrated(bundle.labels, classes, metrics).select(columns)
    if multilabel and not scale.multilabel:
        thresholds = (DEFAULT_THRESHOLD,) * len(columns)
        return Scores(labels=scale.labels, activation="sigmoid", thresholds=thresholds)
    return scale
