"""transformers' ViT and its kin: DeiT and the encoder of ViT-MAE. DINOv2 is in hf_dinov2.py.

The files on the hub and those `save_pretrained` writes have one spelling, `model.state_dict()` of
transformers 5 has another. The tables have the hub's, which every version reads; `respell` brings the
other to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError
from vitrail.fields import as_whole, show
from vitrail.weights.layout import lead, tokens
from vitrail.weights.table import Family, Row, both, row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitrail.preprocess import Preprocess

E, L, OURS = "{w}{p}embeddings.", "{w}{p}encoder.layer.{i}.", "blocks.{i}."
QKV = tuple(f"{L}attention.attention.{name}" for name in ("query", "key", "value"))
PREFIX = (E + "cls_token", E + "distillation_token", E + "register_tokens")
PROJECTION = E + "patch_embeddings.projection"


def rows(*own: tuple[Row, ...], norms: tuple[str, str]) -> tuple[Row, ...]:
    """What all of them have, and their own."""
    return (
        *both(PROJECTION, "tokens.proj"),
        row(PREFIX, "prefix", tokens(3), parts="prefix"),
        row(E + "position_embeddings", "position.table", lead(1)),
        *both(L + norms[0], OURS + "norm1"),
        *both(QKV, OURS + "attention.qkv"),
        *both(L + "attention.output.dense", OURS + "attention.out"),
        *both(L + norms[1], OURS + "norm2"),
        *(one for group in own for one in group),
        *both("{w}{p}layernorm", "norm"),
    )


VIT_ROWS = rows(
    both(L + "intermediate.dense", OURS + "mlp.fc1"),
    both(L + "output.dense", OURS + "mlp.fc2"),
    norms=("layernorm_before", "layernorm_after"),
)
HEAD = both("{w}classifier", "head")

ATTENTION = {
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
}
VIT_NAMES = {**ATTENTION, ".mlp.fc1.": ".intermediate.dense.", ".mlp.fc2.": ".output.dense."}


def respell(name: str, names: Mapping[str, str]) -> str:
    """A name of transformers 5 as the hub has it."""
    name = re.sub(r"(^|\.)layers\.(\d+)\.", r"\1encoder.layer.\2.", name)
    for new, old in names.items():
        name = name.replace(new, old)
    return name


# ---- config.json ----------------------------------------------------------------------------

ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh", "gelu_new": "gelu-tanh", "quick_gelu": "quick-gelu"},
    **{"relu": "relu", "silu": "silu", "swish": "silu"},
}
# Where a config.json leaves one out, it is what transformers' own config has. All kinds have these.
DEFAULTS = {"num_attention_heads": 12, "num_hidden_layers": 12, "image_size": 224}


def read_settings(settings: Mapping[str, Any], kinds: Mapping[str, float]) -> dict[str, Any]:
    """What shapes do not tell, from a config.json of one of these kinds; each with its default eps."""
    if not check_kind(settings, tuple(kinds)):
        return {}
    return read_facts(settings, {"layer_norm_eps": kinds[settings["model_type"]], "hidden_act": "gelu"})


def check_kind(settings: Mapping[str, Any], kinds: tuple[str, ...]) -> bool:
    """Whether the settings are transformers' and so say something; those of another kind are refused."""
    kind = settings.get("model_type")
    if kind is not None and kind not in kinds:
        raise ConfigError(
            f"The model_type of such weights must be {' or '.join(kinds)}.",
            f"model_type={show(kind)}",
            "Name the weight file instead of its folder, to read it without its settings.",
        )
    return kind is not None


def read_facts(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of our config from the keys of transformers'."""
    known = {**DEFAULTS, **defaults, **settings}
    word, size = known["hidden_act"], known["image_size"]
    if not isinstance(word, str) or word not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act must be one of {', '.join(ACTIVATIONS)}.",
            f"hidden_act={show(word)}",
            "Name the weight file instead of its folder, and give activation.",
        )
    sides = [as_whole("image_size", side, 1) for side in (size if isinstance(size, list) else [size])]
    return {
        "heads": as_whole("num_attention_heads", known["num_attention_heads"], 1),
        "depth": as_whole("num_hidden_layers", known["num_hidden_layers"], 1),
        "size": tuple(sides) if isinstance(size, list) else sides[0],
        "eps": known["layer_norm_eps"],
        "activation": ACTIVATIONS[word],
    }


def common(config: ViTConfig) -> dict[str, Any]:
    """Our config in transformers' words, as far as all kinds share them."""
    (H, W), (P, Q) = config.pixels, config.patch_pixels
    words = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}  # the first of two words
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": words[config.activation],
        "layer_norm_eps": config.eps,
        "image_size": H if H == W else [H, W],
        "patch_size": P if P == Q else [P, Q],
        "num_channels": config.channels,
    }


