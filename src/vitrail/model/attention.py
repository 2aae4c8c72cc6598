"""Multi-head attention (paper, Appendix A): every token looks at every token.

[q, k, v] = z U_qkv                        one product for all heads
A = softmax(q k^T / sqrt(d))               who looks at whom, how much: (T, T) in each head
SA(z) = A v                                the weighted mean of the values
MSA(z) = [SA_1(z); ...; SA_k(z)] U_msa     the heads side by side, projected back to D
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model.norm import build_norm
from vitrail.model.tap import Tap


def unchanged(x: Tensor) -> Tensor:
    return x


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T + bias) v in one fused kernel, which never forms the (T, S) weights.

    q is (B, k, T, d), k and v are (B, k, S, d). `mask` is boolean, True where a token may look;
    `bias` is added to the scores; both broadcast to (B, k, T, S). A token that may look nowhere
    gets zeros.
    """
    if bias is not None:
        bias = bias.to(q.dtype)  # a kernel's softmax runs in one dtype
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, dropout_p=dropout)


def attend_explicitly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    see_scores: Callable[[Tensor], Tensor] = unchanged,
    see_weights: Callable[[Tensor], Tensor] = unchanged,
) -> Tensor:
    """The same as `attend`, step by step, so that scores and weights can be seen and changed."""
    scores = scale * q @ k.transpose(-2, -1)  # (B, k, T, S)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = see_scores(scores).softmax(dim=-1)  # each row sums to 1
    if mask is not None:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0)
    return F.dropout(see_weights(weights), dropout) @ v  # (B, k, T, d)


class Attention(nn.Module):
    """MSA of Eq. 2; with a context, cross-attention: q from the tokens, k and v from the context.

    Args:
        bias: a learned number for each head and pair of tokens, added to the scores (note 004's p_ij).
        scale: what the scores are multiplied with, if not what the config says.
    """

    def __init__(
        self, config: ViTConfig, *, bias: nn.Module | None = None, scale: float | None = None
    ) -> None:
        super().__init__()
        self.head_count = config.heads
        self.scale = scale_of(config) if scale is None else scale
        self.dropout = config.attention_dropout
        self.explicit = 0  # how many `record` and `edit` blocks want the scores or the weights
        inner = config.heads_width
        self.qkv = QKV(config)
        self.q_norm = build_norm(config, config.d) if config.qk_norm else nn.Identity()
        self.k_norm = build_norm(config, config.d) if config.qk_norm else nn.Identity()
        self.bias = bias
        self.out = nn.Linear(inner, config.width)  # U_msa
        self.q, self.k, self.v, self.heads = Tap(), Tap(), Tap(), Tap()
        self.scores, self.weights = Tap(explicit=True), Tap(explicit=True)

    def forward(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        turn: Callable[[Tensor], Tensor] = unchanged,
    ) -> Tensor:
        """Tokens (B, T, D) to tokens (B, T, D); `turn` is how rotary positions turn q and k."""
        q, k, v = self.project(z, context)  # each (B, k, T, d)
        q, k, v = self.q(turn(self.q_norm(q))), self.k(turn(self.k_norm(k))), self.v(v)
        bias = None if self.bias is None else self.bias()
        dropout = self.dropout if self.training else 0.0
        if self.explicit:
            see = {"see_scores": self.scores, "see_weights": self.weights}
            heads = attend_explicitly(q, k, v, scale=self.scale, mask=mask, bias=bias, dropout=dropout, **see)
        else:
            heads = attend(q, k, v, scale=self.scale, mask=mask, bias=bias, dropout=dropout)
        heads = self.heads(heads)
        return self.out(heads.transpose(1, 2).flatten(2))  # (B, T, D)

    def project(self, z: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, k, T, d): of the tokens themselves, or k and v of a context."""
        if context is None:
            parts = [self.qkv(z).unflatten(-1, (3, self.head_count, -1))]  # (B, T, 3, k, d)
        else:
            q, kv = self.qkv.apart(z, context)
            parts = [q.unflatten(-1, (1, self.head_count, -1)), kv.unflatten(-1, (2, self.head_count, -1))]
        q, k, v = (one for part in parts for one in part.permute(2, 0, 3, 1, 4).unbind(0))
        return q, k, v


class QKV(nn.Linear):
    """U_qkv: q, k and v of all heads in one product."""

    kept: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.width, 3 * config.heads_width, bias=config.qkv_bias != "none")
        kept = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(config.heads_width)
        self.register_buffer("kept", kept if config.qkv_bias == "no-k" else None, persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight, self.kept_bias())  # (B, T, 3 k d)

    def apart(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """q of the tokens, k and v of the context, by the same matrix."""
        sizes = [self.out_features // 3, 2 * self.out_features // 3]
        bias = self.kept_bias()
        q_bias, kv_bias = (None, None) if bias is None else bias.split(sizes)
        q_weight, kv_weight = self.weight.split(sizes)
        return F.linear(z, q_weight, q_bias), F.linear(context, kv_weight, kv_bias)

    def kept_bias(self) -> Tensor | None:
        """The bias; where keys go without one (DINOv3), their part of it counts as zero."""
        return self.bias if self.kept is None else self.bias * self.kept


def scale_of(config: ViTConfig) -> float:
    """What the scores are multiplied with."""
    match config.scale:
        case "head":
            return config.d**-0.5
        case "width":
            return config.width**-0.5
        case "none":
            return 1.0
        case number:
            return number
