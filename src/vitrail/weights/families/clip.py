"""The visual tower of OpenAI's CLIP and of OpenCLIP, in its own spelling.

A file holds both towers, `visual.*` and the text tower, or the visual tower alone. The text tower is kept
and written back. OpenAI's own .pt files are TorchScript archives, which are programs and not read: save
`model.state_dict()` instead. OpenCLIP also has towers from timm, `visual.trunk.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.key_rows import layer, row, same, tokens, transposed
from vitrail.weights.families.timm import TIMM

B, OURS = "{w}{p}transformer.resblocks.{i}.", "blocks.{i}."
ROWS = (
    row("{w}{p}conv1.weight", "tokens.proj.weight"),
    row("{w}{p}class_embedding", "prefix", tokens(1), parts="prefix"),
    row("{w}{p}positional_embedding", "position.table", same),
    *layer("{w}{p}ln_pre", "norm_pre"),
    *layer(B + "ln_1", OURS + "norm1"),
    row(B + "attn.in_proj_weight", OURS + "attention.qkv.weight"),
    row(B + "attn.in_proj_bias", OURS + "attention.qkv.bias"),
    *layer(B + "attn.out_proj", OURS + "attention.out"),
    row(B + "ls_1.gamma", OURS + "scale1.weight"),  # OpenCLIP's LayerScale
    *layer(B + "ln_2", OURS + "norm2"),
    *layer(B + "mlp.c_fc", OURS + "mlp.fc1"),
    *layer(B + "mlp.c_proj", OURS + "mlp.fc2"),
    row(B + "ls_2.gamma", OURS + "scale2.weight"),
    *layer("{w}{p}ln_post", "norm"),
    row("{w}{p}proj", "head.weight", transposed),
)
TEXT = (
    *("token_embedding.weight", "positional_embedding", "transformer.*", "ln_final.*", "text_projection*"),
    *("attn_mask", "text.*", "logit_scale", "logit_bias"),
    *("input_resolution", "context_length", "vocab_size"),  # numbers that OpenAI's archives hold as well
)


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Activation and heads, from OpenCLIP's open_clip_config.json."""
    model = settings.get("model_cfg")
    vision = model.get("vision_cfg") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vision, dict):
        return {}
    fields: dict[str, Any] = {"activation": "quick-gelu" if model.get("quick_gelu") else "gelu"}
    width, head = vision.get("width", 768), vision.get("head_width", 64)
    if isinstance(width, int) and isinstance(head, int) and head > 0 and width % head == 0:
        fields["heads"] = width // head
    return fields


CLIP = Family(
    "clip",
    "clip",
    "CLIP by OpenAI or OpenCLIP, the visual tower",
    detect=Detection(
        anchors=("{w}{p}conv1.weight", "{w}{p}class_embedding", B + "attn.in_proj_weight"),
        prefixes=("visual.",),
    ),
    keys=KeyMap(rows=ROWS, extras=tuple(f"{{w}}{name}" for name in TEXT)),
    profile=Profile(
        fields={"eps": 1e-5, "activation": "quick-gelu", "pool_norm": "after"},
        resize={"method": "bicubic", "antialias": True},
        preprocess="clip",
        follows='OpenAI: QuickGELU. Most OpenCLIP models have the same tensors and need activation="gelu". '
        "Positions are resized as in OpenCLIP, bicubic with antialiasing.",
    ),
    writer=Writer(read_settings=_read_settings),
)

# Next to a tower without prefix, `transformer.*` would be the tower's own: no extras.
TOWER = replace(
    CLIP,
    name="clip-visual",
    detect=replace(CLIP.detect, prefixes=("",)),
    keys=replace(CLIP.keys, extras=()),
)

TIMM_TOWER = Family(
    "clip-timm",
    "clip",
    "OpenCLIP with a visual tower from timm",
    detect=Detection(anchors=(*TIMM.detect.anchors, "{w}logit_scale"), prefixes=("visual.trunk.",)),
    keys=KeyMap(rows=(*TIMM.keys.rows, *layer("{w}visual.head.proj", "head")), extras=CLIP.keys.extras),
    profile=replace(
        TIMM.profile,
        preprocess="clip",
        follows=f"{TIMM.profile.follows} OpenCLIP may configure a model otherwise, and may have trained it "
        "with another mean and std.",
    ),
    writer=Writer(read_settings=TIMM.writer.read_settings),
)

FAMILIES = (CLIP, TOWER, TIMM_TOWER)
