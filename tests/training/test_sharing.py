"""Which way of sharing a model among processes is chosen, without starting any."""

from dataclasses import dataclass

import pytest
import torch

import vitrail as vt
from vitrail.errors import ConfigError
from vitrail.memory import activation_bytes, state_bytes
from vitrail.presets import preset
from vitrail.recipes.settings import TrainConfig
from vitrail.training import sharding
from vitrail.training.parallel import ProcessGroup
from vitrail.training.precision import choose_device


@dataclass(frozen=True)
class Ranks(ProcessGroup):
    """Processes that are all like this one."""

    def any(self, flag, device):
        return flag


@pytest.fixture
def choose(monkeypatch):
    """What `auto` chooses for mu/4 with so much memory for a process."""
    model, compute = vt.create("mu/4", classes=3), choose_device("fp32", device="cpu")

    def choose(memory, ranks, **settings):
        monkeypatch.setattr(sharding, "_device_memory", lambda compute, ranks: memory)
        return sharding._choose_mode(model, TrainConfig(batch=64, **settings), compute, ranks, 64)

    choose.states = state_bytes(sum(p.numel() for p in model.parameters()), 0, ema=False) * 5  # all trained
    choose.working = activation_bytes(model.config, 64 // 16)
    return choose


def test_auto_is_ddp_while_everything_fits(choose):
    mode, reason = choose(choose.states + choose.working, Ranks(0, 16, 0, 8))
    assert mode == "ddp"
    assert "weights, gradients and optimizer take" in reason
    assert choose(None, Ranks(0, 16, 0, 8))[0] == "ddp"  # on a system that does not say what it has


def test_auto_shards_within_a_machine_if_that_suffices(choose):
    mode, reason = choose(choose.states / 8 + choose.working, Ranks(0, 16, 0, 8))
    assert mode == "hsdp"
    assert "more than" in reason
    assert choose(choose.states / 8 + choose.working, Ranks(0, 16, 0, 16))[0] == "fsdp"  # one machine
    assert choose(choose.states / 9 + choose.working, Ranks(0, 16, 0, 8))[0] == "fsdp"


def test_the_ema_and_recomputed_blocks_count(choose):
    fits = choose.states + choose.working
    assert choose(fits, Ranks(0, 16, 0, 8), ema=0.9)[0] != "ddp"
    config = preset("B/16")
    assert activation_bytes(config, 8, checkpointed=12) < activation_bytes(config, 8) / 4


@pytest.mark.parametrize(("ranks", "shards"), [((0, 16, 0, 8), 8), ((0, 4, 0, 4), 2), ((0, 8, 0, 8), 4)])
def test_hsdp_has_a_replica_on_each_machine_or_two_on_one(ranks, shards):
    assert sharding._shards_of_replica(ProcessGroup(*ranks)) == shards


@pytest.mark.parametrize("ranks", [(0, 2, 0, 2), (0, 4, 0, 1), (0, 5, 0, 5)])
def test_hsdp_of_too_few_processes_is_refused(ranks):
    with pytest.raises(ConfigError, match=f"{ranks[1]} processes, .* use parallel=fsdp"):
        sharding.check_processes(TrainConfig(parallel="hsdp"), ProcessGroup(*ranks))
    sharding.check_processes(TrainConfig(parallel="fsdp"), ProcessGroup(*ranks))


def test_one_process_shares_nothing():
    model, compute = vt.create("mu/4"), choose_device("fp32", device="cpu")
    found = sharding.choose_parallelism(model, TrainConfig(parallel="fsdp"), compute, ProcessGroup(), 8)
    assert (found.mode, found.sharded) == ("one", False)


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match="fsdp"):
        TrainConfig(parallel="fully")


def test_a_whole_tensor_is_copied_into_a_plain_one():
    target = torch.zeros(3)
    sharding.copy_into(target, torch.arange(3.0))
    assert target.tolist() == [0, 1, 2]
