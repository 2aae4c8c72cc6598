"""The module that is traced: pictures in, `logits` and `embedding` out, whatever the model is made of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.config import ViTConfig
from vitrail.errors import InputError, printable
from vitrail.export.grid import Sides, check_free, free
from vitrail.export.resize import Levels, Normalise, check_resize
from vitrail.fields import show
from vitrail.model import ViT
from vitrail.preprocess import Preprocess
from vitrail.weights.bundle import Bundle
from vitrail.weights.describe import resize_of


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the graph shall take. The batch is always free."""

    any_size: bool = False
    """Pictures of other sizes too: positions are resampled inside the graph."""
    whole: bool = False
    """8-bit pictures (B, h, w, C) as they are: resizing and normalising lie inside the graph."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """How positions are resampled, as `resample.resize_grid` takes it."""

    @property
    def input(self) -> str:
        return "pictures" if self.whole else "images"


def plan_for(bundle: Bundle, *, dynamic: tuple[str, ...] = (), with_preprocess: bool = False) -> Plan:
    """The plan for a model, or the field that stands in the way."""
    config = bundle.model.config
    if config.input != "picture" or bundle.preprocess is None:
        got = f"input={show(config.input)}"
        raise InputError("Only a model of pictures can be exported.", got, "Use vt.load, and torch.export.")
    if with_preprocess:
        check_resize(bundle.preprocess)
    if "size" in dynamic:
        check_free(config)
        if with_preprocess:
            raise InputError(
                "With preprocessing inside, pictures may have any size, and the model gets its own.",
                "--with-preprocess and --dynamic size",
                "Leave out one of the two.",
            )
    return Plan(any_size="size" in dynamic, whole=with_preprocess, how=resize_of(bundle.source))


class Graph(nn.Module):
    """A model in evaluation, in float32 on the CPU, with what the plan puts round it.

    Gives (logits, embedding), without logits where there is no head; and for whole pictures, last, the
    levels that the model saw: a proof looks at them, nobody else.
    """

    def __init__(self, model: ViT, preprocess: Preprocess, plan: Plan) -> None:
        super().__init__()
        self.sides = Sides()
        model = copy.deepcopy(model).to(device="cpu", dtype=torch.float32).eval().requires_grad_(False)
        self.model = free(model, self.sides, plan.how) if plan.any_size else model
        self.plan, self.config = plan, model.config
        self.levels = Levels(preprocess) if plan.whole else None
        self.normalise = Normalise(preprocess) if plan.whole else None

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        images, seen = pictures, []
        if self.levels is not None and self.normalise is not None:
            levels = self.levels(pictures)
            images, seen = self.normalise(levels), [levels]
        embedding = self.encode(images) if self.plan.any_size else self.model.encode(images).pooled
        logits = (self.model.head(embedding),) if self.config.classes else ()
        return *logits, embedding, *seen

    def encode(self, images: Tensor) -> Tensor:
        """ViT.encode for a size that is not the config's."""
        model = self.model
        down, across = self.config.patch_pixels
        self.sides.h, self.sides.w = images.shape[2] // down, images.shape[3] // across
        z = model.tokens(images)
        if model.prefix is not None:
            z = torch.cat([model.prefix.expand(z.shape[0], -1, -1), z], dim=1)
        z = model.norm_pre(model.position(z))
        for index, block in enumerate(model.blocks):
            z = z if index == 0 else model.position.again(z)
            z = block(z, turn=model.position.turn)
        return model.finish(z).pooled

    @property
    def outputs(self) -> list[str]:
        """Names of what forward gives."""
        return [
            *(["logits"] if self.config.classes else []),
            "embedding",
            *(["pixels"] if self.levels else []),
        ]


def trace(graph: Graph, preprocess: Preprocess) -> ExportedProgram:
    """The graph as torch.export sees it, with a free batch, and free sides where the plan says so."""
    config, free_axes = graph.config, {0: Dim("batch", min=1)}
    if not graph.plan.whole:
        example = torch.zeros(2, *config.input_shape)
        if graph.plan.any_size:
            free_axes |= free_sides(config)
            down, across = config.patch_pixels
            example = torch.zeros(2, config.channels, 3 * down, 5 * across)
    elif preprocess.resize == "none":
        example = torch.zeros(2, *preprocess.target, config.channels, dtype=torch.uint8)
    else:
        free_axes |= {1: Dim("height", min=1), 2: Dim("width", min=1)}
        example = torch.zeros(2, 50, 60, config.channels, dtype=torch.uint8)
    with quiet(), explained():
        return torch.export.export(graph, (example,), dynamic_shapes=(free_axes,))


def free_sides(config: ViTConfig) -> dict[int, Any]:
    """Sides of whole patches, two or more of them: with one, torch would see an axis to be broadcast."""
    down, across = config.patch_pixels
    return {2: down * Dim("rows", min=2), 3: across * Dim("columns", min=2)}


@contextmanager
def quiet() -> Iterator[None]:
    """Compilers speak of themselves in warnings and logs; what concerns a user comes as an error."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def explained() -> Iterator[None]:
    """An error of the compiler as one of ours."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = next(iter(str(cause).strip().splitlines()), "")
        raise InputError(
            "The model must be one that torch can trace.",
            f"{type(cause).__name__}: {printable(reason, 300)}".rstrip("."),
            "Export another, or without --dynamic size; the vitrail file itself works everywhere.",
        ) from error
