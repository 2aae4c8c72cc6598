"""The classroom page: a small trained model in one HTML file, computed live by the browser that opens it.

The file holds the weights as float32 (little-endian, base64), a ViT in plain JavaScript (classroom/vit.js)
and what shows it (map.js, page.js, sheet.js). It loads nothing and sends nothing; its policy forbids both.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitrail import __version__
from vitrail.config import ViTConfig, by
from vitrail.errors import InputError, MissingExtra, printable
from vitrail.fields import show
from vitrail.inspect.attention import prefix_names
from vitrail.inspect.rollout import pooled
from vitrail.inspect.sample import sample_pictures
from vitrail.model import ViT
from vitrail.model.attention import scale_of
from vitrail.report.page import check_new, write_whole
from vitrail.weights.bundle import Bundle, golden_inputs

if TYPE_CHECKING:
    from torch import Tensor

PARTS = Path(__file__).parent / "classroom"
SCRIPTS = ("vit.js", "map.js", "page.js", "sheet.js")
MOST_PARAMETERS = 6_000_000  # a Ti/16 has 5.7 million
MOST_TOKENS = 1024  # attention is kept for every two of them
EXAMPLES = 10

# What vit.js computes. A field that is not here may have any value.
COMPUTED: dict[str, tuple[object, ...]] = {
    "input": ("picture",),
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
    "pool": ("class", "mean", "mean-all"),
    "head": ("linear",),
}


def write_classroom(bundle: Bundle, path: str | Path, name: str = "") -> list[str]:
    """Write the page, whole or not at all; what is worth saying about it, a sentence each.

    Args:
        path: a new file.
        name: of the model, where its card has none.
    """
    place, notes = Path(path), []
    check_place(place)
    check_computed(bundle.model)
    try:
        examples = examples_for(bundle.model.config)
    except MissingExtra as error:
        examples = []
        notes.append(f"The page has no example pictures: {error}")
    text = render(bundle, bundle.card.name or name, examples)
    write_whole(place, text)
    size = len(text.encode()) / 1e6
    if size > 5:
        notes.append(f"The page has {size:.0f} MB: too large for most mail, and slow to open on a phone.")
    return notes


def check_place(place: Path) -> None:
    if place.suffix.lower() not in (".html", ".htm"):
        raise InputError("A page's name must end in .html.", printable(place), "Name it so.")
    check_new(place, "Name another file with --out.")


def check_computed(model: ViT) -> None:
    """Whether the page can compute this model; if not, which field says otherwise."""
    config = model.config
    for field, words in COMPUTED.items():
        value = getattr(config, field)
        if value not in words:
            raise InputError(
                f"A page computes models with {field} {' or '.join(map(show, words))}.",
                f"{field}={show(value)}",
                "Look at this model with vitrail inspect.",
            )
    count = sum(parameter.numel() for parameter in model.parameters())
    rules = [
        (not config.classes, "a head", "classes=0", "Export a model that was trained to tell classes apart."),
        (
            count > MOST_PARAMETERS,
            f"at most {MOST_PARAMETERS:,} parameters",
            f"{count:,}",
            "Take a smaller model, or look at this one with vitrail inspect.",
        ),
        (
            config.tokens > MOST_TOKENS,
            f"at most {MOST_TOKENS:,} tokens",
            f"{config.tokens:,}, of size {by(config.pixels)} in patches of {by(config.patch_pixels)}",
            "Take a model with larger patches or a smaller size.",
        ),
        (
            not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()),
            "weights that are all numbers",
            "some that are infinite or NaN",
            "Take weights from before that happened.",
        ),
    ]
    for wrong, what, got, do in rules:
        if wrong:
            raise InputError(f"A page's model must have {what}.", got, do)


# ---- what the page holds -------------------------------------------------------------------------


def render(bundle: Bundle, name: str, examples: list[dict[str, str]]) -> str:
    """The page as text."""
    tensors = {
        key: tensor.detach().cpu().float().numpy().astype("<f4") for key, tensor in tensors_of(bundle.model)
    }
    facts = {
        **describe(bundle),
        "name": printable(name or "a Vision Transformer"),
        "examples": examples,
        "tensors": [[key, array.size] for key, array in tensors.items()],
    }
    style = read("style.css")
    script = "".join(map(read, SCRIPTS))
    parts = {
        "title": html.escape(facts["name"]),
        "version": __version__,
        "style_hash": digest(style),
        "script_hash": digest(script),
        "style": style,
        "script": script,
        "facts": json.dumps(facts).replace("<", "\\u003c"),  # no label can end the element it stands in
        "weights": base64.b64encode(b"".join(array.tobytes() for array in tensors.values())).decode(),
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: parts[found[1]], read("page.html"))


def read(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """What a policy knows a script or a style by."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def describe(bundle: Bundle) -> dict[str, Any]:
    """What vit.js and page.js have to know of the model."""
    model, spec = bundle.model, bundle.preprocess
    assert spec is not None  # a model of pictures has one
    config = model.config
    labels = bundle.labels or [str(number) for number in range(config.classes)]
    _, reads = pooled(config)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "channels": config.channels,
        "size": config.pixels,
        "patch": config.patch_pixels,
        "grid": config.grid,
        "prefix": prefix_names(config),
        "width": config.width,
        "depth": config.depth,
        "heads": config.heads,
        "d": config.d,
        "mlp": config.F,
        "scale": scale_of(config),
        "eps": config.eps,
        "activation": config.activation,
        "last_norm": config.pool_norm,
        "position": config.position,
        "reads": reads,
        "labels": [printable(label, 60) for label in labels],
        "preprocess": {
            **{"scale": spec.scale, "mean": spec.mean, "std": spec.std},
            "resized": spec.before_crop,  # before the centre is cut out
            "shortest": spec.resize == "shortest",
        },
    }


