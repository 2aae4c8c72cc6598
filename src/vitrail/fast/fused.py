"""The forward pass of a ViT in bf16 or fp8, with few and large kernels. The model itself stays as it is.

weights         what can be multiplied into them is (blocks.py)
norms           one kernel for sum, norm and rounding, or quantization to fp8
products        bias, GELU, residual and quantization in the same kernel where that is faster (products.py)
small batches   kernels that start before the last one is done, with the norms inside products (chain.py)
last block      computes only the tokens that the head reads (`vitrail.fast.variants`)

Blocks that differ too much from the paper's are computed by their own code in bf16, and `left` says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.fast.blocks import BlockBuilder, FusedBlock, Ranges
from vitrail.fast.chain import MAX_ROWS, USUAL_ROWS, Chain, can_chain
from vitrail.fast.choices import Choices
from vitrail.fast.cuda_graph import MAX_SHAPES
from vitrail.fast.products import Product, Way, choose, seconds_on_gpu
from vitrail.fast.variants import tokens_read
from vitrail.model import ViT
from vitrail.model.attention import Attention, attend
from vitrail.model.block import Block
from vitrail.model.check_input import check_input
from vitrail.model.position import Rotate
from vitrail.model.tokens import PatchTokens, cut_patches

_MAX_WIDTH = 8192  # of the norm kernel
_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Run = Callable[[Tensor, tuple[int, ...]], tuple[Tensor, Tensor | None]]
"""Tokens to tokens after the last block, and after the last norm if that is one of all tokens."""


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run there: a GPU, and Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


def why_not_fused(model: ViT) -> str | None:
    """Why the blocks of this model are computed by their own code; None if the kernels fit."""
    block: Any = model.blocks[0]
    if type(block) is not Block:
        return f"block={model.config.block!r} is not the pre-norm block of the paper"
    if not isinstance(block.norm1, (nn.LayerNorm, nn.RMSNorm)):
        return f"norm={model.config.norm!r} has no kernel"
    if model.config.width > _MAX_WIDTH:
        return f"width {model.config.width} is larger than the {_MAX_WIDTH} of the norm kernel"
    return None


class FusedForward:
    """Pooled vectors and logits of images, computed in bf16 or fp8.

    Args:
        model: in any dtype, on the device to use; it is copied.
        ranges, keep: for fp8, see `BlockBuilder`.
        dtype: of tokens and weights; bf16, or fp32 to test without a GPU.
        chained: whether to use the kernels of `vitrail.fast.chain`; by default where they are faster.
    """

    def __init__(
        self,
        model: ViT,
        choices: Choices,
        *,
        ranges: Ranges | None = None,
        keep: Collection[str] = (),
        dtype: torch.dtype = torch.bfloat16,
        chained: bool | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        self.dtype, self.choices = dtype, choices
        self.left = why_not_fused(model)
        """Why the blocks are computed by their own code; None if they are not."""
        tokens: Any = model.tokens
        norms = (tokens.norm_before, tokens.norm_after) if type(tokens) is PatchTokens else ()
        self.adds_patches = bool(norms) and all(isinstance(norm, nn.Identity) for norm in norms)
        """Whether the tokens of an image are one product of its patches."""
        self.read = tokens_read(model)
        """The tokens that the last block computes; None for all."""
        self._ways: dict[tuple[int, int], Way] = {}
        self._same: dict[tuple[int, ...], Tensor] = {}
        if self.left is not None:
            return
        built = BlockBuilder(model, self.model, ranges, keep)
        self.blocks, self.shift, self.last_norm = built.blocks, built.shift, built.last_norm
        qkv = self.blocks[-1].qkv
        self._last_q, self._last_kv = qkv.rows(0, len(qkv.weight) // 3), qkv.rows(len(qkv.weight) // 3)
        self.chained = chained
        self.chain: Chain | None = None
        if can_chain(self.model, self.blocks) and chained is not False:
            self.chain = Chain(self.blocks, self.last_norm, self.read)

    # ---- the forward pass -------------------------------------------------------------------

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled vectors (B, D) and logits (B, K); without a head, the pooled vectors twice."""
        model: Any = self.model
        images = images.to(self.dtype)
        if self.left is not None:
            pooled = model.encode(images).pooled
            return pooled, model.head(pooled)
        grid = check_input(images, model.config, self.dtype, any_size=model.any_size)
        z = self._embed(images, grid) if self.adds_patches else model.first_tokens(images, grid)
        z = z.contiguous()  # (B, T, D)
        run: Run = self.chain if self.chain and self._is_chained(z, grid) else self._one_by_one
        z, y = run(z, grid)
        pooled = (
            model.finish((z.float() + self.shift).to(self.dtype), grid).pooled if y is None else model.pool(y)
        )
        return pooled, model.head(pooled)

    def _embed(self, images: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Eq. 1: the product is added to what is the same for all images, so that no tokens are copied."""
        model: Any = self.model
        E, bias = model.tokens.proj.weight.flatten(1), model.tokens.proj.bias  # (D, P P C)
        patches = cut_patches(images, model.tokens.patch)  # (B, h, w, C, P, P)
        axes = 1 + len(model.tokens.patch)
        down, flat = patches.shape[1:axes], patches.shape[axes:]
        if (same := self._same.get(grid)) is None:
            same = E.new_zeros(down.numel(), len(E))
            same = same if bias is None else same + bias
            same = same if model.prefix is None else torch.cat([model.prefix, same])
            same = model.position(same[None], grid)
            if len(self._same) < MAX_SHAPES:  # none is ever removed: a CUDA graph may read it
                self._same[grid] = same
        z = same.repeat(len(images), 1, 1)  # a copy, also for one image
        x = images.new_empty(*z.shape[:2], E.shape[1])
        prefix = z.shape[1] - down.numel()
        x[:, :prefix] = 0
        x[:, prefix:].unflatten(1, down).unflatten(-1, flat).copy_(patches)
        z.view(-1, len(E)).addmm_(x.view(-1, E.shape[1]), E.T)
        return model.norm_pre(z)

    def _is_chained(self, z: Tensor, grid: tuple[int, ...]) -> bool:
        """Whether the kernels of `vitrail.fast.chain` are faster for so many tokens."""
        rows = len(z) * z.shape[1]
        assert self.chain is not None
        if self.chained is not None or rows > MAX_ROWS:
            return bool(self.chained)
        ways: dict[str, Run] = {"one by one": self._one_by_one, "chained": self.chain}
        default = "chained" if rows <= USUAL_ROWS else "one by one"

        def measure(name: str) -> float:
            tokens = z.clone()
            return seconds_on_gpu(lambda: ways[name](tokens, grid))

        c = self.model.config
        question = f"kernels of {c.depth} blocks of width {c.width}, {tuple(z.shape[:2])} tokens"
        return self.choices.fastest(question, list(ways), measure, default) == "chained"

    def _one_by_one(self, z: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Tokens after the last block, and after the last norm if that is one of all tokens."""
        model: Any = self.model
        rotate = model.position.rotation(grid)
        for index, block in enumerate(self.blocks):
            z = z if index == 0 else model.position.before_block(z, grid).contiguous()
            z = self._run_block(block, z, rotate, last=index == len(self.blocks) - 1)
        if self.last_norm is None:
            return z, None
        return z, self.last_norm(z.view(-1, z.shape[-1])).view_as(z)

    def _run_block(self, block: FusedBlock, z: Tensor, rotate: Rotate, *, last: bool) -> Tensor:
        """Eq. 2 and 3, in place; the last block returns the tokens that the head reads."""
        read = self.read if last else None
        y = block.norm1(z.view(-1, z.shape[-1]))  # (B T, D)
        q, k, v = self._project(block, y, z.shape[:2], rotate, read)
        z = z[:, :read].contiguous()
        flat = z.view(-1, z.shape[-1])
        self._multiply(block.out, self._attend(block.attention, q, k, v), flat)
        y = block.norm2(flat)
        if block.fc1 is None or block.fc2 is None:
            z += block.mlp(y.view_as(z))  # its bias is in it, and not in the shift
        else:
            self._multiply(block.fc2, self._multiply(block.fc1, y), flat)
        return z

    def _project(
        self, block: FusedBlock, y: Tensor, shape: Sequence[int], rotate: Rotate, read: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, k, T, d), with the rotary embedding of q and k; q of the tokens to read."""
        attention = block.attention

        def split(product: Product, rows: Tensor) -> list[Tensor]:
            count = len(product.weight) // block.out.weight.shape[1]  # of q, k and v
            parts = self._multiply(product, rows).unflatten(-1, (count, attention.head_count, -1))
            return list(parts.unflatten(0, (shape[0], -1)).permute(2, 0, 3, 1, 4).unbind(0))

        if read is None:
            q, k, v = split(block.qkv, y)
            return rotate(attention.q_norm(q)), rotate(attention.k_norm(k)), v
        first = y.view(*shape, -1)[:, :read].reshape(-1, y.shape[-1])
        (q,), (k, v) = split(self._last_q, first), split(self._last_kv, y)
        return attention.q_norm(q), rotate(attention.k_norm(k)), v  # no prefix token is rotated

    def _multiply(self, product: Product, x: Tensor, out: Tensor | None = None) -> Tensor:
        key = id(product), len(x)
        if key not in self._ways:
            self._ways[key] = choose(product, len(x), self.choices)
        if out is None:
            out = x.new_empty(len(x), len(product.weight), dtype=product.output_dtype)
        return self._ways[key](x, out)

    def _attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads (B T, k d)."""
        bias = None if attention.bias is None else attention.bias()

        def run() -> Tensor:
            return attend(q, k, v, scale=attention.scale, bias=bias)

        if self.device.type == "cuda":
            with sdpa_kernel(self._fastest_backends(run, q, k, bias), set_priority=True):
                heads = run()
        else:  # in fp32: attention in bf16 ends the process on some CPUs
            dtype, q, k, v = q.dtype, q.float(), k.float(), v.float()
            heads = run().to(dtype)
        heads = attention.norm(heads.transpose(1, 2).flatten(2))
        return heads.reshape(-1, heads.shape[-1])

    def _fastest_backends(
        self, run: Callable[[], Tensor], q: Tensor, k: Tensor, bias: Tensor | None
    ) -> list[SDPBackend]:
        """All backends, the fastest first; where none may be measured, in their usual order.

        The fastest alone would be the only one that other threads may use meanwhile.
        """
        to = f" to {k.shape[2]} tokens" if k.shape[2] != q.shape[2] else ""
        question = f"attention, {tuple(q.shape)}{to}{' with a bias' if bias is not None else ''}"
        if not (self.choices.measure or self.choices.knows(question, list(_BACKENDS))):
            return list(_BACKENDS.values())

        def measure(name: str) -> float:
            with sdpa_kernel(_BACKENDS[name]):
                return seconds_on_gpu(run)

        fastest = _BACKENDS[self.choices.fastest(question, list(_BACKENDS), measure)]
        return [fastest, *(backend for backend in _BACKENDS.values() if backend != fastest)]
