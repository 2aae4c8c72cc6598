"""Home-made ViTs around PyTorch's nn.TransformerEncoder.

The encoder has PyTorch's names, whatever module holds it. For the layers around it, common names are
known; others go into a key table (`keys`). PyTorch's defaults are assumed: post-norm blocks, ReLU, eps 1e-5.
Give block="pre-norm" for norm_first=True, and activation="gelu".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.weights.families.family import ANY_PREFIX, Detection, Family, KeyMap, Profile
from vitrail.weights.families.key_rows import Layout, layer, patch_planes, patch_rows, row, tokens
from vitrail.weights.families.match import FamilyMatch

# A convolution kernel, or the equivalent matrix on flat patches; it is written back in the shape it had.
kernel = Layout(
    "kernel",
    lambda t, s: t if t.ndim == 4 else patch_planes.read(t, s),
    lambda t, s: t,
    lambda shape, s: shape if len(shape) == 4 else patch_planes.shape(shape, s),
)

B, OURS = "{w}{p}layers.{i}.", "blocks.{i}."
PATCHES = (
    *("patch_embed", "patch_embed.proj", "patch_embed.projection", "patch_embed.conv"),
    *("patch_embedding", "patch_embedding.proj", "patch_embedding.projection", "patch_embedding.conv"),
    *("to_patch_embedding", "patch_proj", "patch_projection", "conv_proj", "embedding", "embed"),
)
REARRANGED = ("to_patch_embedding.1", "patch_embed.1", "patch_embedding.1")  # einops' (p1 p2 c) is layer 0
AROUND = ("", "patch_embed.", "patch_embedding.", "embedding.")  # modules that may hold tokens and positions
CLASS = ("cls_token", "class_token", "cls", "class_embedding", "cls_embedding")
POSITIONS = (
    *("pos_embed", "pos_embedding", "pos_embeddings", "position_embedding", "position_embeddings"),
    *("positional_embedding", "pos_embed.weight", "pos_embedding.weight", "position_embedding.weight"),
)
NORMS = ("{w}{p}norm", "{w}norm", "{w}ln", "{w}ln_f", "{w}layer_norm", "{w}final_norm")
HEADS = ("head", "classifier", "fc", "mlp_head", "fc_out", "linear_head")
NORMED = ("mlp_head", "head", "classifier")  # as nn.Sequential(norm, linear)

ROWS = (
    *(row for name in PATCHES for row in layer(f"{{w}}{name}", "tokens.proj", kernel)),
    *(row for name in REARRANGED for row in layer(f"{{w}}{name}", "tokens.proj", patch_rows)),
    *(row(f"{{w}}{at}{name}", "prefix", tokens(3), parts="prefix") for at in AROUND for name in CLASS),
    *(row(f"{{w}}{at}{name}", "position.table", tokens(3)) for at in AROUND for name in POSITIONS),
    row(B + "self_attn.in_proj_weight", OURS + "attention.qkv.weight"),
    row(B + "self_attn.in_proj_bias", OURS + "attention.qkv.bias"),
    *layer(B + "self_attn.out_proj", OURS + "attention.out"),
    *layer(B + "norm1", OURS + "norm1"),
    *layer(B + "norm2", OURS + "norm2"),
    *layer(B + "linear1", OURS + "mlp.fc1"),
    *layer(B + "linear2", OURS + "mlp.fc2"),
    *(row for name in NORMS for row in layer(name, "norm")),
    *(row for n in NORMED for row in layer(f"{{w}}{n}.0", "norm", requires=f"{{w}}{n}.1.weight")),
    *(row for name in NORMED for row in layer(f"{{w}}{name}.1", "head")),
    *(row for name in HEADS for row in layer(f"{{w}}{name}", "head")),
)


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """Whether there is a last norm, and whether it is after the pool, with the head."""
    if "norm.weight" not in match.shapes:
        return {"pool_norm": "none"}
    last = next(row.theirs[0] for row in match.rows if row.ours == "norm.weight")
    return {"pool_norm": "after"} if last.endswith(".0.weight") else {}


TORCH = Family(
    "torch",
    "torch",
    "a ViT around PyTorch's nn.TransformerEncoder",
    detect=Detection(
        anchors=(B + "self_attn.in_proj_weight", B + "linear1.weight", B + "norm1.weight"),
        prefixes=(ANY_PREFIX,),
    ),
    keys=KeyMap(rows=ROWS),
    profile=Profile(
        fields={"block": "post-norm", "activation": "relu", "eps": 1e-5},
        choose=_choose,
        preprocess="imagenet",
        follows="PyTorch's defaults: post-norm blocks, ReLU, eps 1e-5; flat patches hold one channel after "
        'another. Give block="pre-norm" if the model has norm_first=True, and activation, pool and heads.',
    ),
)

FAMILIES = (TORCH,)
