"""Evaluate a model on a data set: one forward pass over the images, then everything computed from it.

result = vt.evaluate("pets.safetensors", "pets/", probe=["knn"])
result.scores.top1, result.calibration.temperature, result.probes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.base.errors import InputError, printable
from vitrail.base.fields import short_repr
from vitrail.base.summary import Summary
from vitrail.evaluation.calibration import Calibration, calibrate, check_target_accuracy
from vitrail.evaluation.forward import BATCH, run_model
from vitrail.evaluation.metrics import ClassificationMetrics, compute_metrics
from vitrail.evaluation.ood import OutOfDistribution, count_flagged
from vitrail.evaluation.overlap import TrainedOn, find_trained, score_others
from vitrail.evaluation.predictions import ImagePredictions, predict_images
from vitrail.evaluation.probes import (
    LabeledFeatures,
    Layers,
    ProbeResult,
    build_collector,
    build_pooled_collector,
    check_layers,
    check_probes,
    feature_parts,
    run_probes,
    split_columns,
)
from vitrail.evaluation.real import read_real_labels, real_accuracy
from vitrail.evaluation.selection import Progress, Selection, select_images
from vitrail.fast.accelerate import Speedup, accelerate_bundle
from vitrail.fast.inference_routes import Accelerated
from vitrail.images.class_names import ClassNames
from vitrail.images.formats.sources import Split
from vitrail.images.loader import CorruptFiles
from vitrail.model import ViT
from vitrail.model.model_memory import check_fits, forward_bytes
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.feature_statistics import FeatureStatistics
from vitrail.weights.bundle.own_shape import reading_preprocess
from vitrail.weights.bundle.scores import DEFAULT_THRESHOLD, Scores
from vitrail.weights.load import as_bundle
from vitrail.weights.text.zero_shot import check_classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 64 << 30  # of features in memory
_MAX_BATCH = 1_000_000


@dataclass(frozen=True)
class RealAccuracy:
    """Accuracy by ImageNet-ReaL labels, and the number of images that have any."""

    accuracy: float
    count: int


@dataclass(frozen=True, repr=False)
class Evaluation(Summary):
    """Result of evaluating a model on a data set."""

    data: str
    split: str
    images: int
    """Images in the split; `scores.count` of them could be read."""
    classes: list[str]
    metrics: ClassificationMetrics | None
    """Classification metrics; None for a model without a head."""
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
        of = (
            f"All {count} of {data}."
            if self.split == "all"
            else f"The {self.split} split of {data}: {count}."
        )
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
        batch: images per forward pass. The number of torch.distributed processes does not change the results,
            the batch only by rounding: the loss in the eighth digit or so.
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
    probes = check_probes([probe] if isinstance(probe, str) else probe)
    check_target_accuracy(target_accuracy)
    if not isinstance(batch, int) or not 1 <= batch <= _MAX_BATCH:
        raise InputError(f"batch must be an integer from 1 to {_MAX_BATCH:,}, not {short_repr(batch)}.")
    bundle = as_bundle(bundle, default_device="auto")
    config = bundle.model.config
    if config.classes or not probes:
        check_classes(bundle, 'give it some with bundle.zero_shot(["cat", "dog"]).')
    selected = select_images(bundle, data, split, map, probes, classes, progress)
    name, images, names, columns = selected.split, selected.images, selected.classes, selected.columns
    notes, multilabel = selected.notes, images.labels.ndim == 2
    real_labels = None if real is None else read_real_labels(real, images.names, config.classes, notes)
    blocks = check_layers(layers, config.depth) if probes else []
    corrupt = CorruptFiles("skip")
    options: dict[str, Any] = {"batch": batch, "workers": workers, "corrupt": corrupt, "progress": progress}
    if speedup is not None and probes:
        raise InputError("Probes read the features inside the model itself; remove probe or the precision.")
    if speedup is not None and bundle.native is not None:
        raise InputError(
            "The model was trained on images in their own shape, and an accelerated model takes one shape; "
            "remove precision."
        )
    is_own_code = bool(probes) or bundle.native is not None
    if not is_own_code and (accelerated := accelerate_bundle(bundle, speedup)) is not None:
        options["accelerated"] = accelerated
        notes += accelerated.report.sentences()

    trained = find_trained(
        bundle.fingerprint, images, selected.source, lambda done, total: progress("content keys", done, total)
    )
    logits, features, ood_scores, valid = _run_split(bundle, images, blocks, name, **options)
    if not valid.any():
        reason = next(iter(corrupt.reasons.values()), "check the data")
        raise InputError(
            f"None of the {len(valid):,} images of {printable(selected.data)} (split {name}) could be read. "
            f"The first error: {reason}"
        )
    metrics = calibration = predictions = matched = None
    if columns is not None:
        matched = logits.numpy()[:, columns]
        scale = match_scale(bundle, columns, multilabel)
        metrics = compute_metrics(matched, images.labels, names, valid, images.names, scores=scale)
        predictions = predict_images(matched, images.labels, names, valid, images.names, scale)
        if not multilabel:
            stored = dict(bundle.card.metrics)
            calibration = calibrate(
                matched[valid], images.labels[valid], target_accuracy, stored, scale.activation
            )
            if not calibration.fitted:
                notes.append("No temperature could be fitted to these images; it stays 1.")
    overlap = None
    if trained is not None and bundle.fingerprint is not None:
        exact = bundle.fingerprint.is_exact
        overlap = score_others(trained, valid, matched, images.labels, names, exact)
    results = []
    if probes:
        test = LabeledFeatures(features[valid], torch.from_numpy(images.labels)[valid])
        results = _probe(bundle, selected, probes, blocks, test, options)
        if name in ("train", "all"):
            notes.append("The probes were evaluated on the images they were fitted on.")
    return Evaluation(
        data=selected.data,
        split=name,
        images=len(images),
        classes=names,
        metrics=metrics,
        calibration=calibration,
        real=RealAccuracy(*real_accuracy(logits.numpy(), real_labels, valid)) if real_labels else None,
        probes=results,
        corrupt=corrupt.reasons,
        notes=notes,
        seconds=time.perf_counter() - start,
        predictions=predictions,
        trained_on=overlap,
        out_of_distribution=None if ood_scores is None else count_flagged(ood_scores[valid]),
        evaluated=images,
    )


def _probe(
    bundle: Bundle,
    selected: Selection,
    names: Sequence[str],
    layers: Sequence[int],
    test: LabeledFeatures,
    options: dict[str, Any],
) -> list[ProbeResult]:
    """Collect the features of the training split and run the probes."""
    _, features, _, valid = _run_split(bundle, selected.train, layers, "train", **options)
    train = LabeledFeatures(features[valid], torch.from_numpy(selected.train.labels)[valid])
    return run_probes(names, train, test, len(selected.classes), layers, _device(bundle))


def _device(bundle: Bundle) -> torch.device:
    return next(bundle.model.parameters()).device


# ---- the forward pass -----------------------------------------------------------------------


def _run_split(
    bundle: Bundle,
    images: Split,
    layers: Sequence[int],
    name: str,
    *,
    batch: int,
    workers: int | Literal["auto"],
    corrupt: CorruptFiles,
    progress: Progress,
    accelerated: Accelerated | None = None,
) -> tuple[Tensor, Tensor, NDArray[np.float32] | None, NDArray[np.bool_]]:
    """Run the model on a split.

    Returns:
        Logits (N, K), features (N, layers, parts, D) of the given blocks, the scores (N,) by which images are
        out of distribution if the file has statistics for them, and which images are valid (N,).
    """
    model, config, statistics = bundle.model, bundle.model.config, bundle.statistics
    columns = config.classes + len(layers) * len(feature_parts(config)) * config.width
    columns += statistics is not None
    if 4 * columns * len(images) > MAX_BYTES:
        raise InputError(
            f"Features of {columns:,} numbers for each of {len(images):,} images do not fit in memory; probe "
            "fewer layers or fewer images."
        )
    if _device(bundle).type == "cpu":
        count = min(batch, len(images))
        do = "use a smaller batch or image size"
        check_fits(forward_bytes(config, count), config, count, "An evaluation", do)
    distributed = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    rows, valid = run_model(
        model,
        images,
        reading_preprocess(bundle),
        compute=_collector(model, layers, statistics, accelerated),
        batch=batch,
        rank=rank,
        ranks=ranks,
        workers=workers,
        corrupt=corrupt,
        progress=lambda done: progress(name, min(done * ranks, len(images)), len(images)),
    )
    if ranks > 1:
        rows, valid = _all_reduce(rows, valid, columns, corrupt, _device(bundle))
    logits, features, scores = split_columns(rows, config, layers)
    return logits, features, scores[:, 0].numpy() if statistics else None, valid.numpy() > 0


def _collector(
    model: ViT,
    layers: Sequence[int],
    statistics: FeatureStatistics | None,
    accelerated: Accelerated | None,
) -> Callable[[Tensor], Tensor] | None:
    """What computes the rows of an evaluation; None for the logits of the model itself."""
    if accelerated is not None:
        return build_pooled_collector(accelerated.outputs, model.config, statistics)
    return build_collector(model, layers, statistics) if layers or statistics else None


def _all_reduce(
    rows: Tensor, valid: Tensor, columns: int, corrupt: CorruptFiles, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sum the results of all processes, and merge their lists of corrupt files."""
    if rows.shape[1] != columns:  # a process without a batch does not know the width of a row
        rows = torch.zeros(len(rows), columns)
    sums = []
    for tensor in (rows, valid):
        on_device = tensor.to(device)
        dist.all_reduce(on_device)
        sums.append(on_device.cpu())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, corrupt.reasons)
    for names in gathered:
        corrupt.reasons |= names
    return sums[0], sums[1]


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