def with_labels(config: ViTConfig, labels: list[str] | None) -> dict[str, Any]:
    """The classes by name; LABEL_0 and so on are what transformers calls those without."""
    names = labels or [f"LABEL_{number}" for number in range(config.classes)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def vit_words(config: ViTConfig) -> dict[str, Any]:
    """config.json of a ViT or DeiT, all but the labels. Without classes, the logits are the class token."""
    kind, model = "vit", "ViTForImageClassification"
    if config.distillation_token:
        teacher = "WithTeacher" if config.head == "distilled" else ""
        kind, model = "deit", f"DeiTForImageClassification{teacher}"
    more = {} if config.heads_width == config.width else {"head_dim": config.d}
    return {
        "architectures": [model],
        "model_type": kind,
        **common(config),
        "intermediate_size": config.F,
        "qkv_bias": config.qkv_bias == "all",
        **more,
    }


def folder(
    config: ViTConfig,
    preprocess: Preprocess,
    labels: list[str] | None,
    words: Callable[[ViTConfig], dict[str, Any]],
) -> dict[str, Any]:
    """The JSON files beside the weights. transformers cuts a centre from the lower pixel on, always."""
    from vitrail.published import to_hf

    preprocess = replace(preprocess, crop_rounding="down" if preprocess.crops else "even")
    return {
        "config.json": {**words(config), **with_labels(config, labels)},
        "preprocessor_config.json": to_hf(preprocess),
    }


# ---- their own models -----------------------------------------------------------------------


def build(settings: Mapping[str, Any], state: Mapping[str, Tensor]) -> nn.Module:
    """transformers' own model, loaded its own way, with these tensors and no others."""
    import torch
    import transformers

    model = getattr(transformers, settings["architectures"][0])
    config = transformers.AutoConfig.for_model(**settings)
    with quietly():
        made, report = model.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=torch.float32, output_loading_info=True
        )
    wrong = {key: sorted(map(str, names)) for key, names in report.items() if names}
    if wrong:
        raise RuntimeError(f"its loader reports {wrong}")
    return made.eval()


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' bars of progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def unwrapped(state: Mapping[str, Tensor], anchor: str, base: str) -> dict[str, Tensor]:
    """The tensors without what others put before all names; transformers' own prefix stays."""
    first = next(name for name in state if name.endswith(anchor))
    outer = first.removesuffix(anchor).removesuffix(base)
    return {name.removeprefix(outer): tensor for name, tensor in state.items()}


def vit_peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    words = {**vit_words(config), **with_labels(config, None)}
    model = build(words, unwrapped(state, "embeddings.cls_token", f"{words['model_type']}."))
    return lambda pictures: model(pictures).logits


def mae_peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """The encoder without masks. It shuffles the patches; the class token does not depend on that."""
    own = {"architectures": ["ViTMAEModel"], "model_type": "vit_mae", "mask_ratio": 0.0}
    model = build({**vit_words(config), **own}, unwrapped(state, "embeddings.cls_token", "vit."))
    return lambda pictures: model(pictures).last_hidden_state[:, 0]


# ---- the families ---------------------------------------------------------------------------


def vit_also(config: ViTConfig) -> list[str]:
    return ["there is no layer scale"] * (config.layer_scale is not None)


FREELY = {"eps": ..., "head_width": ..., "qkv_bias": ("all", "none"), "remainder": ("refuse", "cut")}
CHOICES = {**FREELY, "activation": tuple(dict.fromkeys(ACTIVATIONS.values()))}

VIT = Family(
    name="hf-vit",
    group="hf",
    title="transformers' ViT",
    anchors=(f"{PROJECTION}.weight", E + "cls_token", "{w}{p}encoder.layer.0.layernorm_before.weight"),
    prefixes=("vit.", ""),
    without=(E + "distillation_token", "*decoder.decoder_*"),
    rows=(*VIT_ROWS, *HEAD),
    extras=("{w}{p}pooler.*", E + "mask_token", "{w}decoder.0.*"),
    respell=partial(respell, names=VIT_NAMES),
    model_types=("vit", "vit_msn"),
    fields={"eps": 1e-12, "activation": "gelu", "remainder": "cut"},
    resize={"method": "bicubic", "antialias": False},
    preprocess="google",
    follows="transformers: exact GELU, eps 1e-12, positions resized by bicubic without antialias.",
    read_settings=partial(read_settings, kinds={"vit": 1e-12, "vit_msn": 1e-6}),
    expresses={**CHOICES, "rows": ("all", "class")},
    also=vit_also,
    settings=partial(folder, words=vit_words),
    peer=vit_peer,
)

DEIT = replace(
    VIT,
    name="hf-deit",
    title="transformers' DeiT with its distillation token",
    anchors=(*VIT.anchors, E + "distillation_token"),
    prefixes=("deit.", ""),
    without=(),
    rows=(
        *VIT_ROWS,
        *both("{w}cls_classifier", "head.classes"),
        *both("{w}distillation_classifier", "head.distillation"),
        *HEAD,
    ),
    model_types=("deit",),
    preprocess="imagenet",
    read_settings=partial(read_settings, kinds={"deit": 1e-12}),
    expresses={**CHOICES, "distillation_token": (True,), "head": ("linear", "distilled")},
)

MAE = replace(
    VIT,
    name="hf-mae",
    title="transformers' ViT-MAE, its encoder",
    without=(E + "distillation_token",),
    rows=VIT_ROWS,
    extras=("{w}decoder.*",),
    model_types=("vit_mae",),
    preprocess="imagenet",
    read_settings=partial(read_settings, kinds={"vit_mae": 1e-12}),
    expresses=None,
    settings=None,
    peer=mae_peer,
)
