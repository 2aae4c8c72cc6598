"""The cost model of `vitrail plan`, against real models, and against the memory measured on a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.memory import estimate
from vitrail.base.errors import ConfigError
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.model_memory import activation_bytes
from vitrail.model.presets import preset
from vitrail.training.optim import build_optimizer
from vitrail.training.plan.cost import Cluster, fitting_mode, forward_flops, step_cost
from vitrail.training.recipes.settings import TrainConfig

RESULTS = Path(__file__).parents[2] / "bench" / "results"


SMALL = ViTConfig(width=96, depth=6, heads=3, patch=4, size=32, channels=3, classes=10)
MODELS = {
    "small": {},
    "wide heads": {"head_width": 48},
    "narrow MLP": {"mlp_width": 200},
    "SwiGLU": {"mlp": "gated", "activation": "silu"},
    "two hidden layers": {"mlp_hidden": 2},
    "registers": {"registers": 4},
}


@pytest.mark.parametrize("changes", [*MODELS.values(), {"size": (24, 40), "patch": (4, 8)}], ids=str)
def test_operations_are_those_of_a_real_model(changes):
    """Torch counts those of every matrix product."""
    config = replace(SMALL, **changes)
    with torch.device("meta"):
        model, images = ViT(config), torch.rand(3, *config.input_shape)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert 3 * forward_flops(config) == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_activations_are_what_a_real_model_keeps(changes):
    """The memory of all tensors that are saved for the backward pass, in fp32, within 10 %."""
    config = replace(SMALL, **changes)
    model, images = ViT(config).train(), torch.rand(8, *config.input_shape)
    given = {tensor.untyped_storage().data_ptr() for tensor in (images, *model.parameters())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(images).logsumexp(1).sum()
    measured = sum(size for address, size in kept.items() if address not in given)
    assert loss.requires_grad
    assert activation_bytes(config, 8, residual=4) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_states_are_those_of_a_real_step(changes):
    """Weights, gradients and the moments of AdamW, but for biases and norms."""
    config = replace(SMALL, **changes)
    model = ViT(config)
    optimizer = build_optimizer(model, TrainConfig())
    model(torch.rand(2, *config.input_shape)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    cost = step_cost(config, Cluster(), 8)
    assert (cost.mode, cost.traffic) == ("one", 0.0)
    assert cost.states == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.02)
    with_ema = step_cost(config, Cluster(), 8, ema=True).states - cost.states
    assert with_ema == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=0.02)


def test_peaks_of_memory_as_measured():
    """`python -m bench.memory` on a GPU, within 10 %: B/16 to g/14, and shards of eight processes."""
    rows = json.loads((RESULTS / "memory.json").read_text())["rows"]
    assert {(row["size"], row["shards"]) for row in rows} >= {
        ("L/16", 1),
        ("H/14", 1),
        ("L/16", 8),
        ("H/14", 8),
    }
    for row in rows:
        formula = estimate(row["size"], row["images"], row["checkpoint_blocks"], row["shards"])
        assert formula / 2**30 == pytest.approx(row["peak_gib"], rel=0.1), row


def test_operations_of_a_forward_pass():
    """ViT-B/16: 17.6 billion multiplications and as many additions (the paper's 55.4 at 384 pixels)."""
    assert forward_flops(preset("B/16")) / 2e9 == pytest.approx(17.6, rel=0.01)
    assert forward_flops(preset("B/16@384")) / 2e9 == pytest.approx(55.5, rel=0.01)


def test_more_gpus_are_faster_until_traffic_takes_longer():
    def cost(gpus, **links):
        return step_cost(preset("L/16"), Cluster(gpus=gpus, nodes=max(1, gpus // 8), **links), 1024)

    assert cost(8).compute == pytest.approx(8 * cost(64).compute)
    assert cost(64, network=1e9).bottleneck == "traffic"
    assert cost(64, network=1e9).seconds > cost(64).seconds
    assert cost(8, network=1e9).seconds == cost(8).seconds  # one machine
    assert cost(8, cores=1).bottleneck == "loading"


def test_what_is_sent():
    """Rings: copies send gradients twice; shards get weights twice in bf16 and gradients once, in every part."""
    count = sum(preset("g/14").parameter_counts.values())
    copies = step_cost(preset("g/14"), Cluster(gpus=8), 64)
    assert copies.sent == pytest.approx(2 * 4 * count * 7 / 8)
    shards = [
        step_cost(preset("g/14"), Cluster(gpus=8, memory=12 * 2**30), 64, checkpointed=40, accumulate=n)
        for n in (1, 2)
    ]
    assert [cost.mode for cost in shards] == ["fsdp", "fsdp"]
    assert shards[0].sent == pytest.approx(8 * count * 7 / 8)
    assert shards[1].sent == 2 * shards[0].sent
    assert (copies.all_gather, copies.reduce_scatter, copies.all_reduce) == (0, 0, copies.sent)
    assert shards[0].all_gather == shards[0].reduce_scatter == pytest.approx(4 * count * 7 / 8)
    assert shards[0].all_reduce == 0


def test_what_replicas_of_shards_send():
    """Weights and gradients within a machine; between the two, an eighth of the gradients, twice half of it."""
    count = sum(preset("g/14").parameter_counts.values())
    cluster = Cluster(gpus=16, nodes=2, memory=12 * 2**30)
    cost = step_cost(preset("g/14"), cluster, 1024, checkpointed=40)
    assert cost.mode == "hsdp"
    assert cost.all_gather == cost.reduce_scatter == pytest.approx(4 * count * 7 / 8)
    assert cost.all_reduce == pytest.approx(4 * count / 8)
    assert cost.read == 64 * 110_000  # image files of a GPU


def test_recomputed_blocks_take_less_memory_and_more_time():
    plain, less = (step_cost(preset("H/14"), Cluster(), 64, checkpointed=blocks) for blocks in (0, 32))
    assert less.activations < plain.activations / 4
    assert less.compute == pytest.approx(plain.compute * 4 / 3)
    assert step_cost(preset("H/14"), Cluster(), 64, ema=True).checkpoint == plain.checkpoint * 4 / 3


def test_the_mode_by_what_fits():
    needed, fits = {1: 100, 2: 60, 16: 25}, {100: "ddp", 60: "hsdp", 30: "fsdp", 10: "fsdp"}
    for memory, mode in fits.items():
        assert fitting_mode(needed.__getitem__, 16, 2, lambda size, most=memory: size <= most) == mode
    assert fitting_mode(needed.__getitem__, 1, 1, lambda size: False) == "one"


def test_uneven_machines_and_batches_are_refused():
    with pytest.raises(ConfigError, match="7 GPUs on 2 nodes"):
        Cluster(gpus=7, nodes=2)
    with pytest.raises(ConfigError, match="divisible by GPUs times accumulate; got batch=100, 8 GPUs"):
        step_cost(preset("B/16"), Cluster(gpus=8), 100)
