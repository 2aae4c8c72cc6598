"""Token merging (Bolya et al. 2023, ToMe): the most similar patches of each block become one token.

In each block, between attention and MLP, the r tokens that are most like another one by their keys are
averaged into it. A token counts in attention as often as the patches it stands for: log(size) is added to
the scores. At the end each patch gets the token that it became part of, so every pooling sees all patches.
Prefix tokens are never merged.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.model import ViT
from vitrail.model.attention import attend
from vitrail.model.block import Block
from vitrail.model.check_input import check_input
from vitrail.model.device import eval_mode
from vitrail.model.position import identity


def why_not_merged(model: ViT) -> str | None:
    """Why the tokens of this model cannot be merged; None if they can."""
    block: Any = model.blocks[0]
    if type(block) is not Block:
        return f"block={model.config.block!r} is not the pre-norm block of the paper"
    position = model.position
    once = position.rotation(model.config.grid) is identity and block.attention.bias is None
    if not once or model.config.position_at == "every":
        return f"position={model.config.position!r} needs the position of each token in each block"
    return None


class MergedForward:
    """Pooled vectors and logits of images, with fewer tokens from block to block.

    Args:
        model: it is copied.
        r: tokens that are merged in each block.
    """

    def __init__(self, model: ViT, r: int, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        self.r, self.dtype = r, dtype

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        with eval_mode(model):
            grid = check_input(images.to(self.dtype), model.config, self.dtype, any_size=model.any_size)
            z = model.first_tokens(images.to(self.dtype), grid)  # (B, T, D)
            merged = Merged(z.shape[0], z.shape[1] - model.config.prefix, z.device)
            for block in model.blocks:
                z = self._run_block(block, z, merged)
            pooled = model.finish(merged.restore(z), grid).pooled
            return pooled, model.head(pooled)

    def _run_block(self, block: Any, z: Tensor, merged: Merged) -> Tensor:
        """Eq. 2, fewer tokens, then Eq. 3."""
        attention = block.attention
        q, k, v = attention.project(block.norm1(z), None)
        q, k = attention.q_norm(q), attention.k_norm(k)
        heads = attend(q, k, v, scale=attention.scale, bias=merged.bias(z))
        z = z + block.scale1(attention.out(attention.norm(heads.transpose(1, 2).flatten(2))))
        z = merged.merge(z, k.mean(1), self.r)
        return block.out(z + block.mlp_branch(block.norm2(z)))


class Merged:
    """How many patches each token stands for, and where each patch is now."""

    def __init__(self, images: int, patches: int, device: torch.device) -> None:
        self.sizes: Tensor | None = None
        """(B, n, 1) in fp32; None before anything is merged."""
        self.where = torch.arange(patches, device=device).expand(images, -1)  # (B, N)

    def bias(self, z: Tensor) -> Tensor | None:
        """log(size), added to the scores of attention: (B, 1, T, T)."""
        if self.sizes is None:
            return None
        prefix = z.shape[1] - self.sizes.shape[1]
        logs = F.pad(self.sizes.log()[..., 0], (prefix, 0)).to(z.dtype)
        return logs[:, None, None].expand(-1, 1, z.shape[1], -1)

    def merge(self, z: Tensor, keys: Tensor, r: int) -> Tensor:
        """Tokens (B, T, D) to tokens (B, T - r, D); `keys` (B, T, d) are compared."""
        prefix = z.shape[1] - (self.where.shape[1] if self.sizes is None else self.sizes.shape[1])
        first, patches = z[:, :prefix], z[:, prefix:]
        r = min(r, patches.shape[1] // 2)
        if r == 0:
            return z
        if self.sizes is None:
            self.sizes = torch.ones(*patches.shape[:2], 1, device=z.device)
        where = place_merged(patches.shape[1], *match(keys[:, prefix:], r))
        sums = torch.cat([patches.float() * self.sizes, self.sizes], dim=-1)
        sums = sums.new_zeros(len(z), patches.shape[1] - r, sums.shape[-1]).scatter_add(
            1, where[..., None].expand_as(sums), sums
        )
        means, self.sizes = sums[..., :-1] / sums[..., -1:], sums[..., -1:]
        self.where = where.gather(1, self.where)
        return torch.cat([first, means.to(z.dtype)], dim=1)

    def restore(self, z: Tensor) -> Tensor:
        """All tokens again, (B, T, D): each patch has the token that it became part of."""
        if self.sizes is None:
            return z
        prefix = z.shape[1] - self.sizes.shape[1]
        patches = z[:, prefix:].gather(1, self.where[..., None].expand(-1, -1, z.shape[-1]))
        return torch.cat([z[:, :prefix], patches], dim=1)


def match(keys: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bipartite soft matching: every second token looks for the one of the others that is most like it.

    Args:
        keys: (B, N, d), compared by their cosine.

    Returns:
        Of the odd tokens: those that stay (B, N // 2 - r), those that move (B, r), and the even token that
        each of these moves to (B, r). The numbers count odd or even tokens only.
    """
    keys = F.normalize(keys.float(), dim=-1)
    best, target = (keys[:, 1::2] @ keys[:, ::2].transpose(1, 2)).max(dim=-1)  # each (B, N // 2)
    order = best.argsort(dim=-1, descending=True, stable=True)
    moved, kept = order[:, :r], order[:, r:].sort(dim=-1).values
    return kept, moved, target.gather(1, moved)


def place_merged(count: int, kept: Tensor, moved: Tensor, targets: Tensor) -> Tensor:
    """The new index of each of `count` tokens, (B, count): first the odd ones that stay, then the even."""
    stay = kept.shape[1]
    odd = kept.new_zeros(len(kept), count // 2)
    odd = odd.scatter(1, kept, torch.arange(stay, device=kept.device).expand_as(kept))
    odd = odd.scatter(1, moved, targets + stay)
    even = stay + torch.arange(count - count // 2, device=kept.device).expand(len(kept), -1)
    found = kept.new_zeros(len(kept), count)
    found[:, 1::2], found[:, ::2] = odd, even
    return found
