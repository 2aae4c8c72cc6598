"""LoRA (Hu et al. 2021): the weights of q, k and v are frozen; a low-rank update of each is trained.

    W = W_0 + alpha / r  B A        A (r, D) is random at first, B (k d, r) zero, so W is W_0

The update is a parametrization of `qkv.weight`: reading the weight gives the sum, and the model's own code
needs no change. Weight files never hold A and B: see `plain_model`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError
from vitrail.model import ViT
from vitrail.model.attention import QKV
from vitrail.model.empty import build_empty_model
from vitrail.recipes.settings import TrainConfig
from vitrail.training.sharding import gather

UPDATE = ".parametrizations.weight.0."  # in the names of A and B
_ORIGINAL = ".parametrizations.weight.original"


class LowRankUpdate(nn.Module):
    """The fused weight of q, k and v (3 k d, D) plus an update of rank r to each of the three."""

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        width, inner = weight.shape[1], weight.shape[0] // 3
        self.scale = alpha / rank
        self.A = nn.Parameter(torch.randn(3, rank, width, generator=generator) / width**0.5)
        self.B = nn.Parameter(torch.zeros(3, inner, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return add_update(weight, self.A, self.B, self.scale)


def add_update(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """W_0 + alpha / r  B A, for q, k and v."""
    return weight + scale * (B @ A).flatten(0, 1)


def check_rank(config: ViTConfig, settings: TrainConfig) -> None:
    """Check that the update has no higher rank than the matrix it is added to."""
    most = min(config.width, config.heads_width)
    if settings.tune == "lora" and settings.lora_rank > most:
        raise ConfigError(f"lora_rank must be an integer from 1 to {most}, not {settings.lora_rank:,}.")


def add_lora(model: ViT, settings: TrainConfig) -> None:
    """Add an update to every block of a model on the CPU. Its random values depend on the seed alone."""
    check_rank(model.config, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    for qkv in [module for module in model.blocks.modules() if isinstance(module, QKV)]:
        update = LowRankUpdate(qkv.weight, settings.lora_rank, settings.lora_alpha, generator)
        parametrize.register_parametrization(qkv, "weight", update)


def plain_model(model: ViT) -> ViT:
    """A plain copy of the model: LoRA's updates are added to the weights, shards are gathered.

    All processes of a sharded model must call it.
    """
    state = {name: gather(tensor.detach()) for name, tensor in model.state_dict().items()}
    for name in [name for name in state if name.endswith(_ORIGINAL)]:
        qkv = name.removesuffix(_ORIGINAL)
        update = model.get_submodule((qkv + UPDATE).rstrip("."))
        assert isinstance(update, LowRankUpdate)
        A, B = (state.pop(qkv + UPDATE + letter) for letter in "AB")
        state[qkv + ".weight"] = add_update(state.pop(name), A, B, update.scale)
    plain = build_empty_model(model.config)
    plain.load_state_dict(state, assign=True)
    return plain.to(next(model.parameters()).device).train(model.training)
