"""Google's own ViTs, the npz files of vit_jax: the paper's, AugReg's and SAM's, and the R50 hybrid."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError, printable
from vitrail.fields import show
from vitrail.weights.layout import (
    Layout,
    flax_conv,
    flax_heads,
    flax_heads_bias,
    flax_out,
    lead,
    same,
    tokens,
    turned,
)
from vitrail.weights.table import Family, Found, Row, row

TOP, B, OURS = "{w}{p}", "{w}{p}Transformer/encoderblock_{i}/", "blocks.{i}."
UNITS = (3, 4, 9)  # of the stem's three stages; model/stem.py has the table of names

FIELDS = {
    **{"eps": 1e-6, "activation": "gelu-tanh"},
    **{"embedding_bias": True, "qkv_bias": "all", "head_bias": True},  # a file without one is damaged
}

# The scale of a group norm, (C,) or in older files (1, 1, 1, C).
flat = Layout("flat", lambda t, s: t.flatten(), lambda t, s: t, lambda shape, s: (math.prod(shape),))


# ---- flax's layers, for big_vision too


def dense(theirs: str, ours: str, **more: Any) -> tuple[Row, Row]:
    kernel = row(f"{theirs}/kernel", f"{ours}.weight", turned, **more)
    return kernel, row(f"{theirs}/bias", f"{ours}.bias", **more)


def norm(theirs: str, ours: str, layout: Layout = same) -> tuple[Row, Row]:
    return row(f"{theirs}/scale", f"{ours}.weight", layout), row(f"{theirs}/bias", f"{ours}.bias", layout)


def attention(theirs: str, ours: str) -> tuple[Row, ...]:
    qkv = [f"{theirs}/{name}" for name in ("query", "key", "value")]
    return (
        row([f"{name}/kernel" for name in qkv], f"{ours}.qkv.weight", flax_heads),
        row([f"{name}/bias" for name in qkv], f"{ours}.qkv.bias", flax_heads_bias),
        row(f"{theirs}/out/kernel", f"{ours}.out.weight", flax_out),
        row(f"{theirs}/out/bias", f"{ours}.out.bias"),
    )


def mlp(theirs: str, ours: str) -> tuple[Row, ...]:
    return *dense(f"{theirs}/Dense_0", f"{ours}.fc1"), *dense(f"{theirs}/Dense_1", f"{ours}.fc2")


def block(attention_number: int, norm_number: int, mlp_number: int) -> tuple[Row, ...]:
    """A block. Flax once numbered the layers of a block in a row; now each kind counts from 0."""
    return (
        *norm(B + "LayerNorm_0", OURS + "norm1"),
        *attention(B + f"MultiHeadDotProductAttention_{attention_number}", OURS + "attention"),
        *norm(B + f"LayerNorm_{norm_number}", OURS + "norm2"),
        *mlp(B + f"MlpBlock_{mlp_number}", OURS + "mlp"),
    )


EMBEDDING = (
    row(TOP + "embedding/kernel", "tokens.proj.weight", flax_conv),
    row(TOP + "embedding/bias", "tokens.proj.bias"),
    row(TOP + "cls", "prefix", tokens(3), parts="prefix"),
)
HEAD = (
    *norm(TOP + "Transformer/encoder_norm", "norm"),
    *dense(TOP + "pre_logits", "head.fc1", beside=TOP + "head/kernel"),
    *dense(TOP + "head", "head.fc2", beside=TOP + "pre_logits/kernel"),
    *dense(TOP + "head", "head"),
)


def heads_in(found: Found) -> dict[str, int]:
    """k and d: flax keeps the heads apart, so that q's kernel is (D, k, d)."""
    qkv = {one.ours: one.theirs for one in found.uses}["blocks.0.attention.qkv.weight"]
    place = found.places[qkv[0]]
    shape = found.entries[place.original].shape[place.index is not None :]
    if len(shape) != 3:
        raise ConfigError(
            f"Google's files keep heads apart: {printable(place.original)} must have three axes (D, k, d) "
            f"and has {shape}. Give another family, or a table of keys that is complete by itself."
        )
    _, k, d = shape
    return {"heads": k, "head_width": d}


