"""torchvision's VisionTransformer: vit_b_16, vit_l_32, vit_h_14 and so on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig, format_sides
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.key_rows import layer, lead, row, tokens

if TYPE_CHECKING:
    from torch import Tensor

B, OURS = "{w}{p}encoder.layers.encoder_layer_{i}.", "blocks.{i}."
ROWS = (
    *layer("{w}{p}conv_proj", "tokens.proj"),
    row("{w}{p}class_token", "prefix", tokens(3), parts="prefix"),
    row("{w}{p}encoder.pos_embedding", "position.table", lead(1)),
    *layer(B + "ln_1", OURS + "norm1"),
    row(B + "self_attention.in_proj_weight", OURS + "attention.qkv.weight"),
    row(B + "self_attention.in_proj_bias", OURS + "attention.qkv.bias"),
    *layer(B + "self_attention.out_proj", OURS + "attention.out"),
    *layer(B + "ln_2", OURS + "norm2"),
    *layer(B + "mlp.0", OURS + "mlp.fc1"),
    *layer(B + "mlp.3", OURS + "mlp.fc2"),
    *layer(
        B + "mlp.linear_1", OURS + "mlp.fc1"
    ),  # files of the first version; torchvision's loader takes both
    *layer(B + "mlp.linear_2", OURS + "mlp.fc2"),
    *layer("{w}{p}encoder.ln", "norm"),
    *layer("{w}{p}heads.pre_logits", "head.fc1"),
    *layer("{w}{p}heads.head", "head.fc2", requires="{w}{p}heads.pre_logits.weight"),
    *layer("{w}{p}heads.head", "head"),
)


def _unsupported(config: ViTConfig) -> list[str]:
    """Its constructor takes one side length for images, one for patches, and three channels."""
    reasons = []
    if len(set(config.pixels)) > 1 or len(set(config.patch_pixels)) > 1:
        sides = f"{format_sides(config.pixels)} with patches of {format_sides(config.patch_pixels)}"
        reasons.append(f"images and patches are square there, and {sides} here")
    if config.channels != 3:
        reasons.append(f"channels is 3 there, and {config.channels} here")
    return reasons


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of torchvision's VisionTransformer."""
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


def _peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    from torch import nn
    from torchvision.models import VisionTransformer

    model = VisionTransformer(**_arguments(config))
    if config.classes == 0:  # the usual way to remove the head
        model.heads = nn.Sequential()
    model.load_state_dict(state)
    return model.eval()


TORCHVISION = Family(
    "torchvision",
    "torchvision",
    "torchvision's VisionTransformer",
    detect=Detection(anchors=("{w}{p}conv_proj.weight", B + "self_attention.in_proj_weight")),
    keys=KeyMap(rows=ROWS),
    profile=Profile(
        fields={"eps": 1e-6, "activation": "gelu"},
        resize={"method": "bicubic", "antialias": False, "corners": True},
        preprocess="torchvision",
        follows="torchvision: exact GELU, eps 1e-6, positions resized by bicubic with aligned corners.",
    ),
    # No settings: torchvision keeps a model's arguments in code, and reads no folder.
    writer=Writer(
        expresses={
            "eps": (1e-6,),
            "activation": ("gelu",),
            "head": ("linear", "tanh"),
            "head_hidden": ...,
        },
        unsupported=_unsupported,
        peer=_peer,
    ),
)

FAMILIES = (TORCHVISION,)
