"""The classroom page: a small trained model in one HTML file that runs it live in the browser.

The file contains the weights (little-endian, base64), a ViT in plain JavaScript (classroom/vit.js) and the
user interface (the other files). Matrices are stored as float16, half the size, if that changes no
answer: see `stored_model`. The page makes no network requests; its content security policy forbids them.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitrail.base.errors import InputError, MissingExtra, printable
from vitrail.base.fields import short_repr
from vitrail.base.safe_files import check_new, write_text
from vitrail.base.version import __version__
from vitrail.model import ViT
from vitrail.model.attention import attention_scale
from vitrail.model.config import ViTConfig, format_sides
from vitrail.views.figure_images import from_files
from vitrail.views.filters import is_smooth, smoothness
from vitrail.views.gallery import evenly_spaced
from vitrail.views.rollout import pooled_tokens
from vitrail.views.sample import sample_images
from vitrail.weights.bundle.bundle import Bundle, golden_inputs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PARTS = Path(__file__).parent / "classroom"
SCRIPTS = (
    *("vit.js", "map.js", "strips.js", "weight.js", "layers.js", "filters.js", "experiment.js"),
    *("matrix.js", "figure.js", "page.js", "tour.js", "sheet.js"),
)
STYLES = ("style.css", "parts.css")
MAX_PARAMETERS = 6_000_000  # a Ti/16 has 5.7 million
MAX_TOKENS = 1024  # attention is stored for every pair of them
EXAMPLES = 10
_MAX_CHANGE = 0.005  # of a probability, by float16 weights; the page shows whole percents

# What vit.js supports. A field that is not listed may have any value.
SUPPORTED: dict[str, tuple[object, ...]] = {
    "input": ("image",),
    "channels": (1, 3),
    "embedding": ("linear",),
    "embedding_norm": ("none",),
    "position": ("learned", "learned2d", "sincos1d", "sincos2d", "none"),
    "position_at": ("start",),
    "norm_pre": (False,),
    "block": ("pre-norm",),
    "norm": ("layer",),
    "qk_norm": (False,),
    "activation": ("gelu", "gelu-tanh", "relu"),
    "mlp": ("plain",),
    "mlp_hidden": (1,),
    "mlp_norm": (False,),
    "attention_norm": (False,),
    "linear_bias": (True,),
    "pool": ("class", "mean", "mean-all"),
    "head": ("linear",),
}


def write_classroom(
    bundle: Bundle, path: str | Path, name: str = "", examples: Sequence[Path] = ()
) -> list[str]:
    """Write the page, complete or not at all; return remarks about it, one sentence each.

    Args:
        path: a new file, which `check_page_path` accepts.
        name: the name of the model, if its card has none.
        examples: image files; at most ten of them, evenly spaced, become the examples of the page.
    """
    remarks = []
    _check_supported(bundle.model)
    names, pixels = [], None
    if examples:
        assert bundle.preprocess is not None  # every model of images has one
        batch = from_files([examples[i] for i in evenly_spaced(len(examples), EXAMPLES)], bundle.preprocess)
        names, pixels = batch.names, batch.pixels
    else:
        try:
            names, pixels = _built_in_examples(bundle.model.config)
        except MissingExtra as error:
            remarks.append(f"The page has no example images: {error}")
    text = _render(bundle, bundle.card.name or name, names, pixels)
    write_text(Path(path), text)
    size = len(text.encode()) / 1e6
    if size > 5:
        remarks.append(f"The page has {size:.0f} MB: too large for most mail, and slow to open on a phone.")
    return remarks


def check_page_path(path: Path) -> None:
    """Check that the name ends in .html and that the file is new."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"The name of a page must end in .html, and {printable(path)} does not.")
    check_new(path, "an export")


