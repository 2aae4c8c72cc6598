"""timm's VisionTransformer, and those whose names it took over or gave: DeiT, DeiT III, MAE, DINO, DINOv2."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.weights.layout import lead, tokens
from vitrail.weights.table import Family, Found, both, row

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.preprocess import Preprocess

B, OURS = "{w}{p}blocks.{i}.", "blocks.{i}."
ROWS = (
    *both("{w}{p}patch_embed.proj", "tokens.proj"),
    *both("{w}{p}patch_embed.norm", "tokens.norm_after"),
    row(("{w}{p}cls_token", "{w}{p}dist_token", "{w}{p}reg_token"), "prefix", tokens(3), parts="prefix"),
    row("{w}{p}pos_embed", "position.table", lead(1)),
    *both("{w}{p}norm_pre", "norm_pre"),
    *both(B + "norm1", OURS + "norm1"),
    *both(B + "attn.qkv", OURS + "attention.qkv"),
    *both(B + "attn.q_norm", OURS + "attention.q_norm"),
    *both(B + "attn.k_norm", OURS + "attention.k_norm"),
    *both(B + "attn.proj", OURS + "attention.out"),
    row(B + "ls1.gamma", OURS + "scale1.weight"),
    row(B + "gamma_1", OURS + "scale1.weight"),  # DeiT III as first published
    *both(B + "norm2", OURS + "norm2"),
    *both(B + "mlp.fc1", OURS + "mlp.fc1"),
    *both((B + "mlp.fc1_g", B + "mlp.fc1_x"), OURS + "mlp.fc1"),  # timm's SwiGLU, not packed
    *both(B + "mlp.fc2", OURS + "mlp.fc2"),
    row(B + "ls2.gamma", OURS + "scale2.weight"),
    row(B + "gamma_2", OURS + "scale2.weight"),
    *both("{w}{p}fc_norm", "norm", when=("pool_norm", "after")),
    *both("{w}{p}norm", "norm"),
    row("{w}{p}attn_pool.latent", "pool.probe", lead(1)),
    *both(("{w}{p}attn_pool.q", "{w}{p}attn_pool.kv"), "pool.attention.qkv", parts=(1, 2)),
    *both("{w}{p}attn_pool.proj", "pool.attention.out"),
    *both("{w}{p}attn_pool.norm", "pool.norm"),
    *both("{w}{p}attn_pool.mlp.fc1", "pool.mlp.fc1"),
    *both("{w}{p}attn_pool.mlp.fc2", "pool.mlp.fc2"),
    *both("{w}{p}head", "head.classes", beside="{w}{p}head_dist.weight"),
    *both("{w}{p}head_dist", "head.distillation"),
    *both("{w}{p}head", "head"),
)


def choose(found: Found) -> Mapping[str, Any]:
    """Which norm is the last, and what shapes do not tell of the MLP."""
    fields: dict[str, Any] = {}
    if found.has("{w}{p}fc_norm.weight"):
        fields |= {"pool": "mean", "pool_norm": "after"}
    elif "norm.weight" not in found.shapes:
        fields |= {"pool_norm": "none"}
    if found.has("{w}{p}blocks.0.gamma_1"):
        fields |= {"rows": "patches"}
    if found.shapes.get("blocks.0.mlp.fc1.weight", (0,))[0] == 2 * found.shapes["blocks.0.mlp.fc2.weight"][1]:
        fields |= {"activation": "silu"}
    return fields


def arguments(config: ViTConfig) -> dict[str, Any]:
    """What timm's VisionTransformer is built with, all but the classes that it is given."""
    pools = {"class": "token", "mean": "avg", "mean-all": "avg", "attention": "map"}
    return {
        "img_size": config.pixels,
        "patch_size": config.patch_pixels,
        "in_chans": config.channels,
        "num_classes": config.classes,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.F * (2 if config.mlp == "gated" else 1) / config.width,
        "qkv_bias": config.qkv_bias == "all",
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "class_token": config.class_token,
        "reg_tokens": config.registers,
        "no_embed_class": config.rows == "patches",
        "pos_embed": "learn" if config.position == "learned" else "none",
        "pre_norm": config.norm_pre,
        "global_pool": pools[config.pool],
        "pool_include_prefix": config.pool == "mean-all",
        "fc_norm": config.pool_norm == "after",
        "final_norm": config.pool_norm != "none",
        "act_layer": config.activation.replace("-", "_"),
    }


def read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What timm's config.json tells: the arguments a model was built with, if they are there."""
    given = settings.get("model_args")
    if not isinstance(given, dict):
        return {}
    activation = str(given.get("act_layer") or "gelu").replace("_", "-")
    found = {"heads": given.get("num_heads"), "size": as_pair(given.get("img_size"))}
    if "no_embed_class" in given:
        found["rows"] = "patches" if given["no_embed_class"] else "all"
    return {**{name: value for name, value in found.items() if value}, "activation": activation}


