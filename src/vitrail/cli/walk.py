"""`vitrail walk`: one image through a model, stage by stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from vitrail.base.errors import InputError, printable
from vitrail.cli.options import ModelOptions
from vitrail.cli.outputs import check_new_files
from vitrail.cli.walk_table import show_walk

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess
    from vitrail.model.config import ViTConfig
    from vitrail.views.walk import Stage
    from vitrail.weights.bundle.bundle import Bundle

_WEIGHT_SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin")
_MAX_TOKENS = 5_000  # the scores of every head are recorded: T x T numbers each
_MAX_VALUES = 4_096  # of larger tensors the JSON has only a summary


def walk(
    model: str = Argument(..., help='A weight file, or a model size such as "mu/4" or "B/16@384".'),
    image: Path = Argument(..., help="An image file: JPEG, PNG, WebP, BMP, GIF or TIFF."),
    block: int = Option(0, help="The block to show in detail, from 0."),
    head: int = Option(0, help="The attention head to show, from 0."),
    token: int = Option(0, help="The token to follow, from 0: class token, then patches."),
    json_file: Path | None = Option(
        None, "--json", help="Save the stages and their values to this new JSON file."
    ),
    html_file: Path | None = Option(
        None, "--html", help="Save the stages with figures to this new HTML file."
    ),
    seed: int | None = Option(
        None, min=0, max=2**63 - 1, help="Random seed of the weights of a model size.", show_default="0"
    ),
    labels: str | None = Option(
        None,
        metavar="A,B,...|FILE",
        help="The names of the classes, or a file with them: one on each line, or JSON with a list or "
        "with names by index. For a model with a text tower: any classes (zero-shot).",
    ),
    *,
    opening: ModelOptions,
) -> None:
    """Follow one image through a model, step by step.

    Each step shows its equation, shape, meaning and values. Blocks, heads and tokens count from 0. A weight
    file is used with its own preprocessing. A model size has random weights: the steps are real, the
    prediction means nothing. The page of --html has every block, head and token to choose from.
    """
    check_new_files({"--json": json_file, "--html": html_file})

    from rich.console import Console

    from vitrail.base.safe_files import write_text
    from vitrail.views import walk as steps
    from vitrail.views.walk.overview import top_classes

    bundle, weights = _load_model(model, seed, opening, labels)
    opening.print_device(bundle.model, "fp32")
    vit, activation = bundle.model, bundle.scores.activation
    pixels = read_image(image, bundle.preprocess)
    stages = steps.walk(vit, pixels, block=block, head=head, token=token, activation=activation)
    summary: dict[str, Any] = {"model": model, "weights": weights, "image": printable(image)}
    summary |= {"block": block, "head": head, "token": token}
    summary["token_name"] = steps.token_name(vit.config, token)
    answer = top_classes(stages, bundle.labels, bundle.scores.activation)
    summary["answer"] = [{"label": label, "probability": probability} for label, probability in answer]
    titles = summary | {"model": _short_name(model), "image": printable(image.name)}
    show_walk(stages, titles, vit.config, Console(highlight=False))
    if json_file is not None:
        write_text(json_file, as_json(stages, summary))
        print(f"Saved {printable(json_file)}")
    if html_file is not None:
        from vitrail.views.walk.encoder_stages import Recording
        from vitrail.views.walk.walk_page import fits_one_page, walk_page

        blocks = range(vit.config.depth) if fits_one_page(vit.config) else [block]
        titles["files"] = [printable(image), printable(model)]
        recording = Recording(vit, pixels, blocks, activation, bundle.preprocess)
        write_text(html_file, walk_page(recording, titles, answer))
        print(f"Saved {printable(html_file)}")


def _load_model(name: str, seed: int | None, opening: ModelOptions, labels: str | None) -> tuple[Bundle, str]:
    """The model with its preprocessing and labels, and a sentence about its weights."""
    import torch

    from vitrail.images.preprocess import Preprocess
    from vitrail.model import ViT
    from vitrail.model.device import place
    from vitrail.model.presets import preset
    from vitrail.weights.bundle.bundle import Bundle
    from vitrail.weights.model_settings import override_preprocess

    if name.startswith("hf:") or _is_file(name):
        if seed is not None:
            raise InputError(
                f"--seed is for random weights, and {printable(name)} has its own; remove --seed."
            )
        bundle = opening.load(name, precision=None)
        if labels is not None:
            from vitrail.views.walk.label_file import name_classes

            bundle = name_classes(bundle, labels)
        _check_tokens(name, bundle.model.config)
        return bundle, f"The weights of {_short_name(name)}."
    if labels is not None:
        raise InputError(
            f"--labels names the classes of a weight file, and {name} is a model size; remove it."
        )
    fields = opening.overrides()
    preprocess_fields = fields.pop("preprocess", None)
    if "checkpoint_key" in fields:
        raise InputError(f"checkpoint_key is for a torch.save file, and {name} is a model size; remove it.")
    config = preset(name, **fields)
    _check_tokens(name, config)
    seed = seed or 0
    torch.manual_seed(seed)
    half = (0.5,) * config.channels
    squash = Preprocess(size=config.pixels, interpolation="bicubic", mean=half, std=half)  # type: ignore[arg-type]
    weights = f"Random weights (seed {seed}), not trained: the steps are real, the prediction means nothing."
    preprocess = override_preprocess(squash, preprocess_fields, config, [])
    vit = ViT(config)
    place(vit, opening.device)
    return Bundle(model=vit, preprocess=preprocess), weights


def _short_name(model: str) -> str:
    """The file name of a path to a model; other names as they are."""
    is_path = not model.startswith("hf:") and _is_file(model)
    return printable((is_path and Path(model).name) or model)


def _is_file(model: str) -> bool:
    return Path(model).exists() or Path(model).suffix in _WEIGHT_SUFFIXES


def _check_tokens(name: str, config: ViTConfig) -> None:
    if config.tokens > _MAX_TOKENS:
        raise InputError(
            f"{printable(name)} has {config.tokens:,} tokens, and vitrail walk takes at most "
            f"{_MAX_TOKENS:,}: it records a score for every pair; use a larger patch or a smaller image."
        )


def read_image(path: Path, preprocess: Preprocess | None) -> Tensor:
    """An image file, preprocessed for the model: (C, H, W)."""
    from vitrail.images.decode import open_image

    if preprocess is None or preprocess.channels not in (1, 3, 4):
        raise InputError(
            "An image file has 1, 3 or 4 channels, and this model takes other inputs; use a model for "
            "images, or vitrail.walk in Python with a tensor."
        )
    return preprocess(open_image(path))


# ---- files ----------------------------------------------------------------------------------


def as_json(stages: list[Stage], summary: dict[str, Any]) -> str:
    """The summary and the stages; tensors with many values only as statistics."""
    from vitrail.views.walk.stage import finite_or_none, summarize

    entries = []
    for stage in stages:
        entry: dict[str, Any] = {"name": stage.name, "equation": stage.equation, "meaning": stage.meaning}
        entry |= {"shape": stage.shape, "summary": summarize(stage.tensor)}
        if stage.tensor.numel() <= _MAX_VALUES:
            entry["values"] = finite_or_none(stage.tensor.tolist())
        entries.append(entry)
    return json.dumps({**summary, "stages": entries}, allow_nan=False)
