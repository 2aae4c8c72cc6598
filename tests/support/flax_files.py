"""ViTs in Google's layout in plain NumPy, without vitrail and torch.

`Flax` describes a model of vit_jax or big_vision; `.arrays()` are random parameters with its names and
shapes, `.logits()` is what Flax computes from them, in float64, for images (B, H, W, C).
"""

import math
from dataclasses import dataclass

import numpy as np

from tests.support.oracle import gelu as exact_gelu
from tests.support.oracle import layer_norm, softmax

__all__ = ["Flax", "bfloat16", "drawn", "exact_gelu", "same_file", "stem_shapes", "widened"]


def tanh_gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@dataclass(frozen=True)
class Flax:
    style: str = "pre-linen"  # or "linen", both of vit_jax, or "big_vision"
    prefix: str = ""
    width: int = 32
    depth: int = 2
    heads: int = 2
    head_width: int | None = None
    hidden: int = 48
    patch: tuple = (8, 8)
    grid: tuple = (4, 4)
    channels: int = 3
    classes: int = 5
    cls: bool = True
    rep: int = 0  # the width of pre_logits
    map_head: bool = False
    scan: bool = False
    positions: bool = True

    @property
    def size(self):
        return self.grid[0] * self.patch[0], self.grid[1] * self.patch[1]

    @property
    def numbers(self):
        """The indices of attention, second norm and MLP in a block."""
        return (1, 2, 3) if self.style == "pre-linen" else (0, 1, 0)

    def shapes(self):
        D, k, d, F = self.width, self.heads, self.head_width or self.width // self.heads, self.hidden
        a, n, m = self.numbers

        def norm(name):
            return {f"{name}/scale": (D,), f"{name}/bias": (D,)}

        def dense(name, into, out):
            return {f"{name}/kernel": (into, out), f"{name}/bias": (out,)}

        def attention(name):
            qkv = {f"{name}/{part}/kernel": (D, k, d) for part in ("query", "key", "value")}
            qkv |= {f"{name}/{part}/bias": (k, d) for part in ("query", "key", "value")}
            return qkv | {f"{name}/out/kernel": (k, d, D), f"{name}/out/bias": (D,)}

        def mlp(name):
            return dense(f"{name}/Dense_0", D, F) | dense(f"{name}/Dense_1", F, D)

        block = norm("LayerNorm_0") | attention(f"MultiHeadDotProductAttention_{a}")
        block |= norm(f"LayerNorm_{n}") | mlp(f"MlpBlock_{m}")
        shapes = {"embedding/kernel": (*self.patch, self.channels, D), "embedding/bias": (D,)}
        if self.cls:
            shapes["cls"] = (1, 1, D)
        if self.positions:
            in_front = int(self.cls and self.style != "big_vision")
            name = (
                "pos_embedding" if self.style == "big_vision" else "Transformer/posembed_input/pos_embedding"
            )
            shapes[name] = (1, in_front + math.prod(self.grid), D)
        if self.scan:
            shapes |= {f"Transformer/encoderblock/{key}": (self.depth, *s) for key, s in block.items()}
        else:
            for i in range(self.depth):
                shapes |= {f"Transformer/encoderblock_{i}/{key}": s for key, s in block.items()}
        shapes |= norm("Transformer/encoder_norm")
        if self.map_head:
            shapes |= {"MAPHead_0/probe": (1, 1, D)} | norm("MAPHead_0/LayerNorm_0")
            shapes |= attention("MAPHead_0/MultiHeadDotProductAttention_0") | mlp("MAPHead_0/MlpBlock_0")
        if self.rep:
            shapes |= dense("pre_logits", D, self.rep)
        if self.classes:
            shapes |= dense("head", self.rep or D, self.classes)
        return shapes

    def arrays(self, seed=0):
        return {self.prefix + name: array for name, array in drawn(self.shapes(), seed).items()}

    def logits(self, arrays, images, gelu=tanh_gelu):
        """(B, H, W, C) to (B, K); without a head to (B, D)."""
        arrays = {name.removeprefix(self.prefix): array.astype(np.float64) for name, array in arrays.items()}
        return np.stack([self.one(arrays, image, gelu) for image in images.astype(np.float64)])

    def one(self, w, image, gelu):
        (P, Q), (rows, columns) = self.patch, self.grid
        a, n, m = self.numbers

        def norm(z, name, w=w):
            return layer_norm(z, w[f"{name}/scale"], w[f"{name}/bias"], 1e-6)

        def dense(z, name, w=w):
            return z @ w[f"{name}/kernel"] + w[f"{name}/bias"]

        def attend(z, context, name, w=w):
            q, k, v = (
                np.einsum("td,dkh->kth", x, w[f"{name}/{part}/kernel"]) + w[f"{name}/{part}/bias"][:, None]
                for x, part in ((z, "query"), (context, "key"), (context, "value"))
            )
            heads = softmax(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])) @ v  # (k, t, h)
            return np.einsum("kth,khd->td", heads, w[f"{name}/out/kernel"]) + w[f"{name}/out/bias"]

        def mlp(z, name, w=w):
            return dense(gelu(dense(z, f"{name}/Dense_0", w)), f"{name}/Dense_1", w)

        z = []
        for i in range(rows):
            for j in range(columns):
                patch = image[i * P : (i + 1) * P, j * Q : (j + 1) * Q]
                z.append(np.einsum("pqc,pqcd->d", patch, w["embedding/kernel"]) + w["embedding/bias"])
        z = np.stack(z)
        if self.style == "big_vision":
            z = z + (w["pos_embedding"][0] if self.positions else self.sincos())
        if self.cls:
            z = np.concatenate([w["cls"][0], z])
        if self.style != "big_vision":
            z = z + w["Transformer/posembed_input/pos_embedding"][0]
        for i in range(self.depth):
            start = "Transformer/encoderblock/" if self.scan else f"Transformer/encoderblock_{i}/"
            block = {name.removeprefix(start): x for name, x in w.items() if name.startswith(start)}
            block = {name: x[i] for name, x in block.items()} if self.scan else block
            y = norm(z, "LayerNorm_0", block)
            z = z + attend(y, y, f"MultiHeadDotProductAttention_{a}", block)
            z = z + mlp(norm(z, f"LayerNorm_{n}", block), f"MlpBlock_{m}", block)
        z = norm(z, "Transformer/encoder_norm")
        if self.map_head:
            y = attend(w["MAPHead_0/probe"][0], z, "MAPHead_0/MultiHeadDotProductAttention_0")
            y = (y + mlp(norm(y, "MAPHead_0/LayerNorm_0"), "MAPHead_0/MlpBlock_0"))[0]
        else:
            y = z[0] if self.cls else z.mean(axis=0)
        if self.rep:
            y = np.tanh(dense(y, "pre_logits"))
        return dense(y, "head") if self.classes else y

    def sincos(self):
        """big_vision's fixed positions, computed patch by patch and frequency by frequency."""
        table, count = [], self.width // 4
        for i in range(self.grid[0]):
            for j in range(self.grid[1]):
                angles = [[at / 10_000 ** (n / (count - 1)) for n in range(count)] for at in (j, i)]
                table.append([turn(x) for at in angles for turn in (math.sin, math.cos) for x in at])
        return np.array(table)


