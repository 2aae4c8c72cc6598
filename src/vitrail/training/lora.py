"""LoRA (Hu et al. 2021): the weights of q, k and v stay, and learn an update of low rank beside them.

    W = W_0 + alpha / r  B A        A (r, D) is random at first, B (k d, r) zero: W is W_0

The update is a parametrization of `qkv.weight`: whoever asks for the weight gets the sum, and the
model's own code knows nothing of it. A file of weights never holds A and B: see `merged`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError
from vitrail.model import ViT
from vitrail.model.attention import QKV
from vitrail.training.settings import TrainConfig
from vitrail.weights.load import unfilled

UPDATE = ".parametrizations.weight.0."  # in the names of A and B
ORIGINAL = ".parametrizations.weight.original"


class LowRank(nn.Module):
    """The fused weight of q, k and v (3 k d, D) with an update of rank r to each of the three."""

    def __init__(self, weight: Tensor, rank: int, alpha: float, chance: torch.Generator) -> None:
        super().__init__()
        width, inner = weight.shape[1], weight.shape[0] // 3
        self.scale = alpha / rank
        self.A = nn.Parameter(torch.randn(3, rank, width, generator=chance) / width**0.5)
        self.B = nn.Parameter(torch.zeros(3, inner, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.B @ self.A).flatten(0, 1)


def check_rank(config: ViTConfig, settings: TrainConfig) -> None:
    """An update has no more rank than the matrix it is added to."""
    most = min(config.width, config.heads_width)
    if settings.tune == "lora" and settings.lora_rank > most:
        raise ConfigError(f"lora_rank must be a whole number from 1 to {most}, not {settings.lora_rank:,}.")


def adapt(model: ViT, settings: TrainConfig) -> None:
    """Give every block of a model its update, on the CPU; the random numbers are the seed's alone."""
    chance = torch.Generator().manual_seed(settings.seed)
    for qkv in [part for part in model.blocks.modules() if isinstance(part, QKV)]:
        update = LowRank(qkv.weight, settings.lora_rank, settings.lora_alpha, chance)
        parametrize.register_parametrization(qkv, "weight", update)


def merged(model: ViT) -> ViT:
    """A plain copy with the updates added into the weights, which any reader of weights reads."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(ORIGINAL):
            tensor = model.get_submodule(name.removesuffix(ORIGINAL)).weight  # the sum
            name = name.removesuffix(ORIGINAL) + ".weight"
        if UPDATE not in name:
            state[name] = tensor.detach().clone()
    with unfilled():
        plain = ViT(model.config)
    plain.load_state_dict(state, assign=True)
    return plain.to(next(model.parameters()).device).train(model.training)
