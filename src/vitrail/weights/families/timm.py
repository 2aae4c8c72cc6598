"""timm's VisionTransformer, and models with similar names: DeiT, DeiT III, MAE, DINO, DINOv2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.key_rows import layer, lead, row, tokens
from vitrail.weights.families.match import FamilyMatch

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess

B, OURS = "{w}{p}blocks.{i}.", "blocks.{i}."
ROWS = (
    *layer("{w}{p}patch_embed.proj", "tokens.proj"),
    *layer("{w}{p}patch_embed.norm", "tokens.norm_after"),
    row(("{w}{p}cls_token", "{w}{p}dist_token", "{w}{p}reg_token"), "prefix", tokens(3), parts="prefix"),
    row("{w}{p}pos_embed", "position.table", lead(1)),
    *layer("{w}{p}norm_pre", "norm_pre"),
    *layer(B + "norm1", OURS + "norm1"),
    *layer(B + "attn.qkv", OURS + "attention.qkv"),
    *layer(B + "attn.q_norm", OURS + "attention.q_norm"),
    *layer(B + "attn.k_norm", OURS + "attention.k_norm"),
    *layer(B + "attn.proj", OURS + "attention.out"),
    row(B + "ls1.gamma", OURS + "scale1.weight"),
    row(B + "gamma_1", OURS + "scale1.weight"),  # DeiT III as first published
    *layer(B + "norm2", OURS + "norm2"),
    *layer(B + "mlp.fc1", OURS + "mlp.fc1"),
    *layer((B + "mlp.fc1_g", B + "mlp.fc1_x"), OURS + "mlp.fc1"),  # timm's SwiGLU, not packed
    *layer(B + "mlp.fc2", OURS + "mlp.fc2"),
    row(B + "ls2.gamma", OURS + "scale2.weight"),
    row(B + "gamma_2", OURS + "scale2.weight"),
    *layer("{w}{p}fc_norm", "norm", when=("pool_norm", "after")),
    *layer("{w}{p}norm", "norm"),
    row("{w}{p}attn_pool.latent", "pool.probe", lead(1)),
    *layer(("{w}{p}attn_pool.q", "{w}{p}attn_pool.kv"), "pool.attention.qkv", parts=(1, 2)),
    *layer("{w}{p}attn_pool.proj", "pool.attention.out"),
    *layer("{w}{p}attn_pool.norm", "pool.norm"),
    *layer("{w}{p}attn_pool.mlp.fc1", "pool.mlp.fc1"),
    *layer("{w}{p}attn_pool.mlp.fc2", "pool.mlp.fc2"),
    *layer("{w}{p}head", "head.classes", requires="{w}{p}head_dist.weight"),
    *layer("{w}{p}head_dist", "head.distillation"),
    *layer("{w}{p}head", "head"),
)


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """Which norm is the last, and the activation of a gated MLP."""
    fields: dict[str, Any] = {}
    if match.has("{w}{p}fc_norm.weight"):
        fields |= {"pool": "mean", "pool_norm": "after"}
    elif "norm.weight" not in match.shapes:
        fields |= {"pool_norm": "none"}
    if match.has("{w}{p}blocks.0.gamma_1"):
        fields |= {"rows": "patches"}
    if match.gated:
        fields |= {"activation": "silu"}
    return fields


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer."""
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


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """From the arguments in timm's config.json that a model was built with, if it has them."""
    arguments = settings.get("model_args")
    if not isinstance(arguments, dict):
        return {}
    activation = str(arguments.get("act_layer") or "gelu").replace("_", "-")
    size = arguments.get("img_size")
    fields = {"heads": arguments.get("num_heads"), "size": tuple(size) if isinstance(size, list) else size}
    if "no_embed_class" in arguments:
        fields["rows"] = "patches" if arguments["no_embed_class"] else "all"
    return {**{name: value for name, value in fields.items() if value}, "activation": activation}


def _unsupported(config: ViTConfig) -> list[str]:
    """Combinations that timm does not have."""
    reasons = []
    if config.embedding_bias == config.norm_pre:
        reasons.append("it has either a norm before the first block or a bias of the patch projection")
    if config.pool == "attention" and (config.qk_norm or config.mlp == "gated"):
        reasons.append("its attention pool has no q and k norm, and a plain MLP")
    if config.distillation_token and (config.registers or config.norm_pre or config.rows != "all"):
        reasons.append("its only model with a distillation token is a plain DeiT")
    return reasons