def drawn(shapes, seed=0):
    """Random arrays of these shapes; scales are near 1."""
    draw = np.random.default_rng(seed).normal
    return {
        name: (name.endswith("scale") + draw(0, 0.2, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def stem_shapes(units=(3, 4, 9), channels=3, four_axes=True):
    """The shapes of a hybrid's ResNet. Older files have scales with four axes."""
    shapes = {}

    def layer(conv, norm, side, into, out):
        shapes[f"{conv}/kernel"] = (side, side, into, out)
        for name in ("scale", "bias"):
            shapes[f"{norm}/{name}"] = (1, 1, 1, out) if four_axes else (out,)

    layer("conv_root", "gn_root", 7, channels, 64)
    into = 64
    for stage, count in enumerate(units):
        width = 64 * 2**stage
        for unit in range(count):
            at = f"block{stage + 1}/unit{unit + 1}"
            if unit == 0:
                layer(f"{at}/conv_proj", f"{at}/gn_proj", 1, into, 4 * width)
            layer(f"{at}/conv1", f"{at}/gn1", 1, into, width)
            layer(f"{at}/conv2", f"{at}/gn2", 3, width, width)
            layer(f"{at}/conv3", f"{at}/gn3", 1, width, 4 * width)
            into = 4 * width
    return shapes


def bfloat16(arrays):
    """Arrays as numpy writes bfloat16, which it does not have: two untyped bytes."""
    return {name: (a.view(np.uint32) >> 16).astype(np.uint16).view("V2") for name, a in arrays.items()}


def widened(arrays):
    """The values of arrays, with two untyped bytes read as bfloat16."""

    def wide(array):
        if array.dtype != np.dtype("V2"):
            return array
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    return {name: wide(array) for name, array in arrays.items()}


def same_file(one, other):
    """Whether two files hold the same names, dtypes, shapes and bits; both must load without pickle."""
    with np.load(one, allow_pickle=False) as a, np.load(other, allow_pickle=False) as b:
        assert set(a) == set(b)
        for name in a:
            assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
            assert a[name].tobytes() == b[name].tobytes(), name
    return True
