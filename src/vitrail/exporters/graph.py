"""The module that is traced: images in, `logits` and `embedding` out."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.base.errors import InputError, option
from vitrail.base.fields import short_repr
from vitrail.exporters.resize import Normalize, ResizeToInput, check_resize
from vitrail.fast.onnx_graph import explain_errors, quiet
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.predict.engine import output_names
from vitrail.predict.onnx_file import EXPORT_KEY, FEATURES_KEY, MODEL_KEY
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.families.recognize import position_resize_options


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The input of the graph. The batch size is always dynamic."""

    any_size: bool = False
    """Whether images may have other sizes; positions are then resampled inside the graph."""
    with_preprocess: bool = False
    """Whether the graph takes uint8 images (B, h, w, C), and resizes and normalizes them itself."""
    resample: Mapping[str, Any] = field(default_factory=dict)
    """Options of `resample.resize_grid`, for the positions."""

    @property
    def input(self) -> str:
        return "raw_images" if self.with_preprocess else "images"


def plan_for(bundle: Bundle, *, dynamic: tuple[str, ...] = (), with_preprocess: bool = False) -> Plan:
    """The plan for a model; raises an error that names the field that prevents it."""
    config = bundle.model.config
    if config.input != "image" or bundle.preprocess is None:
        raise InputError(
            f"Only a model of images can be exported, and this one has input={short_repr(config.input)}; "
            "load it with vt.load and call torch.export yourself."
        )
    if with_preprocess:
        check_resize(bundle.preprocess)
    if "size" in dynamic:
        copy.deepcopy(bundle.model).accept_any_size()  # raises an error if it cannot
        if with_preprocess:
            raise InputError(
                f"{option('with-preprocess', True)} resizes any image to the size of the model, so it cannot "
                "be combined with a dynamic size; drop one of the two."
            )
    return Plan(
        any_size="size" in dynamic,
        with_preprocess=with_preprocess,
        resample=position_resize_options(bundle.source),
    )


class Graph(nn.Module):
    """A model in eval mode, in float32, with preprocessing in front if the plan says so.

    Returns (logits, embedding), without logits if there is no head. With preprocessing, the last output is
    the resized pixels, which only the proof uses.
    """

    def __init__(
        self, model: ViT, preprocess: Preprocess, plan: Plan, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        model = copy.deepcopy(model).to(device=device, dtype=torch.float32).eval().requires_grad_(False)
        self.model = model.accept_any_size(**plan.resample) if plan.any_size else model
        self.plan, self.config = plan, model.config
        self.resize = ResizeToInput(preprocess) if plan.with_preprocess else None
        self.normalize = Normalize(preprocess) if plan.with_preprocess else None

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        resized = []
        if self.resize is not None and self.normalize is not None:
            pixels = self.resize(images)
            images, resized = self.normalize(pixels), [pixels]
        embedding = self.model.encode(images).pooled
        logits = (self.model.head(embedding),) if self.config.classes else ()
        return *logits, embedding, *resized

    @property
    def outputs(self) -> list[str]:
        """The names of what forward returns."""
        return output_names(self.config) + (["pixels"] if self.resize else [])


def trace(graph: Graph, preprocess: Preprocess) -> ExportedProgram:
    """Trace the graph with torch.export: a dynamic batch, and dynamic sides if the plan says so."""
    config, dynamic_axes = graph.config, {0: Dim("batch", min=1)}
    if not graph.plan.with_preprocess:
        example = torch.zeros(2, *config.input_shape)
        if graph.plan.any_size:
            dynamic_axes |= _dynamic_sides(config)
            down, across = config.patch_pixels
            example = torch.zeros(2, config.channels, 3 * down, 5 * across)
    elif preprocess.resize == "none":
        example = torch.zeros(2, *preprocess.target, config.channels, dtype=torch.uint8)
    else:
        dynamic_axes |= {1: Dim("height", min=1), 2: Dim("width", min=1)}
        example = torch.zeros(2, 50, 60, config.channels, dtype=torch.uint8)
    example = example.to(next(graph.model.parameters()).device)
    with quiet(), explain_errors():
        return torch.export.export(graph, (example,), dynamic_shapes=(dynamic_axes,))


def _dynamic_sides(config: ViTConfig) -> dict[int, Any]:
    """Sides of at least two patches: torch would take an axis of one for a broadcast axis."""
    down, across = config.patch_pixels
    return {2: down * Dim("rows", min=2), 3: across * Dim("columns", min=2)}


def build_metadata(bundle: Bundle, plan: Plan) -> dict[str, str]:
    """The metadata: the description in a vitrail file, and what this graph takes."""
    description = {**bundle.describe(), "source": None}  # the original tensors are not in this file
    graph = {"takes": plan.input, "any_size": plan.any_size}
    metadata = {MODEL_KEY: json.dumps(description), EXPORT_KEY: json.dumps(graph)}
    if bundle.statistics is not None:
        metadata[FEATURES_KEY] = json.dumps(bundle.statistics.describe())
    return metadata