def tensors_of(model: ViT) -> list[tuple[str, Tensor]]:
    """The model's tensors by the names that vit.js has for them; what a model goes without is left out."""
    config, position, projection = model.config, model.position, cast("Any", model.tokens.proj)
    found: dict[str, Tensor | None] = {
        "embed.weight": projection.weight.flatten(1),
        "embed.bias": projection.bias,
        "prefix": model.prefix,
        "position": None if config.position == "none" else position.all_rows(),  # type: ignore[operator]
        "pool": pooled(config)[0],  # how much each token counts in y
    }
    for number, part in enumerate(model.blocks):
        block: Any = part
        modules = {
            **{"norm1": block.norm1, "norm2": block.norm2, "out": block.attention.out},
            **{"fc1": block.mlp.fc1, "fc2": block.mlp.fc2},
        }
        tensors = {
            "qkv.weight": block.attention.qkv.weight,
            "qkv.bias": block.attention.qkv.kept_bias(),
            "scale1": getattr(block.scale1, "weight", None),
            "scale2": getattr(block.scale2, "weight", None),
            **{f"{name}.weight": module.weight for name, module in modules.items()},
            **{f"{name}.bias": module.bias for name, module in modules.items()},
        }
        found |= {f"blocks.{number}.{name}": tensor for name, tensor in tensors.items()}
    last: dict[str, Any] = {"norm": model.norm, "head": model.head}
    for name, module in last.items():
        found |= {f"{name}.{part}": getattr(module, part, None) for part in ("weight", "bias")}
    return [(name, tensor) for name, tensor in found.items() if tensor is not None]


def examples_for(config: ViTConfig) -> list[dict[str, str]]:
    """Digits for a model of MNIST's shape; for others the golden inputs, which are patterns."""
    if (config.channels, *config.pixels) == (1, 28, 28):
        found = sample_pictures(EXAMPLES)
        names, pixels = found.names, found.pixels
    else:
        pixels = golden_inputs(config).permute(0, 2, 3, 1).numpy()  # (B, H, W, C)
        names = [f"pattern {number + 1}" for number in range(len(pixels))]
    return [
        {"name": name, "levels": base64.b64encode(np.ascontiguousarray(one).tobytes()).decode()}
        for name, one in zip(names, pixels, strict=True)
    ]
