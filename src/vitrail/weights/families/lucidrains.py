"""vit-pytorch's ViT by Phil Wang (lucidrains), in the spellings it has had since version 0.7.

Patches are flattened with a pixel's channels side by side, so `channels` must be told where it is not 3.
A head is 64 wide unless told, whatever the width of the tokens. `pool="mean"` of vit-pytorch before 1.16
includes the class token: that is `pool="mean-all"` here. Its SimpleViT is another model: fixed sines in
another order than ours, and attention whose last layer has no bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.errors import FileError
from vitrail.weights.layout import patch_rows, patch_vector, tokens
from vitrail.weights.table import Family, Found, both, row

if TYPE_CHECKING:
    from torch import Tensor

B, OURS = "{w}{p}transformer.layers.{i}.", "blocks.{i}."
PATCHES = (
    row("{w}{p}to_patch_embedding.1.weight", "tokens.norm_before.weight", patch_vector),
    row("{w}{p}to_patch_embedding.1.bias", "tokens.norm_before.bias", patch_vector),
    *both("{w}{p}to_patch_embedding.2", "tokens.proj", patch_rows),
    *both("{w}{p}to_patch_embedding.3", "tokens.norm_after"),
)
OLD_PATCHES = both("{w}{p}to_patch_embedding.1", "tokens.proj", patch_rows)
ROWS = (
    # (n, D) since version 1.16.2, (1, n, D) before
    row("{w}{p}cls_token", "prefix", tokens(2), parts="prefix"),
    row("{w}{p}pos_embedding", "position.table", tokens(2)),
    *both(B + "0.norm", OURS + "norm1"),
    row(B + "0.to_qkv.weight", OURS + "attention.qkv.weight"),
    row(B + "0.fn.to_qkv.weight", OURS + "attention.qkv.weight"),
    *both(B + "0.to_out.0", OURS + "attention.out"),
    *both(B + "0.fn.to_out.0", OURS + "attention.out"),
    *both(B + "1.net.0", OURS + "norm2"),
    *both(B + "1.norm", OURS + "norm2"),
    *both(B + "1.net.1", OURS + "mlp.fc1"),
    *both(B + "1.fn.net.0", OURS + "mlp.fc1"),
    *both(B + "1.net.4", OURS + "mlp.fc2"),
    *both(B + "1.fn.net.3", OURS + "mlp.fc2"),
    *both("{w}{p}transformer.norm", "norm"),
    *both("{w}{p}mlp_head.0", "norm", beside="{w}{p}mlp_head.1.weight"),
    *both("{w}{p}mlp_head", "head"),
    *both("{w}{p}mlp_head.1", "head"),
)


def choose(found: Found) -> Mapping[str, Any]:
    """Where the last norm stands: in the transformer, or behind the pool."""
    if found.has("{w}{p}linear_head.weight"):
        raise FileError(
            "A file of vit-pytorch must be of its ViT.",
            "a SimpleViT, which has fixed positions in an order of its own",
            "Such a model cannot be read.",
        )
    if found.depth and "blocks.0.attention.out.weight" not in found.shapes:
        raise FileError(
            "Attention must have a last layer.",
            "a vit-pytorch model of one head as wide as its tokens, which leaves that layer out",
            "Such a model cannot be read.",
        )
    return {} if found.has("{w}{p}transformer.norm.weight") else {"pool_norm": "after"}


def also(config: ViTConfig) -> list[str]:
    reasons = []
    if not config.class_token:
        reasons.append("a model without a class token has an empty one there, which is not written")
    if config.heads == 1 and config.d == config.width:
        reasons.append("attention of one head as wide as the tokens has no last layer there")
    return reasons


def peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
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
    return model if config.classes else lambda pictures: model(pictures)[:, 0]  # all tokens, without a head


NEW = Family(
    name="lucidrains",
    group="lucidrains",
    title="vit-pytorch's ViT (lucidrains)",
    anchors=("{w}{p}to_patch_embedding.2.weight", B + "0.norm.weight"),
    rows=(*PATCHES, *ROWS),
    extras=("{w}{p}cls_token",),  # an empty one, in a model that pools by the mean
    fields={"eps": 1e-5, "activation": "gelu"},
    choose=choose,
    head_width=64,
    preprocess="imagenet",
    follows="vit-pytorch: exact GELU, eps 1e-5, heads of width 64, the class token as pool.",
    expresses={
        "eps": (1e-5,),
        "activation": ("gelu",),
        "embedding_norm": ("both",),
        "qkv_bias": ("none",),
        "head_width": ...,
        "class_token": (True, False),
    },
    also=also,
    peer=peer,
)

# Without norms round the patch projection, as it was before version 1.0. Before 0.10 a block's parts
# were wrapped once more.
OLD = replace(
    NEW,
    name="lucidrains-old",
    title="vit-pytorch's ViT (lucidrains), before version 1.0",
    anchors=("{w}{p}to_patch_embedding.1.weight", B + "0.norm.weight"),
    without=("{w}{p}to_patch_embedding.2.weight",),
    rows=(*OLD_PATCHES, *ROWS),
    extras=(),
    respell=partial(re.sub, r"(\.[01]\.)fn\.(norm|fn)\.", r"\1\2."),
    expresses=None,
    peer=None,
)

FAMILIES = (NEW, OLD)
