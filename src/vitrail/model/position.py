"""Where each token stands: E_pos of Eq. 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig


class LearnedPosition(nn.Module):
    """One learned row for each token, the class token included: N + 1 rows."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.tokens, config.width))

    def forward(self, z: Tensor) -> Tensor:
        return z + self.table  # (B, T, D)
