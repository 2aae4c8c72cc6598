"""The visual tower of OpenAI's CLIP and of OpenCLIP, in its own spelling.

A file holds both towers, `visual.*` and the text tower beside it, or the visual tower alone. The text
tower is kept and written back. OpenAI's own .pt files are TorchScript archives, programs, which are not
read: save `model.state_dict()`. OpenCLIP also has towers from timm, `visual.trunk.*`.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.weights.families.timm import TIMM
from vitrail.weights.layout import same, tokens, turned
from vitrail.weights.table import Family, both, row

B, OURS = "{w}{p}transformer.resblocks.{i}.", "blocks.{i}."
ROWS = (
    row("{w}{p}conv1.weight", "tokens.proj.weight"),
    row("{w}{p}class_embedding", "prefix", tokens(1), parts="prefix"),
    row("{w}{p}positional_embedding", "position.table", same),
    *both("{w}{p}ln_pre", "norm_pre"),
    *both(B + "ln_1", OURS + "norm1"),
    row(B + "attn.in_proj_weight", OURS + "attention.qkv.weight"),
    row(B + "attn.in_proj_bias", OURS + "attention.qkv.bias"),
    *both(B + "attn.out_proj", OURS + "attention.out"),
    row(B + "ls_1.gamma", OURS + "scale1.weight"),  # OpenCLIP's LayerScale
    *both(B + "ln_2", OURS + "norm2"),
    *both(B + "mlp.c_fc", OURS + "mlp.fc1"),
    *both(B + "mlp.c_proj", OURS + "mlp.fc2"),
    row(B + "ls_2.gamma", OURS + "scale2.weight"),
    *both("{w}{p}ln_post", "norm"),
    row("{w}{p}proj", "head.weight", turned),
)
TEXT = (
    *("token_embedding.weight", "positional_embedding", "transformer.*", "ln_final.*", "text_projection*"),
    *("attn_mask", "text.*", "logit_scale", "logit_bias"),
    *("input_resolution", "context_length", "vocab_size"),  # numbers that OpenAI's archives hold as well
)

CLIP = Family(
    name="clip",
    group="clip",
    title="CLIP by OpenAI or OpenCLIP, the visual tower",
    anchors=("{w}{p}conv1.weight", "{w}{p}class_embedding", B + "attn.in_proj_weight"),
    prefixes=("visual.",),
    rows=ROWS,
    extras=tuple(f"{{w}}{name}" for name in TEXT),
    fields={"eps": 1e-5, "activation": "quick-gelu", "pool_norm": "after"},
    resize={"method": "bicubic", "antialias": True},
    preprocess="clip",
    follows=(
        'OpenAI: QuickGELU. Most models of OpenCLIP have the same tensors and need activation="gelu". '
        "Positions are resized as OpenCLIP does it, by bicubic with antialias."
    ),
)

# Beside a lone tower, `transformer.*` would be the tower's own: no extras.
TOWER = replace(CLIP, name="clip-visual", prefixes=("",), extras=())

TIMM_TOWER = replace(
    TIMM,
    name="clip-timm",
    group="clip",
    title="OpenCLIP with a visual tower from timm",
    anchors=(*TIMM.anchors, "{w}logit_scale"),
    prefixes=("visual.trunk.",),
    without=(),
    rows=(*TIMM.rows, *both("{w}visual.head.proj", "head")),
    extras=CLIP.extras,
    preprocess="clip",
    follows=f"{TIMM.follows} OpenCLIP may say otherwise for a model, and may be trained on other levels.",
    expresses=None,
    settings=None,
    peer=None,
)

FAMILIES = (CLIP, TOWER, TIMM_TOWER)
