"""vit-pytorch's ViT by Phil Wang (lucidrains), in its spellings since version 0.7.

Patches are flattened with the channels of a pixel adjacent, so `channels` must be given if it is not 3.
Heads are 64 wide by default, whatever the token width. `pool="mean"` of vit-pytorch before 1.16 includes
the class token: that is `pool="mean-all"` here. Its SimpleViT is not supported: fixed sines in another
order than ours, and attention whose output projection has no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import FileError
from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.key_rows import layer, patch_rows, patch_vector, row, tokens
from vitrail.weights.families.match import FamilyMatch

if TYPE_CHECKING:
    from torch import Tensor

B, OURS = "{w}{p}transformer.layers.{i}.", "blocks.{i}."
PATCHES = (
    row("{w}{p}to_patch_embedding.1.weight", "tokens.norm_before.weight", patch_vector),
    row("{w}{p}to_patch_embedding.1.bias", "tokens.norm_before.bias", patch_vector),
    *layer("{w}{p}to_patch_embedding.2", "tokens.proj", patch_rows),
    *layer("{w}{p}to_patch_embedding.3", "tokens.norm_after"),
)
OLD_PATCHES = layer("{w}{p}to_patch_embedding.1", "tokens.proj", patch_rows)
ROWS = (
    # (n, D) since version 1.16.2, (1, n, D) before
    row("{w}{p}cls_token", "prefix", tokens(2), parts="prefix"),
    row("{w}{p}pos_embedding", "position.table", tokens(2)),
    *layer(B + "0.norm", OURS + "norm1"),
    row(B + "0.to_qkv.weight", OURS + "attention.qkv.weight"),
    row(B + "0.fn.to_qkv.weight", OURS + "attention.qkv.weight"),
    *layer(B + "0.to_out.0", OURS + "attention.out"),
    *layer(B + "0.fn.to_out.0", OURS + "attention.out"),
    *layer(B + "1.net.0", OURS + "norm2"),
    *layer(B + "1.norm", OURS + "norm2"),
    *layer(B + "1.net.1", OURS + "mlp.fc1"),
    *layer(B + "1.fn.net.0", OURS + "mlp.fc1"),
    *layer(B + "1.net.4", OURS + "mlp.fc2"),
    *layer(B + "1.fn.net.3", OURS + "mlp.fc2"),
    *layer("{w}{p}transformer.norm", "norm"),
    *layer("{w}{p}mlp_head.0", "norm", requires="{w}{p}mlp_head.1.weight"),
    *layer("{w}{p}mlp_head", "head"),
    *layer("{w}{p}mlp_head.1", "head"),
)


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """Where the last norm is: in the transformer, or after the pool."""
    if match.has("{w}{p}linear_head.weight"):
        raise FileError(
            "This is a SimpleViT of vit-pytorch, whose fixed positions have an order of their own; only its "
            "ViT can be read."
        )
    if match.depth and "blocks.0.attention.out.weight" not in match.shapes:
        raise FileError(
            "This vit-pytorch model has one head as wide as its tokens, and therefore attention without an "
            "output projection; such a model cannot be read."
        )
    return {} if match.has("{w}{p}transformer.norm.weight") else {"pool_norm": "after"}


def _unsupported(config: ViTConfig) -> list[str]:
    reasons = []
    if not config.class_token:
        reasons.append("a model without a class token has an empty one there, which is not written")
    if config.heads == 1 and config.d == config.width:
        reasons.append("attention of one head as wide as the tokens has no output projection there")
    return reasons


def _peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    from vit_pytorch import ViT

    model = ViT(
        image_size=config.pixels,
        patch_size=config.patch_pixels,
        channels=config.channels,
        num_classes=config.classes,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        dim_head=config.d,
        mlp_dim=config.F,
    ).eval()
    model.load_state_dict(state)
    return model if config.classes else lambda images: model(images)[:, 0]  # all tokens, without a head


NEW = Family(
    "lucidrains",
    "lucidrains",
    "vit-pytorch's ViT (lucidrains)",
    detect=Detection(anchors=("{w}{p}to_patch_embedding.2.weight", B + "0.norm.weight")),
    keys=KeyMap(
        rows=(*PATCHES, *ROWS),
        extras=("{w}{p}cls_token",),  # an empty one, in a model that pools by the mean
    ),
    profile=Profile(
        fields={"eps": 1e-5, "activation": "gelu"},
        choose=_choose,
        head_width=64,
        preprocess="imagenet",
        follows="vit-pytorch: exact GELU, eps 1e-5, heads of width 64, the class token as pool.",
    ),
    writer=Writer(
        expresses={
            "eps": (1e-5,),
            "activation": ("gelu",),
            "embedding_norm": ("both",),
            "qkv_bias": ("none",),
            "head_width": ...,
            "class_token": (True, False),
        },
        unsupported=_unsupported,
        peer=_peer,
    ),
)

# Before version 1.0 there were no norms around the patch projection. Before 0.10 the parts of a block had
# one more wrapper.
OLD = replace(
    NEW,
    name="lucidrains-old",
    title="vit-pytorch's ViT (lucidrains), before version 1.0",
    detect=Detection(
        anchors=("{w}{p}to_patch_embedding.1.weight", B + "0.norm.weight"),
        without=("{w}{p}to_patch_embedding.2.weight",),
    ),
    keys=KeyMap(
        rows=(*OLD_PATCHES, *ROWS),
        respell=((r"(\.[01]\.)fn\.(norm|fn)\.", r"\1\2."),),
    ),
    writer=Writer(),
)

FAMILIES = (NEW, OLD)
