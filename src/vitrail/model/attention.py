"""Multi-head self-attention (paper, Appendix A): every token looks at every token.

[q, k, v] = z U_qkv                        one product for all heads
A = softmax(q k^T / sqrt(d))               who looks at whom, how much: (T, T) in each head
SA(z) = A v                                the weighted mean of the values
MSA(z) = [SA_1(z); ...; SA_k(z)] U_msa     the heads side by side, projected back to D
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.model.tap import Tap


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(d)) v in one fused kernel, which never forms the (T, T) weights.

    q, k, v and the result are (B, k, T, d).
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def attend_explicitly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: float = 0.0,
    see_scores: Callable[[Tensor], Tensor] = lambda scores: scores,
    see_weights: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Tensor:
    """The same as `attend`, step by step, so that scores and weights can be seen and changed."""
    scores = see_scores(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5)  # (B, k, T, T)
    weights = see_weights(scores.softmax(dim=-1))  # each row sums to 1
    return F.dropout(weights, dropout) @ v  # (B, k, T, d)


class Attention(nn.Module):
    """MSA, the multi-head self-attention of Eq. 2."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.head_count = config.heads
        self.dropout = config.attention_dropout
        self.explicit = 0  # how many `record` and `edit` blocks want the scores or the weights
        self.qkv = nn.Linear(config.width, 3 * config.heads_width)  # U_qkv
        self.out = nn.Linear(config.heads_width, config.width)  # U_msa
        self.q, self.k, self.v, self.heads = Tap(), Tap(), Tap(), Tap()
        self.scores, self.weights = Tap(explicit=True), Tap(explicit=True)

    def forward(self, z: Tensor) -> Tensor:
        qkv = self.qkv(z).unflatten(-1, (3, self.head_count, -1))  # (B, T, 3, k, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, k, T, d)
        q, k, v = self.q(q), self.k(k), self.v(v)
        dropout = self.dropout if self.training else 0.0
        if self.explicit:
            heads = attend_explicitly(
                q, k, v, dropout=dropout, see_scores=self.scores, see_weights=self.weights
            )
        else:
            heads = attend(q, k, v, dropout=dropout)
        heads = self.heads(heads)
        return self.out(heads.transpose(1, 2).flatten(2))  # (B, T, D)