# ---- vit_jax


def stem() -> tuple[Row, ...]:
    """The R50 of the hybrid."""
    ours = "tokens.stem."
    rows = [row(TOP + "conv_root/kernel", ours + "root.conv.weight", flax_conv)]
    rows += norm(TOP + "gn_root", ours + "root.norm", flat)
    for stage, units in enumerate(UNITS):
        for unit in range(units):
            to, at = TOP + f"block{stage + 1}/unit{unit + 1}/", ours + f"stages.{stage}.{unit}."
            names = [(f"conv{n}", f"gn{n}", f"conv{n}", f"norm{n}") for n in (1, 2, 3)]
            names += [("conv_proj", "gn_proj", "proj", "proj_norm")] * (unit == 0)
            for kernel, scale, our_conv, our_norm in names:
                rows.append(row(to + kernel + "/kernel", at + our_conv + ".weight", flax_conv))
                rows += norm(to + scale, at + our_norm, flat)
    return tuple(rows)


def choose(found: Found) -> Mapping[str, Any]:
    """The heads, and of a hybrid the channels, which its patches no longer show."""
    if not any(name.startswith("tokens.stem.") for name in found.shapes):
        return heads_in(found)
    check_stem(found)
    return {**heads_in(found), "channels": found.shapes["tokens.stem.root.conv.weight"][1]}


def check_stem(found: Found) -> None:
    pattern = re.escape(TOP.format(**found.spelled)) + r"block(\d+)/unit(\d+)/"
    units = {(int(unit[1]), int(unit[2])) for name in found.places if (unit := re.match(pattern, name))}
    stages = sorted({stage for stage, _ in units})
    counts = tuple(sum(at == stage for at, _ in units) for stage in stages)
    if counts != UNITS:
        raise ConfigError(
            "The stem of a hybrid must be the R50 of stride 16, with stages of 3, 4 and 9 units.",
            f"stages of {', '.join(map(str, counts))} units" if counts else "a root without stages",
            "There is no other ResNet here; timm reads this file.",
        )


def also(config: ViTConfig) -> list[str]:
    """What vit_jax has no words for."""
    reasons = []
    if config.activation != "gelu-tanh":
        reasons.append(
            f"its only GELU is the tanh form, and activation is {show(config.activation)} here; "
            'with activation="gelu-tanh" told it can be written'
        )
    if config.class_token != (config.pool == "class"):
        reasons.append("a class token is there to be pooled, and only then")
    if config.heads_width != config.width:
        reasons.append("the heads side by side are as wide as a token")
    return reasons


GOOGLE = Family(
    name="google",
    group="google",
    title="Google's vit_jax",
    anchors=(TOP + "embedding/kernel", TOP + "Transformer/posembed_input/pos_embedding"),
    prefixes=("", "opt/target/"),
    rows=(
        *EMBEDDING,
        row(TOP + "Transformer/posembed_input/pos_embedding", "position.table", lead(1)),
        *block(1, 2, 3),
        *block(0, 1, 0),
        *stem(),
        *HEAD,
    ),
    extras=("{w}opt/state/*",),
    fields=FIELDS,
    choose=choose,
    resize={"method": "bilinear", "antialias": False, "corners": True},
    preprocess="google",
    follows="the original code: GELU in its tanh form, where timm and transformers compute the exact one "
    '(activation="gelu" gives their numbers). Only the stem of a hybrid has timm\'s eps, 1e-8 for kernels '
    "and 1e-5 for norms.",
    suffix=".npz",
    expresses={
        "activation": ...,  # see `also`
        "head_width": ...,
        "embedding": ("linear", "resnet"),
        "remainder": ("refuse", "cut"),
        "class_token": (True, False),
        "pool": ("class", "mean"),
        "head": ("linear", "tanh"),
        "head_hidden": ...,
    },
    also=also,
)

FAMILIES = (GOOGLE,)
