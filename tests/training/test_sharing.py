"""Which way of sharing a model among processes is chosen, without starting any."""

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch

import vitrail as vt
from vitrail.base.errors import ConfigError
from vitrail.fast import parallelism as shards
from vitrail.model.device import ComputeDevice, choose_device
from vitrail.model.model_memory import activation_bytes
from vitrail.model.presets import preset
from vitrail.training import parallel
from vitrail.training.parallel import ProcessGroup
from vitrail.training.plan.cost import MARGIN, Cluster, step_cost
from vitrail.training.recipes.settings import TrainConfig


@dataclass(frozen=True)
class Ranks(ProcessGroup):
    """Processes that are all like this one."""

    def any(self, flag):
        return flag


@pytest.fixture
def choose(monkeypatch):
    """What `auto` chooses for S/16 at 32 pixels with so much memory for a process."""
    model, compute = vt.create("S/16@32", classes=3), choose_device("fp32", device="cpu")

    def choose(memory, ranks, **settings):
        monkeypatch.setattr(parallel, "usable_memory", lambda compute, ranks: memory)
        return parallel._choose_mode(model, TrainConfig(batch=64, **settings), compute, ranks, 64)

    block = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    choose.weights = 4 * sum(p.numel() for p in model.parameters())
    choose.gathered = 3 * 4 * block  # the weights of two blocks, and the gradient of one, in fp32
    choose.working = activation_bytes(model.config, 64 // 16)
    return choose


def test_auto_is_ddp_while_everything_fits(choose):
    fits = 5 * choose.weights + choose.working  # gradients twice: one is a buffer for their average
    mode, reason = choose(fits, Ranks(0, 16, 0, 8))
    assert mode == "ddp"
    assert "weights, gradients and optimizer take" in reason
    assert choose(fits - 1, Ranks(0, 16, 0, 8))[0] != "ddp"
    assert choose(math.inf, Ranks(0, 16, 0, 8))[0] == "ddp"  # on a system that does not say what it has


def test_auto_shards_within_a_machine_if_that_suffices(choose):
    fits = 4 * choose.weights / 8 + choose.gathered + choose.working
    mode, reason = choose(fits, Ranks(0, 16, 0, 8))
    assert mode == "hsdp"
    assert "more than" in reason
    assert choose(fits, Ranks(0, 16, 0, 16))[0] == "fsdp"  # one machine
    assert choose(fits - 1, Ranks(0, 16, 0, 8))[0] == "fsdp"


def test_the_ema_and_recomputed_blocks_count(choose):
    fits = 5 * choose.weights + choose.working
    assert choose(fits, Ranks(0, 16, 0, 8), ema=0.9)[0] != "ddp"
    config = preset("B/16")
    assert activation_bytes(config, 8, checkpointed=12) < activation_bytes(config, 8) / 4


@pytest.mark.parametrize("size", ["B/16", "L/16", "H/14", "g/14"])
def test_auto_chooses_what_plan_advises(monkeypatch, size):
    """Over memories, GPUs, images, recomputed blocks, accumulation and EMA. An advised mode fits, unless not
    even shards over all GPUs do."""
    config, compute = preset(size), ComputeDevice(torch.device("cpu"), torch.bfloat16, "")
    with torch.device("meta"):
        model = vt.ViT(config)
    clusters, found = ((2, 1), (6, 3), (8, 1), (16, 2), (64, 64)), set()
    blocks, more = (0, config.depth // 2, config.depth), ({"accumulate": 1}, {"accumulate": 2, "ema": 0.9})
    how = [{"checkpoint_blocks": some, **extra} for some, extra in product(blocks, more)]
    for gib, (gpus, nodes), images, extra in product((2, 7, 15, 24, 80), clusters, (64, 128), how):
        memory, batch = gib * 2**30, images * gpus
        cost = step_cost(
            config,
            Cluster(gpus=gpus, nodes=nodes, memory=memory),
            batch,
            checkpointed=extra["checkpoint_blocks"],
            accumulate=extra["accumulate"],
            ema="ema" in extra,
        )
        monkeypatch.setattr(parallel, "usable_memory", lambda compute, ranks, all=memory: MARGIN * all)
        ranks, settings = Ranks(0, gpus, 0, gpus // nodes), TrainConfig(batch=batch, residual="bf16", **extra)
        mode, _ = parallel._choose_mode(model, settings, compute, ranks, batch)
        assert mode == cost.mode, (gib, gpus, images, extra)
        assert cost.fits or cost.mode == "fsdp"
        found.add(cost.mode)
    assert found == {"ddp", "fsdp", "hsdp"}


def test_the_shards_of_recomputed_blocks_count():
    """Two cases in which `plan` once advised what `auto` did not choose, or what did not fit."""
    two = step_cost(preset("H/14"), Cluster(gpus=16, nodes=2, memory=15 * 2**30), 16 * 64, checkpointed=32)
    assert (two.mode, two.fits) == ("ddp", True)
    few = step_cost(preset("g/14"), Cluster(gpus=16, nodes=2, memory=7 * 2**30), 16 * 128, checkpointed=40)
    assert (few.mode, few.fits) == ("fsdp", True)


@pytest.mark.parametrize(("ranks", "shards"), [((0, 16, 0, 8), 8), ((0, 4, 0, 4), 2), ((0, 8, 0, 8), 4)])
def test_hsdp_has_a_replica_on_each_machine_or_two_on_one(ranks, shards):
    assert parallel.shards_of_replica(ProcessGroup(*ranks)) == shards


@pytest.mark.parametrize("ranks", [(0, 2, 0, 2), (0, 4, 0, 1), (0, 5, 0, 5)])
def test_hsdp_of_too_few_processes_is_refused(ranks):
    with pytest.raises(ConfigError, match=f"{ranks[1]} processes, .* use parallel=fsdp"):
        parallel.shards_of_replica(ProcessGroup(*ranks))


def test_one_process_shares_nothing():
    model, compute = vt.create("mu/4"), choose_device("fp32", device="cpu")
    found = parallel.choose_parallelism(model, TrainConfig(parallel="fsdp"), compute, ProcessGroup(), 8)
    assert (found.mode, found.sharded) == ("one", False)


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match="fsdp"):
        TrainConfig(parallel="fully")


def test_a_whole_tensor_is_copied_into_a_plain_one():
    target = torch.zeros(3)
    shards.copy_into(target, torch.arange(3.0))
    assert target.tolist() == [0, 1, 2]