def as_pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def also(config: ViTConfig) -> list[str]:
    """What does not go together in timm."""
    reasons = []
    if config.embedding_bias == config.norm_pre:
        reasons.append("a norm before the first block and a bias of the patch projection exclude each other")
    if config.pool == "attention" and (config.qk_norm or config.mlp == "gated"):
        reasons.append("the attention pool has no norm of q and k, and a plain MLP")
    if config.distillation_token and (config.registers or config.norm_pre or config.rows != "all"):
        reasons.append("a model with a distillation token is a plain DeiT")
    return reasons


def settings(config: ViTConfig, preprocess: Preprocess, labels: list[str] | None) -> dict[str, Any]:
    """config.json, as timm's `local-dir:` and the hub take it."""
    from vitrail.published import to_timm

    plain = arguments(config)
    del plain["num_classes"]
    distilled = config.distillation_token
    return {
        "config.json": {
            "architecture": "deit_base_distilled_patch16_224" if distilled else "vit_base_patch16_224",
            "num_classes": config.classes,
            "num_features": config.width,
            "model_args": plain | ({"mlp_layer": "swiglupacked"} if config.mlp == "gated" else {}),
            "pretrained_cfg": {**to_timm(preprocess), "label_names": labels},
        }
    }


def peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    from timm.layers import SwiGLUPacked
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer
    from torch import nn

    kind = VisionTransformerDistilled if config.distillation_token else VisionTransformer
    more = {**arguments(config), "norm_layer": partial(nn.LayerNorm, eps=config.eps)}
    model = kind(**more, **({"mlp_layer": SwiGLUPacked} if config.mlp == "gated" else {}))
    model.load_state_dict(state)
    return model.eval()


TIMM = Family(
    name="timm",
    group="timm",
    title="timm's VisionTransformer",
    anchors=("{w}{p}patch_embed.proj.weight", "{w}{p}blocks.0.attn.qkv.weight"),
    prefixes=("", "visual.trunk.", "trunk."),
    without=("{w}{p}mask_token", "{w}{p}register_tokens"),
    rows=ROWS,
    fields={"eps": 1e-6, "activation": "gelu"},
    choose=choose,
    resize={"method": "bicubic", "antialias": True},
    preprocess="augreg",
    follows="timm: exact GELU, eps 1e-6, positions resized by bicubic with antialias.",
    expresses={
        "eps": (1e-6,),
        "activation": ("gelu", "gelu-tanh", "quick-gelu", "relu", "silu"),
        "distillation_token": (False, True),
        "class_token": (True, False),
        "position": ("learned", "none"),
        "rows": ("all", "patches"),
        "norm_pre": (False, True),
        "qkv_bias": ("all", "none"),
        "qk_norm": (False, True),
        "mlp": ("plain", "gated"),
        "pool": ("class", "mean", "mean-all", "attention"),
        "pool_norm": ("before", "after", "none"),
        "head": ("linear", "distilled"),
        "embedding_bias": (True, False),
        "registers": ...,
    },
    also=also,
    settings=settings,
    read_settings=read_settings,
    peer=peer,
)

# DeiT, DeiT III and MAE as first published: timm's names, under "model" in a pickle.
DEIT = replace(
    TIMM,
    name="deit",
    group="deit",
    title="DeiT or MAE as first published",
    wrapper="model",
    without=(),
    extras=("{w}{p}mask_token", "{w}decoder_*"),
    preprocess="deit",
    follows="the original code: exact GELU, eps 1e-6, ImageNet's mean and deviation.",
    expresses=None,
)

DINOV2 = replace(
    TIMM,
    name="dinov2",
    group="dinov2",
    title="DINOv2 as first published",
    anchors=("{w}{p}patch_embed.proj.weight", "{w}{p}blocks.0.attn.qkv.weight", "{w}{p}mask_token"),
    prefixes=("", "backbone.", "teacher.backbone.", "student.backbone."),
    without=("{w}{p}register_tokens",),
    rows=(
        row(("{w}{p}cls_token", "", "{w}{p}register_tokens"), "prefix", tokens(3), parts="prefix"),
        *both(B + "mlp.w12", OURS + "mlp.fc1"),
        *both(B + "mlp.w3", OURS + "mlp.fc2"),
        *(one for one in ROWS if one.ours != "prefix"),
    ),
    extras=("{w}{p}mask_token", "{w}*dino_head*", "{w}*ibot_head*", "{w}{p}pos_embed_*"),
    respell=partial(re.sub, r"\bblocks\.\d+\.(\d+)\.", r"blocks.\1."),  # files from training are in chunks
    fields={"eps": 1e-6, "activation": "gelu", "rows": "class", "remainder": "cut"},
    resize={"method": "bicubic", "antialias": False, "offset": 0.1},
    preprocess="dinov2",
    follows="the original code: positions resized by bicubic, stretched by 0.1 more than the grid.",
    expresses=None,
)

DINOV2_REGISTERS = replace(
    DINOV2,
    name="dinov2-registers",
    title="DINOv2 with registers, as first published",
    anchors=(*DINOV2.anchors, "{w}{p}register_tokens"),
    without=(),
    resize={"method": "bicubic", "antialias": True},
    follows="the original code: positions resized by bicubic with antialias, to the grid itself.",
)

FAMILIES = (DEIT, DINOV2_REGISTERS, DINOV2, TIMM)
