"""The cost model of `vitrail plan`, against what was measured on one GPU."""

import json
from pathlib import Path

import pytest

from bench.memory import estimate
from vitrail.errors import ConfigError
from vitrail.presets import preset
from vitrail.training.cost import Cluster, forward_flops, step_cost
from vitrail.training.fitting import fitting_mode

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def measured(file, size, **keys):
    """The row of a result for one H200, batch 256."""
    rows = json.loads((RESULTS / f"{file}-{size.replace('/', '')}.json").read_text())["rows"]
    return next(row for row in rows if row.items() >= keys.items())


@pytest.mark.parametrize("size", ["B/16", "L/16"])
def test_one_gpu_as_measured(size):
    """The step of `vitrail train`: its speed within 5 %, its memory within 10 %."""
    cost, row = step_cost(preset(size), Cluster(), 256), measured("steps", size, row="vitrail, bf16 residual")
    assert 256 / cost.seconds == pytest.approx(row["images_per_s"], rel=0.05)
    assert cost.memory / 2**30 == pytest.approx(row["peak_gib"], rel=0.1)
    assert (cost.mode, cost.traffic, cost.bottleneck) == ("one", 0.0, "compute")


@pytest.mark.parametrize("size", ["B/16", "L/16"])
def test_shards_compute_as_a_compiled_step_without_fused_kernels(size):
    """Eight GPUs with so little memory that they need shards, and 256 images each."""
    cost = step_cost(preset(size), Cluster(gpus=8, memory=2**30), 8 * 256)
    row = measured("gpu", size, task="training", mode="compiled", library="vitrail")
    assert cost.mode == "fsdp"
    assert 256 / cost.compute == pytest.approx(row["images_per_s"], rel=0.05)


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
