"""The forward pass of a ViT in bf16 or fp8, with few and large kernels. The model itself stays as it is.

norms           one kernel for sum, norm and rounding, or quantization to fp8
products        bias, GELU, residual and quantization in the same kernel where that is faster (products.py)
biases          those of the second product of a branch are not added to the tokens: they are the same for
                all tokens, so their sum so far is added inside the next norm
LayerScale      multiplied into the weights
last block      computes only the tokens that the head reads (`vitrail.model.last_block`)

Blocks that differ too much from the paper's are computed by their own code in bf16, and `left` says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.fast import plain
from vitrail.fast.choices import Choices
from vitrail.fast.products import Product, Way, choose, seconds_on_gpu
from vitrail.model import ViT
from vitrail.model.attention import Attention, attend
from vitrail.model.block import Block
from vitrail.model.inputs import check_input
from vitrail.model.last_block import tokens_read
from vitrail.model.mlp import MLP
from vitrail.model.norm import LayerScale
from vitrail.model.position import Rotate
from vitrail.model.tokens import PatchTokens, cut_patches

_MAX_WIDTH = 8192  # of the norm kernel
_HEADROOM = 2.0  # of a static scale: activations may be this much larger than in calibration
_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Ranges = Mapping[str, float]
"""The largest absolute input of a linear layer on the calibration images, by its name."""


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


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """A norm, and the sum of the biases that the tokens lack."""

    shift: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    centered: bool
    factor: float | None
    """Quantizes the result to fp8."""

    def __call__(self, z: Tensor, kernels: bool) -> Tensor:
        arguments = z, self.shift, self.weight, self.bias, self.eps
        if not kernels:
            return plain.norm(*arguments, centered=self.centered, factor=self.factor)
        from vitrail.fast.kernels.norm import norm

        return norm(*arguments, centered=self.centered, factor=self.factor)


@dataclass(frozen=True, kw_only=True)
class _FusedBlock:
    norm1: _Norm
    q: Product | None
    """In the last block, if the head reads a few tokens only: their q; `qkv` is then k and v of all."""
    qkv: Product
    attention: Attention
    out: Product
    norm2: _Norm
    fc1: Product | None
    fc2: Product | None
    mlp: Callable[[Tensor], Tensor]
    """The MLP branch by its own code, where there is no `fc1`."""


class FusedForward:
    """Pooled vectors and logits of images, computed in bf16 or fp8.

    Args:
        model: in any dtype, on the device to use; it is copied.
        ranges: quantizes the products with fp8, except the attention's output (its input would need a
            pass of its own to be quantized, which takes longer than fp8 saves).
        keep: names of layers that stay in bf16 nevertheless.
        dtype: of tokens and weights; bf16, or fp32 to test without a GPU.
    """

    def __init__(
        self,
        model: ViT,
        choices: Choices,
        *,
        ranges: Ranges | None = None,
        keep: Collection[str] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device = next(model.parameters()).device
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        self.dtype, self.choices, self.kernels = dtype, choices, has_kernels(self.device)
        self.left = why_not_fused(model)
        """Why the blocks are computed by their own code; None if they are not."""
        self.blocks: list[_FusedBlock] = []
        self.shift = torch.zeros(model.config.width, device=self.device)
        tokens: Any = model.tokens
        norms = (tokens.norm_before, tokens.norm_after) if type(tokens) is PatchTokens else ()
        self.adds_patches = bool(norms) and all(isinstance(norm, nn.Identity) for norm in norms)
        """Whether the tokens of an image are one product of its patches."""
        self.read = tokens_read(model)
        """The tokens that the last block computes; None for all."""
        self._ways: dict[tuple[int, int], Way] = {}
        if self.left is None:
            for index, block in enumerate(model.blocks):
                self.blocks.append(self._build_block(index, block, ranges, set(keep)))

    # ---- weights ----------------------------------------------------------------------------

    def _build_block(self, index: int, block: Any, ranges: Ranges | None, keep: set[str]) -> _FusedBlock:
        name = f"blocks.{index}"
        own: Any = self.model.blocks[index]
        fused_mlp = _is_papers(block.mlp)

        def factor_of(layer: str) -> float | None:
            full = f"{name}.{layer}"
            if ranges is None or full in keep or full not in ranges:
                return None
            return plain.FP8_MAX / _HEADROOM / max(ranges[full], 1e-6)

        qkv_in, fc1_in, fc2_in = map(factor_of, ("attention.qkv", "mlp.fc1", "mlp.fc2"))
        norm1 = self._norm(block.norm1, qkv_in)
        weight, bias = block.attention.qkv.weight, block.attention.qkv.masked_bias()
        q, inner = None, len(weight) // 3
        if self.read is not None and index == len(self.model.blocks) - 1:
            q = self._product(weight[:inner], None if bias is None else bias[:inner], qkv_in)
            weight, bias = weight[inner:], None if bias is None else bias[inner:]
        qkv = self._product(weight, bias, qkv_in)
        out = self._branch_end(block.attention.out, block.scale1, None)
        norm2 = self._norm(block.norm2, fc1_in if fused_mlp else None)
        fc1 = fc2 = None
        if fused_mlp:
            bias = block.mlp.fc1.bias
            bias = torch.zeros(len(block.mlp.fc1.weight), device=self.device) if bias is None else bias
            fc1 = self._product(block.mlp.fc1.weight, bias, fc1_in)
            fc1 = replace(fc1, gelu=True, factor=fc2_in)
            fc2 = self._branch_end(block.mlp.fc2, block.scale2, fc2_in)
        parts: dict[str, Any] = {"norm1": norm1, "q": q, "qkv": qkv, "out": out, "norm2": norm2}
        return _FusedBlock(**parts, attention=own.attention, fc1=fc1, fc2=fc2, mlp=own.mlp_branch)

    def _norm(self, norm: Any, factor: float | None) -> _Norm:
        bias = getattr(norm, "bias", None)
        centered = isinstance(norm, nn.LayerNorm)
        eps = norm.eps if norm.eps is not None else torch.finfo(norm.weight.dtype).eps
        weight = norm.weight.detach().float()
        bias = torch.zeros_like(weight) if bias is None else bias.detach().float()
        shift = self.shift.clone()
        return _Norm(shift=shift, weight=weight, bias=bias, eps=eps, centered=centered, factor=factor)

    def _product(self, weight: Tensor, bias: Tensor | None, factor: float | None) -> Product:
        """A linear layer, whose input is quantized to fp8 with this factor if there is one."""
        weight = weight.detach().float()
        bias = None if bias is None else bias.detach().float()
        if factor is None:
            return Product(weight=weight.to(self.dtype), bias=bias)
        rows = plain.FP8_MAX / weight.abs().amax(1).clamp(min=1e-12)  # (N,): a scale for each channel
        return Product(weight=plain.to_fp8(weight, rows[:, None]), bias=bias, scales=1 / (rows * factor))

    def _branch_end(self, layer: nn.Linear, scale: nn.Module, factor: float | None) -> Product:
        """The second product of a branch, added to the tokens; its bias goes to the shift."""
        scales = scale.weight.detach().float() if isinstance(scale, LayerScale) else 1.0
        weight = layer.weight.detach().float()
        weight = weight * scales[:, None] if isinstance(scales, Tensor) else weight
        if layer.bias is not None:
            self.shift = self.shift + layer.bias.detach().float() * scales
        return replace(self._product(weight, None, factor), add=True)

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
        rotate = model.position.rotation(grid)
        for index, block in enumerate(self.blocks):
            z = z if index == 0 else model.position.before_block(z, grid).contiguous()
            z = self._run_block(block, z, rotate)
        z = (z.float() + self.shift).to(self.dtype)
        pooled = model.finish(z, grid).pooled
        return pooled, model.head(pooled)

    def _embed(self, images: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Eq. 1: the product is added to what is the same for all images, so that no tokens are copied."""
        model: Any = self.model
        E, bias = model.tokens.proj.weight.flatten(1), model.tokens.proj.bias  # (D, P P C)
        patches = cut_patches(images, model.tokens.patch)  # (B, h, w, C, P, P)
        axes = 1 + len(model.tokens.patch)
        down, flat = patches.shape[1:axes], patches.shape[axes:]
        same = E.new_zeros(down.numel(), len(E))
        same = same if bias is None else same + bias
        same = same if model.prefix is None else torch.cat([model.prefix, same])
        z = model.position(same[None], grid).expand(len(images), -1, -1).contiguous()
        x = images.new_empty(*z.shape[:2], E.shape[1])
        prefix = z.shape[1] - down.numel()
        x[:, :prefix] = 0
        x[:, prefix:].unflatten(1, down).unflatten(-1, flat).copy_(patches)
        z.view(-1, len(E)).addmm_(x.view(-1, E.shape[1]), E.T)
        return model.norm_pre(z)

    def _run_block(self, block: _FusedBlock, z: Tensor, rotate: Rotate) -> Tensor:
        """Eq. 2 and 3, in place; the last block returns the tokens that the head reads."""
        y = block.norm1(z.view(-1, z.shape[-1]), self.kernels)  # (B T, D)
        q, k, v = self._project(block, y, z.shape[:2], rotate)
        if block.q is not None:
            z = z[:, : self.read].contiguous()
        flat = z.view(-1, z.shape[-1])
        self._multiply(block.out, self._attend(block.attention, q, k, v), flat)
        y = block.norm2(flat, self.kernels)
        if block.fc1 is None or block.fc2 is None:
            z += block.mlp(y.view_as(z))  # its bias is in it, and not in the shift
        else:
            self._multiply(block.fc2, self._multiply(block.fc1, y), flat)
        return z

    def _project(
        self, block: _FusedBlock, y: Tensor, shape: Sequence[int], rotate: Rotate
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, k, T, d), with the rotary embedding of q and k."""
        attention = block.attention

        def split(product: Product, rows: Tensor) -> list[Tensor]:
            count = len(product.weight) // block.out.weight.shape[1]  # of q, k and v
            parts = self._multiply(product, rows).unflatten(-1, (count, attention.head_count, -1))
            return list(parts.unflatten(0, (shape[0], -1)).permute(2, 0, 3, 1, 4).unbind(0))

        if block.q is None:
            q, k, v = split(block.qkv, y)
            return rotate(attention.q_norm(q)), rotate(attention.k_norm(k)), v
        first = y.view(*shape, -1)[:, : self.read].reshape(-1, y.shape[-1])
        (q,), (k, v) = split(block.q, first), split(block.qkv, y)
        return attention.q_norm(q), rotate(attention.k_norm(k)), v  # no prefix token is rotated

    def _multiply(self, product: Product, x: Tensor, out: Tensor | None = None) -> Tensor:
        key = id(product), len(x)
        if key not in self._ways:
            self._ways[key] = choose(product, len(x), self.choices, kernels=self.kernels)
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
        """The fastest backend; where none may be measured, the first of all that works."""
        to = f" to {k.shape[2]} tokens" if k.shape[2] != q.shape[2] else ""
        question = f"attention, {tuple(q.shape)}{to}{' with a bias' if bias is not None else ''}"
        if not (self.choices.measure or self.choices.knows(question, list(_BACKENDS))):
            return list(_BACKENDS.values())

        def measure(name: str) -> float:
            with sdpa_kernel(_BACKENDS[name]):
                return seconds_on_gpu(run)

        return [_BACKENDS[self.choices.fastest(question, list(_BACKENDS), measure)]]


def _is_papers(mlp: Any) -> bool:
    """Whether an MLP is two products with an exact GELU between, and nothing else."""
    if type(mlp) is not MLP or mlp.middle or not isinstance(mlp.norm, nn.Identity):
        return False
    return isinstance(mlp.activation, nn.GELU) and mlp.activation.approximate == "none"
