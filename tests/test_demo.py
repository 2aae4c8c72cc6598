"""The demo's parts, and its promise."""

import pytest
import torch

from vitrail import demo


@pytest.fixture(scope="module")
def digits():
    return demo.load()


def looked_with(labels, predicted, score):
    images = torch.zeros(len(labels), 1, 8, 8)
    attention = torch.rand(len(labels), 4, 4)
    return demo.Looked(
        demo.Digits(images, torch.tensor(labels)), torch.tensor(predicted), torch.tensor(score), attention
    )


def test_the_split_is_fixed_stratified_and_apart(digits):
    learn, held_out = digits
    assert (len(learn.labels), len(held_out.labels)) == (1437, 360)
    assert held_out.labels[:8].tolist() == demo.load()[1].labels[:8].tolist()
    assert held_out.labels.bincount().min() >= 35
    pixels = {tuple(image.flatten().tolist()) for image in learn.images}
    assert not [image for image in held_out.images if tuple(image.flatten().tolist()) in pixels]


def test_rollout_by_hand(digits):
    """Head means, half identity for the residual, multiplied from the first block up."""
    model, few = demo.build(0), demo.Digits(digits[1].images[:3], digits[1].labels[:3])
    torch.nn.init.normal_(model.head.weight)
    with torch.no_grad(), demo.record(model, "blocks.*.attention.weights") as tape:
        probabilities = model(demo.normalise(few.images)).softmax(1)
    first, second, third = (tape[f"blocks.{i}.attention.weights"].mean(1) for i in range(3))
    eye = torch.eye(17)
    rolled = (third + eye) / 2 @ ((second + eye) / 2) @ ((first + eye) / 2)
    patches = rolled[:, 0, 1:] / rolled[:, 0, 1:].sum(1, keepdim=True)
    looked = demo.look(model.eval(), few)
    assert (looked.attention.flatten(1) - patches).abs().max() < 1e-6
    assert torch.equal(looked.predicted, probabilities.argmax(1))
    assert (looked.score - probabilities.amax(1)).abs().max() < 1e-6


def test_light_is_the_attention_on_each_pixels_patch():
    looked = looked_with([1], [1], [0.9])
    light = demo.light(looked, 0)
    assert light.max() == 1
    assert light[5, 2] == looked.attention[0, 2, 1] / looked.attention[0].max()


def test_chosen_are_wrong_ones_surest_first_and_right_ones_of_different_kinds():
    looked = looked_with([0, 0, 1, 2, 3], [0, 0, 1, 5, 6], [0.9, 0.9, 0.8, 0.4, 0.7])
    assert demo.choose(looked) == ([0, 2], [4, 3])
    assert demo.choose(looked, most=2) == ([0], [4])
    assert looked.accuracy == pytest.approx(0.6)
    assert [demo.caption(looked, index) for index in (0, 4)] == ["0 (90%)", "6, is 3"]


def test_jiggle_moves_each_picture_a_little_and_its_own_way():
    dot = torch.zeros(200, 1, 8, 8)
    dot[:, :, 3:5, 3:5] = 1
    moved = demo.jiggle(dot, torch.Generator().manual_seed(0))
    again = demo.jiggle(dot, torch.Generator().manual_seed(0))
    assert torch.equal(moved, again)
    rows = (moved.sum((1, 3)) * torch.arange(8)).sum(1) / moved.sum((1, 2, 3)) - 3.5
    assert 0.2 < rows.std() < 0.6
    assert rows.abs().max() < 1.0
    assert abs(rows.mean()) < 0.15


def test_the_rate_rises_then_falls_to_nothing():
    rates = [demo.rate(step, 1000) for step in range(1000)]
    assert rates[0] < 0.02
    assert max(rates) == pytest.approx(1, abs=0.01) == rates[100]
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] < 1e-4


@pytest.mark.parametrize("wrong", [True, False])
def test_the_picture_is_drawn_with_and_without_mistakes(tmp_path, wrong):
    labels = list(range(10))
    looked = looked_with(labels, [1, *labels[1:]] if wrong else labels, [0.9] * 10)
    demo.draw(looked, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 2000


def test_the_demo_reaches_98_percent(digits):
    """The whole training, as `vitrail demo` runs it: the promise of the README."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = demo.build(0)
        for _ in demo.train(model, digits[0], epochs=50):
            pass
        assert demo.look(model, digits[1]).accuracy >= 0.98
    finally:
        torch.set_num_threads(threads)
