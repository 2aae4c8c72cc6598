"""A ViT of somebody's own round PyTorch's nn.TransformerEncoder.

The encoder's names are PyTorch's, wherever it stands. What is round it has names that many use; a name of
its author's own goes into a table of `keys`. PyTorch's defaults are taken for granted: norms after the
sums, ReLU, eps 1e-5. Give block="pre-norm" for norm_first=True, and activation="gelu".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.weights.layout import Layout, patch_planes, patch_rows, tokens
from vitrail.weights.table import ANY, Family, Found, both, row

# A convolution's kernel, or the matrix on the flat patch that computes the same; it is written back in
# the shape it had.
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
AROUND = ("", "patch_embed.", "patch_embedding.", "embedding.")  # modules that hold tokens and positions too
CLASS = ("cls_token", "class_token", "cls", "class_embedding", "cls_embedding")
POSITIONS = (
    *("pos_embed", "pos_embedding", "pos_embeddings", "position_embedding", "position_embeddings"),
    *("positional_embedding", "pos_embed.weight", "pos_embedding.weight", "position_embedding.weight"),
)
NORMS = ("{w}{p}norm", "{w}norm", "{w}ln", "{w}ln_f", "{w}layer_norm", "{w}final_norm")
HEADS = ("head", "classifier", "fc", "mlp_head", "fc_out", "linear_head")
NORMED = ("mlp_head", "head", "classifier")  # as a sequence of norm and layer

ROWS = (
    *(one for name in PATCHES for one in both(f"{{w}}{name}", "tokens.proj", kernel)),
    *(one for name in REARRANGED for one in both(f"{{w}}{name}", "tokens.proj", patch_rows)),
    *(row(f"{{w}}{at}{name}", "prefix", tokens(3), parts="prefix") for at in AROUND for name in CLASS),
    *(row(f"{{w}}{at}{name}", "position.table", tokens(3)) for at in AROUND for name in POSITIONS),
    row(B + "self_attn.in_proj_weight", OURS + "attention.qkv.weight"),
    row(B + "self_attn.in_proj_bias", OURS + "attention.qkv.bias"),
    *both(B + "self_attn.out_proj", OURS + "attention.out"),
    *both(B + "norm1", OURS + "norm1"),
    *both(B + "norm2", OURS + "norm2"),
    *both(B + "linear1", OURS + "mlp.fc1"),
    *both(B + "linear2", OURS + "mlp.fc2"),
    *(one for name in NORMS for one in both(name, "norm")),
    *(one for n in NORMED for one in both(f"{{w}}{n}.0", "norm", beside=f"{{w}}{n}.1.weight")),
    *(one for name in NORMED for one in both(f"{{w}}{name}.1", "head")),
    *(one for name in HEADS for one in both(f"{{w}}{name}", "head")),
)


def choose(found: Found) -> Mapping[str, Any]:
    """Whether there is a last norm, and whether it stands behind the pool, with the head."""
    if "norm.weight" not in found.shapes:
        return {"pool_norm": "none"}
    last = next(use.theirs[0] for use in found.uses if use.ours == "norm.weight")
    return {"pool_norm": "after"} if last.endswith(".0.weight") else {}


TORCH = Family(
    name="torch",
    group="torch",
    title="a ViT round PyTorch's nn.TransformerEncoder",
    anchors=(B + "self_attn.in_proj_weight", B + "linear1.weight", B + "norm1.weight"),
    prefixes=(ANY,),
    rows=ROWS,
    fields={"block": "post-norm", "activation": "relu", "eps": 1e-5},
    choose=choose,
    preprocess="imagenet",
    follows=(
        "PyTorch's defaults: norms after the sums, ReLU, eps 1e-5; flat patches hold one channel after the "
        'other. Give block="pre-norm" where the model has norm_first=True, and activation, pool and heads.'
    ),
)

FAMILIES = (TORCH,)
