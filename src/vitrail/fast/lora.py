"""LoRA (Hu et al. 2021): the weights of q, k and v are frozen; a low-rank update of each is trained.

    W = W_0 + alpha / r  B A        A (r, D) is random at first, B (k d, r) zero, so W is W_0

A twin of the model has the update as a parametrization of `qkv.weight`: reading the weight gives the sum. The
model itself and its files never hold A and B: `merge_lora` writes the sums into it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail.base.errors import ConfigError
from vitrail.fast.executable import share_parameters
from vitrail.fast.parallelism import gather
from vitrail.model import ViT
from vitrail.model.attention import QKV
from vitrail.model.config import ViTConfig
from vitrail.model.init import EmptyParameters

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


def check_rank(config: ViTConfig, rank: int) -> None:
    """Check that the update has no higher rank than the matrix it is added to."""
    most = min(config.width, config.heads_width)
    if rank > most:
        raise ConfigError(f"lora_rank must be an integer from 1 to {most}, not {rank:,}.")


def with_lora(model: ViT, rank: int, alpha: float, seed: int) -> ViT:
    """Return a twin of a model on the CPU with an update in every block, random by the seed alone.

    The twin has a copy of the weights of q, k and v, which stay what they are; all others are shared.
    """
    check_rank(model.config, rank)
    twin = share_parameters(model)
    generator = torch.Generator().manual_seed(seed)
    for qkv in [module for module in twin.blocks.modules() if isinstance(module, QKV)]:
        qkv.weight = nn.Parameter(qkv.weight.detach().clone())
        update = LowRankUpdate(qkv.weight, rank, alpha, generator)
        parametrize.register_parametrization(qkv, "weight", update)
    return twin


def plain_state(model: ViT) -> dict[str, Tensor]:
    """The state of the plain model: LoRA's updates are added to the weights, shards are gathered.

    All processes of a sharded model must call it.
    """
    state = {name: gather(tensor.detach()) for name, tensor in model.state_dict().items()}
    for name in [name for name in state if name.endswith(_ORIGINAL)]:
        qkv = name.removesuffix(_ORIGINAL)
        update = model.get_submodule((qkv + UPDATE).rstrip("."))
        assert isinstance(update, LowRankUpdate)
        A, B = (state.pop(qkv + UPDATE + letter) for letter in "AB")
        state[qkv + ".weight"] = add_update(state.pop(name), A, B, update.scale)
    return state


def plain_model(model: ViT) -> ViT:
    """A plain copy of a model with LoRA or shards. All processes of a sharded model must call it."""
    with EmptyParameters():
        plain = ViT(model.config)
    plain.load_state_dict(plain_state(model), assign=True)
    return plain.to(next(model.parameters()).device).train(model.training)