def _check_supported(model: ViT) -> None:
    """Raise an error that names the field or the property that the page does not support."""
    config = model.config
    for field, values in SUPPORTED.items():
        value = getattr(config, field)
        if value not in values:
            raise InputError(
                f"The page supports models with {field} {' or '.join(map(short_repr, values))}, not "
                f"{field}={short_repr(value)}; use vitrail inspect for this model."
            )
    if not config.classes:
        raise InputError(
            "The page needs a model with a head, and this one has classes=0; train a classifier."
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_PARAMETERS:
        raise InputError(
            f"The page supports at most {MAX_PARAMETERS:,} parameters, and this model has {count:,}; use a "
            "smaller model, or vitrail inspect for this one."
        )
    if config.tokens > MAX_TOKENS:
        sides, patch = format_sides(config.pixels), format_sides(config.patch_pixels)
        raise InputError(
            f"The page supports at most {MAX_TOKENS:,} tokens, and this model has {config.tokens:,} (size "
            f"{sides}, patches of {patch}); use a model with larger patches or a smaller size."
        )
    if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
        raise InputError("Some weights are infinite or NaN; use an earlier checkpoint.")


# ---- contents -------------------------------------------------------------------------


def _render(bundle: Bundle, name: str, names: Sequence[str], pixels: NDArray[np.uint8] | None) -> str:
    """The page as text."""
    stored, half = stored_model(bundle, pixels)
    tensors = {
        key: tensor.detach().cpu().float().numpy().astype("<f2" if half and _is_matrix(key) else "<f4")
        for key, tensor in _export_tensors(stored).items()
    }
    model = {
        **_describe_model(bundle),
        "name": printable(name or "a Vision Transformer"),
        "examples": [
            {"name": printable(name, 60), "pixels": base64.b64encode(one.tobytes()).decode()}
            for name, one in zip(names, () if pixels is None else pixels, strict=True)
        ],
        "tensors": [[key, array.size, array.dtype.str[1:]] for key, array in tensors.items()],
    }
    style = "".join(map(_read_part, STYLES))
    script = "".join(map(_read_part, SCRIPTS))
    parts = {
        "title": html.escape(model["name"]),
        "version": __version__,
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
        "style": style,
        "script": script,
        "model": json.dumps(model).replace("<", "\\u003c"),  # so that no label can close the script element
        "weights": base64.b64encode(b"".join(array.tobytes() for array in tensors.values())).decode(),
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: parts[match[1]], _read_part("page.html"))


def _read_part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """The hash by which a content security policy allows a script or a style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _describe_model(bundle: Bundle) -> dict[str, Any]:
    """The config, labels and preprocessing that vit.js and page.js need."""
    model, spec = bundle.model, bundle.preprocess
    assert spec is not None  # every model of images has one
    config = model.config
    labels = bundle.labels or [str(number) for number in range(config.classes)]
    _, reads = pooled_tokens(config)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "channels": config.channels,
        "size": config.pixels,
        "patch": config.patch_pixels,
        "grid": config.grid,
        "prefix": config.prefix_names,
        "width": config.width,
        "depth": config.depth,
        "heads": config.heads,
        "d": config.d,
        "mlp": config.F,
        "scale": attention_scale(config),
        "eps": config.eps,
        "activation": config.activation,
        "last_norm": config.pool_norm,
        "position": config.position,
        "reads": reads,
        "accuracy": _describe_accuracy(bundle),
        "filters": _describe_filters(model),
        "labels": [printable(label, 60) for label in labels],
        "scores": bundle.scores.activation,
        "thresholds": bundle.scores.thresholds,
        "preprocess": {
            **{"scale": spec.scale, "mean": spec.mean, "std": spec.std},
            "resized": spec.before_crop,  # before the center crop
            "shortest": spec.resize == "shortest",
        },
    }


def _describe_accuracy(bundle: Bundle) -> str:
    """How accurate the model is, by its card."""
    accuracy = bundle.card.metrics.get("accuracy")
    if accuracy is None:
        return "Its file does not say how accurate it is; vitrail evaluate measures that."
    return (
        f"Its card says that it predicts {100 * accuracy:.1f}% of the images held out from training "
        "correctly. The others it gets wrong, some with high confidence."
    )


def _describe_filters(model: ViT) -> str:
    """Whether the filters of E have structure, by the correlation of neighboring pixels."""
    height, width = model.config.patch_pixels
    if height * width == 1:
        return "A filter of one pixel has no shape."
    weight = cast("Any", model.tokens.proj).weight.detach().cpu().float().numpy()
    smooth = smoothness(weight.reshape(-1, height, width)) if weight.any() else 0.0
    number = f"{smooth:.2f}".replace("-", "−")
    measured = f"the correlation of neighboring pixels is {number} (1 in a constant filter, about 0 in noise)"
    if is_smooth(smooth):
        return (
            f"These filters have structure: {measured}. An untrained model has noise here; edges, gradients "
            "and colors were learned from the data."
        )
    return (
        f"The filters of this model have no structure that one could see: {measured}. Larger models of "
        "photographs have edges, gradients and colors here: docs/inspect.md shows those of DeiT-Ti."
    )


def _export_tensors(model: ViT) -> dict[str, Tensor]:
    """The parameters by name, with the positions of all tokens and the weight of each token in y."""
    tensors = {name: one for name, one in model.state_dict().items() if not name.startswith("position.")}
    for number, block in enumerate(model.blocks):
        bias = cast("Any", block).attention.qkv.masked_bias()
        tensors |= {} if bias is None else {f"blocks.{number}.attention.qkv.bias": bias}
    if model.config.position != "none":
        tensors["position"] = model.position.all_rows(model.config.grid)  # type: ignore[operator]
    return tensors | {"pool": pooled_tokens(model.config)[0]}


# ---- half precision -----------------------------------------------------------------------------------


def stored_model(bundle: Bundle, examples: NDArray[np.uint8] | None = None) -> tuple[ViT, bool]:
    """The model with its weights as the page stores them, and whether its matrices are float16.

    They are if, for the golden inputs and the examples, the predicted class stays the same and no probability
    changes by more than 0.005. Otherwise the model is returned as it is, and stored as float32.
    """
    import torch

    spec, model = bundle.preprocess, copy.deepcopy(bundle.model).cpu().float().eval()
    assert spec is not None  # every model of images has one
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for key, parameter in rounded.named_parameters():
            if _is_matrix(key):
                parameter.copy_(parameter.half())
        pixels = [*golden_inputs(model.config).permute(0, 2, 3, 1).numpy()]
        pixels += [] if examples is None else [*examples]
        images = torch.stack([spec.normalize(image) for image in pixels])
        before, after = (one(images).softmax(dim=1) for one in (model, rounded))
    same_class = bool((before.argmax(dim=1) == after.argmax(dim=1)).all())
    half = same_class and float((before - after).abs().max()) <= _MAX_CHANGE  # False for NaN and infinity
    return (rounded if half else model), half


def _is_matrix(key: str) -> bool:
    """Whether a tensor is the weight of a linear layer or of the patch embedding."""
    parts = ("proj", "qkv", "out", "fc1", "fc2", "head")
    return key.endswith(tuple(f"{part}.weight" for part in parts))


def _built_in_examples(config: ViTConfig) -> tuple[list[str], NDArray[np.uint8]]:
    """Digits for a model with MNIST's input shape; for others the golden inputs, which are patterns."""
    if (config.channels, *config.pixels) == (1, 28, 28):
        sample = sample_images(EXAMPLES)
        return sample.names, sample.pixels
    pixels = golden_inputs(config).permute(0, 2, 3, 1).numpy()  # (B, H, W, C)
    return [f"pattern {number + 1}" for number in range(len(pixels))], pixels
