"""Dropout that several processes draw: what a single process draws for the same images."""

import pytest
import torch

import vitrail as vt
from vitrail.fast.executable import share_parameters
from vitrail.fast.variants import draw_for_all
from vitrail.model.layers import DropPath
from vitrail.training.dropout import DropoutSeeds
from vitrail.training.parallel import ProcessGroup
from vitrail.training.recipes.settings import TrainConfig

ALL = dict(dropout=0.2, attention_dropout=0.2, patch_dropout=0.25, drop_path=0.5)
IMAGES = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def build(**dropout):
    torch.manual_seed(0)
    model = vt.create("mu/4", depth=2, size=8, classes=3, **dropout).train()
    torch.nn.init.normal_(model.head.weight)
    return model


def share_dropout(model, settings, ranks, device=CPU):
    """A twin as the trainer has it, and its seeds."""
    seeds, twin = DropoutSeeds(model.config, settings, ranks, device), share_parameters(model)
    if seeds.alike and ranks.count > 1:
        draw_for_all(twin, seeds)
    return twin, seeds


def outputs(model, ranks, accumulate, step=3):
    """What a process computes for its images of a step."""
    model, seeds = share_dropout(model, TrainConfig(accumulate=accumulate, batch=16), ranks)
    parts = []
    for number, images in enumerate(ranks.shard(IMAGES).chunk(accumulate)):
        seeds.start(step) if number == 0 else seeds.start_next(step, number)
        parts.append(model(images))
    return torch.cat(parts)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [*ALL, "all"])
def test_an_image_has_the_dropout_of_a_single_process(kind, accumulate):
    model = build(**(ALL if kind == "all" else {kind: ALL[kind]}))
    one = outputs(model, ProcessGroup(), accumulate)
    assert not torch.allclose(one, outputs(model, ProcessGroup(), accumulate, step=4))
    for count in (2, 4, 8):
        many = [outputs(model, ProcessGroup(rank, count), accumulate) for rank in range(count)]
        torch.testing.assert_close(torch.cat(many), one, rtol=1e-5, atol=1e-6)


def test_a_single_process_draws_as_the_plain_model():
    """Nothing is changed, and a step's generator is that of its seed."""
    model = build(**ALL)
    twin, _ = share_dropout(model, TrainConfig(), ProcessGroup())
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]


def test_recomputed_blocks_draw_the_same_again():
    """The gradient with every block computed twice is that without."""
    gradients = []
    for blocks in (0, 2):
        model = build(**ALL)
        twin, seeds = share_dropout(model, TrainConfig(), ProcessGroup(1, 2))
        twin.checkpointed_blocks = blocks
        seeds.start(0)
        twin(IMAGES[8:]).square().mean().backward()
        gradients.append(model.blocks[0].mlp.fc1.weight.grad)
    torch.testing.assert_close(*gradients)


def test_the_model_itself_draws_for_itself():
    """The rehearsal of a run and the run itself may have the same model."""
    model = build(**ALL)
    kinds = [type(module) for module in model.modules()]
    twin, _ = share_dropout(model, TrainConfig(seed=5), ProcessGroup(0, 2))
    assert [type(module) for module in model.modules()] == kinds
    assert all(one is other for one, other in zip(twin.parameters(), model.parameters(), strict=True))


def test_in_evaluation_nothing_is_dropped():
    twin, _ = share_dropout(build(**ALL), TrainConfig(), ProcessGroup(1, 2))
    assert torch.equal(twin.eval()(IMAGES), build().eval()(IMAGES))


def test_on_gpus_masks_of_activations_are_not_drawn_for_others():
    """DropPath is drawn alike if nothing else is dropped; with dropout each process has its own seed."""
    for dropout, alike in ((0.0, True), (0.1, False)):
        model = build(drop_path=0.2, dropout=dropout)
        twin, seeds = share_dropout(model, TrainConfig(), ProcessGroup(1, 2), torch.device("cuda"))
        assert seeds.alike is alike
        assert (type(twin.blocks[1].path) is DropPath) is not alike