def _settings(config: ViTConfig, preprocess: Preprocess, labels: list[str] | None) -> dict[str, Any]:
    """config.json, for timm's `local-dir:` and the hub."""
    from vitrail.images.published_preprocess import to_timm

    arguments = _arguments(config)
    del arguments["num_classes"]
    distilled = config.distillation_token
    return {
        "config.json": {
            "architecture": "deit_base_distilled_patch16_224" if distilled else "vit_base_patch16_224",
            "num_classes": config.classes,
            "num_features": config.width,
            "model_args": arguments | ({"mlp_layer": "swiglupacked"} if config.mlp == "gated" else {}),
            "pretrained_cfg": {**to_timm(preprocess), "label_names": labels},
        }
    }


def _peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    from timm.layers import SwiGLUPacked
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer
    from torch import nn

    kind = VisionTransformerDistilled if config.distillation_token else VisionTransformer
    options = {**_arguments(config), "norm_layer": partial(nn.LayerNorm, eps=config.eps)}
    model = kind(**options, **({"mlp_layer": SwiGLUPacked} if config.mlp == "gated" else {}))
    model.load_state_dict(state)
    return model.eval()


TIMM = Family(
    "timm",
    "timm",
    "timm's VisionTransformer",
    detect=Detection(
        anchors=("{w}{p}patch_embed.proj.weight", "{w}{p}blocks.0.attn.qkv.weight"),
        without=("{w}{p}mask_token", "{w}{p}register_tokens"),
        prefixes=("", "visual.trunk.", "trunk."),
    ),
    keys=KeyMap(rows=ROWS),
    profile=Profile(
        fields={"eps": 1e-6, "activation": "gelu"},
        choose=_choose,
        resize={"method": "bicubic", "antialias": True},
        preprocess="augreg",
        follows="timm: exact GELU, eps 1e-6, positions resized by bicubic with antialiasing.",
    ),
    writer=Writer(
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
        unsupported=_unsupported,
        settings=_settings,
        read_settings=_read_settings,
        peer=_peer,
    ),
)

# Not written from other families, but a folder or the peer can still be made for a file of their own.
_WRITTEN_BACK = replace(TIMM.writer, expresses=None)

# DeiT, DeiT III and MAE as first published: timm's names, under "model" in a torch.save file.
DEIT = Family(
    "deit",
    "deit",
    "DeiT or MAE as first published",
    detect=replace(TIMM.detect, wrapper="model", without=()),
    keys=KeyMap(rows=ROWS, extras=("{w}{p}mask_token", "{w}decoder_*")),
    profile=replace(
        TIMM.profile,
        preprocess="deit",
        follows="the original code: exact GELU, eps 1e-6, ImageNet's mean and std.",
    ),
    writer=_WRITTEN_BACK,
)

DINOV2 = Family(
    "dinov2",
    "dinov2",
    "DINOv2 as first published",
    detect=Detection(
        anchors=(*TIMM.detect.anchors, "{w}{p}mask_token"),
        without=("{w}{p}register_tokens",),
        prefixes=("", "backbone.", "teacher.backbone.", "student.backbone."),
    ),
    keys=KeyMap(
        rows=(
            row(("{w}{p}cls_token", "", "{w}{p}register_tokens"), "prefix", tokens(3), parts="prefix"),
            *layer(B + "mlp.w12", OURS + "mlp.fc1"),
            *layer(B + "mlp.w3", OURS + "mlp.fc2"),
            *(row for row in ROWS if row.ours != "prefix"),
        ),
        extras=("{w}{p}mask_token", "{w}*dino_head*", "{w}*ibot_head*", "{w}{p}pos_embed_*"),
        # Files from training have their blocks in chunks.
        respell=((r"\bblocks\.\d+\.(\d+)\.", r"blocks.\1."),),
    ),
    profile=replace(
        TIMM.profile,
        fields={"eps": 1e-6, "activation": "gelu", "rows": "class", "remainder": "cut"},
        resize={"method": "bicubic", "antialias": False, "offset": 0.1},
        preprocess="dinov2",
        follows="the original code: positions resized by bicubic, with a scale 0.1 larger than the grid's.",
    ),
    writer=_WRITTEN_BACK,
)

DINOV2_REGISTERS = replace(
    DINOV2,
    name="dinov2-registers",
    title="DINOv2 with registers, as first published",
    detect=replace(DINOV2.detect, anchors=(*DINOV2.detect.anchors, "{w}{p}register_tokens"), without=()),
    profile=replace(
        DINOV2.profile,
        resize={"method": "bicubic", "antialias": True},
        follows="the original code: positions resized by bicubic with antialiasing, without an offset.",
    ),
)

FAMILIES = (DEIT, DINOV2_REGISTERS, DINOV2, TIMM)
