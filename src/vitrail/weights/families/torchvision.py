"""torchvision's VisionTransformer: vit_b_16, vit_l_32, vit_h_14 and their kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig, by
from vitrail.weights.layout import lead, tokens
from vitrail.weights.table import Family, both, row

if TYPE_CHECKING:
    from torch import Tensor

B, OURS = "{w}{p}encoder.layers.encoder_layer_{i}.", "blocks.{i}."
ROWS = (
    *both("{w}{p}conv_proj", "tokens.proj"),
    row("{w}{p}class_token", "prefix", tokens(3), parts="prefix"),
    row("{w}{p}encoder.pos_embedding", "position.table", lead(1)),
    *both(B + "ln_1", OURS + "norm1"),
    row(B + "self_attention.in_proj_weight", OURS + "attention.qkv.weight"),
    row(B + "self_attention.in_proj_bias", OURS + "attention.qkv.bias"),
    *both(B + "self_attention.out_proj", OURS + "attention.out"),
    *both(B + "ln_2", OURS + "norm2"),
    *both(B + "mlp.0", OURS + "mlp.fc1"),
    *both(B + "mlp.3", OURS + "mlp.fc2"),
    *both(B + "mlp.linear_1", OURS + "mlp.fc1"),  # files of the first version; its loader takes both
    *both(B + "mlp.linear_2", OURS + "mlp.fc2"),
    *both("{w}{p}encoder.ln", "norm"),
    *both("{w}{p}heads.pre_logits", "head.fc1"),
    *both("{w}{p}heads.head", "head.fc2", beside="{w}{p}heads.pre_logits.weight"),
    *both("{w}{p}heads.head", "head"),
)


def also(config: ViTConfig) -> list[str]:
    """Its constructor takes one side for pictures and one for patches, and its projection three channels."""
    reasons = []
    if len(set(config.pixels)) > 1 or len(set(config.patch_pixels)) > 1:
        sides = f"{by(config.pixels)} with patches of {by(config.patch_pixels)}"
        reasons.append(f"pictures and patches are square there, and {sides} here")
    if config.channels != 3:
        reasons.append(f"channels is 3 there, and {config.channels} here")
    return reasons


def arguments(config: ViTConfig) -> dict[str, Any]:
    """What torchvision's VisionTransformer is built with."""
    return {
        "image_size": config.pixels[0],
        "patch_size": config.patch_pixels[0],
        "num_layers": config.depth,
        "num_heads": config.heads,
        "hidden_dim": config.width,
        "mlp_dim": config.F,
        "num_classes": config.classes or 1,
        "representation_size": config.head_hidden or config.width if config.head == "tanh" else None,
    }


def peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    from torch import nn
    from torchvision.models import VisionTransformer

    model = VisionTransformer(**arguments(config))
    if config.classes == 0:  # as its users take the head off
        model.heads = nn.Sequential()
    model.load_state_dict(state)
    return model.eval()


TORCHVISION = Family(
    name="torchvision",
    group="torchvision",
    title="torchvision's VisionTransformer",
    anchors=("{w}{p}conv_proj.weight", B + "self_attention.in_proj_weight"),
    rows=ROWS,
    fields={"eps": 1e-6, "activation": "gelu"},
    resize={"method": "bicubic", "antialias": False, "corners": True},
    preprocess="torchvision",
    follows="torchvision: exact GELU, eps 1e-6, positions resized by bicubic from corner to corner.",
    expresses={
        "eps": (1e-6,),
        "activation": ("gelu",),
        "head": ("linear", "tanh"),
        "head_hidden": ...,
    },
    also=also,
    # No `settings`: torchvision keeps a model's arguments in code, and reads no folder.
    peer=peer,
)

FAMILIES = (TORCHVISION,)
