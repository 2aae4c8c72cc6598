"""What the kernels of `vitrail.fast.kernels` compute, by torch."""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.fast.blocks import Norm
from vitrail.fast.chain import ChainTiles, FoldedNorm
from vitrail.fast.products import Product
from vitrail.fast.quantize import to_fp8


def use_plain_kernels(monkeypatch) -> None:
    """Compute the fused forward pass by torch, without a GPU."""
    monkeypatch.setattr(
        Norm, "__call__", lambda self, z, parts=None, *, dependent=False: norm(self, z, parts)
    )
    monkeypatch.setattr(Product, "ways", lambda self, rows: {"plain": partial(product, self)})
    monkeypatch.setattr("vitrail.fast.chain.load_operations", lambda: sys.modules[__name__])


def norm(norm: Norm, z: Tensor, parts: Tensor | None = None) -> Tensor:
    """The norm of z + shift over the last axis; see `vitrail.fast.kernels.norm_inference`."""
    if parts is not None:
        z.copy_(z + parts.sum(0))
    x, shape = z.float() + norm.shift, norm.weight.shape
    if norm.centered:
        y = F.layer_norm(x, shape, norm.weight, norm.bias, norm.eps)
    else:
        y = F.rms_norm(x, shape, norm.weight, norm.eps) + norm.bias
    return y.to(z.dtype) if norm.factor is None else to_fp8(y, norm.factor)


def product(product: Product, x: Tensor, out: Tensor) -> Tensor:
    """out = f(x W^T scales + bias), or out += that; see `vitrail.fast.kernels.product`."""
    y = x.float() @ product.weight.float().T
    y = y if product.scales is None else y * product.scales
    y = y if product.bias is None else y + product.bias
    y = F.gelu(y) if product.gelu else y
    y = y + out.float() if product.add else y
    return out.copy_(y.to(out.dtype) if product.factor is None else to_fp8(y, product.factor))


# ---- the chain of kernels for few images; see `vitrail.fast.kernels.chain_products` --------------------


def project(
    x: Tensor,
    weight: Tensor,
    tiles: ChainTiles,
    *,
    bias: Tensor | None = None,
    norm: FoldedNorm | None = None,
    gelu: bool = False,
) -> Tensor:
    """f(norm(x) W^T + bias)."""
    y = x.float() @ weight.float().T
    if norm is not None:
        means, squares = norm.statistics  # (M, chunks)
        mean = means.mean(1, keepdim=True) if norm.centered else means.new_zeros(len(means), 1)
        size = x.shape[1] // means.shape[1]
        variance = (squares + size * (means - mean) ** 2).sum(1, keepdim=True) / x.shape[1]
        y = (y + norm.shifted - mean * norm.sums) / (variance + norm.eps).sqrt()
    y = y if bias is None else y + bias
    return (F.gelu(y) if gelu else y).to(x.dtype)


def add_project(x: Tensor, weight: Tensor, z: Tensor, shift: Tensor, tiles: ChainTiles) -> Tensor:
    """z += x W^T; returns the statistics of z + shift."""
    z.copy_(z.float() + x.float() @ weight.float().T)
    chunks = (z.float() + shift).unflatten(1, (-1, tiles.columns))
    mean = chunks.mean(-1, keepdim=True)
    return torch.stack([mean[..., 0], ((chunks - mean) ** 2).sum(-1)])


def project_in_parts(x: Tensor, weight: Tensor, tiles: ChainTiles) -> Tensor:
    """Parts (splits, M, N) whose sum is x W^T."""
    depth = tiles.depth * -(-x.shape[1] // (tiles.depth * tiles.splits))
    columns = [slice(first, first + depth) for first in range(0, depth * tiles.splits, depth)]
    return torch.stack([x[:, part].float() @ weight[:, part].float().T for part in columns])


def attend_first(qkv: Tensor, heads: int, scale: float, queries: int) -> Tensor:
    """The heads (B queries, k d) of the first tokens of each image, which attend to all."""
    q, k, v = qkv.float().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q[:, :, :queries], k, v, scale=scale)
    return y.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[-1]).to(qkv.dtype)
