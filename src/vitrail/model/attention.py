"""Multi-head self-attention (paper, Appendix A): every token attends to every token.

[q, k, v] = z U_qkv                        one product for all heads
A = softmax(q k^T / sqrt(d))               the attention weights: (T, T) in each head
SA(z) = A v                                the weighted mean of the values
MSA(z) = [SA_1(z); ...; SA_k(z)] U_msa     the heads concatenated and projected back to D
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.config import ViTConfig
from vitrail.model.layers import build_norm
from vitrail.model.packing import Segments
from vitrail.model.position import Rotate, identity
from vitrail.model.tap import Tap, TappedModule


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | Segments | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T + bias) v in one fused kernel, which never forms the (T, S) weights.

    q is (B, k, T, d), k and v are (B, k, S, d). `mask` is boolean, True where a token may attend;
    `bias` is added to the scores; both broadcast to (B, k, T, S). A token that may attend to nothing
    gets zeros. With `Segments` as the mask, several sequences are packed into one.
    """
    if isinstance(mask, Segments):
        return mask.attend(q, k, v, scale=scale, dropout=dropout)
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
    tap_scores: Callable[[Tensor], Tensor] = identity,
    tap_weights: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Compute `attend` step by step, so that scores and weights can be recorded and edited."""
    scores = scale * q @ k.transpose(-2, -1)  # (B, k, T, S)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = tap_scores(scores).softmax(dim=-1)  # each row sums to 1
    if mask is not None:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0)
    return F.dropout(tap_weights(weights), dropout) @ v  # (B, k, T, d)


class Attention(TappedModule):
    """MSA of Eq. 2; with a context, cross-attention: q from the tokens, k and v from the context.

    Args:
        bias: a module that returns the position bias added to the scores, (k, T, T).
        scale: the factor of the scores; by default the one of `config.scale`.
    """

    def __init__(
        self, config: ViTConfig, *, bias: nn.Module | None = None, scale: float | None = None
    ) -> None:
        super().__init__()
        self.head_count = config.heads
        self.scale = attention_scale(config) if scale is None else scale
        self.dropout = config.attention_dropout
        self.explicit = 0  # how many `record` and `edit` contexts need the scores or the weights
        inner = config.heads_width
        self.qkv = QKV(config)
        self.q_norm = build_norm(config, config.d) if config.qk_norm else nn.Identity()
        self.k_norm = build_norm(config, config.d) if config.qk_norm else nn.Identity()
        self.bias = bias
        self.norm = build_norm(config, inner) if config.attention_norm else nn.Identity()
        self.out = nn.Linear(inner, config.width, bias=config.linear_bias)  # U_msa
        self.q, self.k, self.v, self.heads = Tap(), Tap(), Tap(), Tap()
        self.scores, self.weights = Tap(explicit=True), Tap(explicit=True)

    def forward(
        self,
        z: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | Segments | None = None,
        rotate: Rotate = identity,
    ) -> Tensor:
        """Tokens (B, T, D) to tokens (B, T, D); `rotate` applies the rotary embedding to q and k."""
        q, k, v = self.project(z, context)  # each (B, k, T, d)
        q, k, v = self.q(rotate(self.q_norm(q))), self.k(rotate(self.k_norm(k))), self.v(v)
        bias = None if self.bias is None else self.bias()
        dropout = self.dropout if self.training else 0.0
        if self.explicit:
            taps = {"tap_scores": self.scores, "tap_weights": self.weights}
            mask = mask.dense(q.device) if isinstance(mask, Segments) else mask
            heads = attend_explicitly(
                q, k, v, scale=self.scale, mask=mask, bias=bias, dropout=dropout, **taps
            )
        else:
            heads = attend(q, k, v, scale=self.scale, mask=mask, bias=bias, dropout=dropout)
        heads = self.heads(heads)
        return self.out(self.norm(heads.transpose(1, 2).flatten(2)))  # (B, T, D)

    def project(self, z: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, k, T, d); k and v come from the context if there is one."""
        if context is None:
            parts = [self.qkv(z).unflatten(-1, (3, self.head_count, -1))]  # (B, T, 3, k, d)
        else:
            q, kv = self.qkv.project_cross(z, context)
            parts = [q.unflatten(-1, (1, self.head_count, -1)), kv.unflatten(-1, (2, self.head_count, -1))]
        q, k, v = (tensor for part in parts for tensor in part.permute(2, 0, 3, 1, 4).unbind(0))
        return q, k, v


class QKV(nn.Linear):
    """U_qkv: q, k and v of all heads in one product."""

    bias_mask: Tensor | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.width, 3 * config.heads_width, bias=config.qkv_bias != "none")
        mask = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(config.heads_width)
        self.register_buffer("bias_mask", mask if config.qkv_bias == "no-k" else None, persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight, self.masked_bias())  # (B, T, 3 k d)

    def project_cross(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """q of the tokens, and k and v of the context, with the rows of the same matrix."""
        sizes = [self.out_features // 3, 2 * self.out_features // 3]
        bias = self.masked_bias()
        q_bias, kv_bias = (None, None) if bias is None else bias.split(sizes)
        q_weight, kv_weight = self.weight.split(sizes)
        return F.linear(z, q_weight, q_bias), F.linear(context, kv_weight, kv_bias)

    def masked_bias(self) -> Tensor | None:
        """The bias; if keys have none (DINOv3), their part is masked to zero."""
        return self.bias if self.bias_mask is None else self.bias * self.bias_mask


def attention_scale(config: ViTConfig) -> float:
    """The factor that attention scores are multiplied by."""
    match config.scale:
        case "head":
            return config.d**-0.5
        case "width":
            return config.width**-0.5
        case "none":
            return 1.0
        case number:
            return number
