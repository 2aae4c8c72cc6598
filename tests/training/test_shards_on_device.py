"""A sharded model in a group of one process, on the CPU and, where there is one, on a GPU in bf16."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import vitrail as vt
from vitrail.fast.lora import plain_model
from vitrail.fast.parallelism import Parallelism, gather, is_sharded, local_part
from vitrail.fast.prepare import prepare
from vitrail.fast.training import TrainingExecution
from vitrail.model.device import choose_device
from vitrail.training.checkpoint import Checkpoint, CheckpointManager, optimizer_tensors
from vitrail.training.optim import build_optimizer, optimizer_step, set_lr
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.fixture(scope="module")
def group():
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(device, sharded, blocks=0):
    """A model of mu's width in training, and a function that takes a step."""
    torch.manual_seed(0)
    model = vt.create("mu/4", depth=2, size=8, classes=3, drop_path=0.0)
    torch.nn.init.normal_(model.head.weight)  # it starts at zero, and would hide the blocks
    compute = choose_device("auto", device=device)
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("shard",)) if sharded else None
    how = Parallelism("fsdp" if sharded else "one", "", 1, mesh)
    if not sharded:
        model.to(compute.device)
    executable = prepare(model, TrainingExecution(parallel=how, dtype=compute.dtype))
    executable.use(recomputed=blocks)
    optimizer = build_optimizer(model, TrainConfig())
    set_lr(optimizer, 1e-3)
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(compute.device)

    def step():
        with compute.attention():
            with compute.autocast():
                executable.set_mode()
                loss = executable(images).float().square().mean()
            loss.backward()
        norm = gather(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer_step(optimizer, (~norm.isfinite()).float())
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return model, optimizer, step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [0, 2])
def test_shards_take_the_steps_of_the_plain_model(group, device, blocks):
    """In fp32 to the last digits; in bf16, in which the blocks' weights are gathered, to those of bf16."""
    (_, _, plain), (model, _, sharded) = build(device, False), build(device, True, blocks)
    assert all(is_sharded(p) and local_part(p).dtype == torch.float32 for p in model.parameters())
    tolerance = 1e-6 if device == "cpu" else 2e-2
    for _ in range(3):
        assert sharded() == pytest.approx(plain(), rel=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_of_shards_is_restored_exactly(group, device, tmp_path):
    """Copied from the device, written, and read into another model, whose next step is the same."""
    model, optimizer, step = build(device, True)
    step()
    manager = CheckpointManager(tmp_path, 1, ProcessGroup())
    names = {p: name for name, p in model.named_parameters()}
    tensors = {"model": dict(model.state_dict()), "optimizer": optimizer_tensors(optimizer, names)}
    saved = Checkpoint(1, {**tensors, "sums": {"sums": torch.zeros(1)}}, {"pending": False})
    manager.save(saved)
    expected = step()  # while it is written
    manager.wait()
    other, other_optimizer, other_step = build(device, True)
    names = {p: name for name, p in other.named_parameters()}
    found = manager.restore_newest(pytest.fail)
    targets = {"model": dict(other.state_dict()), "optimizer": optimizer_tensors(other_optimizer, names)}
    found.copy_into(targets)
    assert other_step() == expected
    whole = plain_model(other).state_dict()
    assert not any(is_sharded(tensor) for tensor in whole.values())
