"""Labs `gelu-relu`, `heads`, `filters`, `subwords`, `recurrent` and `convolution`: small runs, known cases, verdicts."""

import json
import math
import re

import numpy as np
import pytest
import torch

from vitrail.experiment.trial import one_thread
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail_course.labs import convolution, filters, gelu_relu, heads, recurrent, subwords


@pytest.mark.parametrize("lab", [convolution, filters, gelu_relu, heads, recurrent, subwords])
def test_small_run(lab, tmp_path):
    with one_thread():
        torch.manual_seed(0)
        result = lab.run(tmp_path, "small")
    assert list(tmp_path.iterdir()) == []
    assert math.isfinite(result.number)
    assert not re.search(r"\bnan\b", result.sentence)
    assert result.interval is None or result.interval[0] < result.number < result.interval[1]
    assert lab.decide_verdict(json.loads(json.dumps(result.numbers))).condition
    assert len(result.figure.axes) >= 2


# ---- gelu-relu ------------------------------------------------------------------------------


def test_verdict_on_activations():
    def verdict(gelu, relu, gelu_error, relu_error):
        """The first of four seeds chose the learning rates."""
        accuracy = {"GELU": {"scores": [0.5, *gelu]}, "ReLU": {"scores": [0.5, *relu]}}
        fits = {"sines": {"GELU": [1.0, *gelu_error], "ReLU": [1.0, *relu_error]}}
        numbers = {"accuracy": accuracy, "error of the fitted function": fits, "held out": 360}
        return gelu_relu.decide_verdict(numbers)

    low, high, noisy = [0.8, 0.81, 0.82], [0.9, 0.911, 0.92], [0.7, 0.99, 0.9]
    small, large = [1e-4, 1.1e-4, 0.9e-4], [1e-2, 1.2e-2, 0.9e-2]
    assert verdict(high, low, small, large).word == "holds"
    assert verdict(low, high, large, small).word == "does not hold"
    assert verdict(noisy, high, small, [1e-6, 1e-2, 1e-4]).word == "not clear here"
    assert (
        "log10 of the error with ReLU over that with GELU: +2.01 ["
        in verdict(high, low, small, large).condition
    )


def test_an_mlp_fits_a_function():
    with one_thread():
        before, after = (gelu_relu.fit_function(("sines", "GELU", 1e-2, 0, steps)) for steps in (1, 400))
    assert after < 0.5 * before


# ---- heads ----------------------------------------------------------------------------------


def test_equal_heads_agree_and_disjoint_ones_do_not():
    attention = torch.zeros(1, 1, 2, 3, 3)  # (L, B, k, T, T)
    attention[..., 0] = 1
    assert heads.compare_heads(attention) == {"disagree": 0.0, "distance": 0.0}
    attention[0, 0, 1] = torch.tensor([0.0, 1.0, 0.0])
    assert heads.compare_heads(attention) == {"disagree": 1.0, "distance": 1.0}


def test_heads_that_attend_alike_can_be_swapped():
    torch.manual_seed(0)
    config = {"size": 8, "patch": 2, "channels": 1, "width": 16, "depth": 2, "heads": 2, "classes": 10}
    model = ViT(ViTConfig(**config)).eval()
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(40, 1, 8, 8)
    with torch.no_grad():
        labels = model(images).argmax(dim=1)
        assert heads.accuracy_with_swaps(model, images, labels) < 1
        for block in model.blocks:  # equal queries and keys in both heads, different values
            for part in (block.attention.qkv.weight, block.attention.qkv.bias):
                for start in (0, 16):
                    part[start + 8 : start + 16] = part[start : start + 8]
        labels = model(images).argmax(dim=1)
        assert heads.accuracy_with_swaps(model, images, labels) == 1


def test_verdict_on_heads():
    def verdict(trained, untrained, without, swapped=None):
        def measured(values):
            return [{"disagree": d, "distance": t} for d, t in values]

        numbers = {"trained": measured(trained), "untrained": measured(untrained)}
        scores = {"accuracy": [0.9, 0.91], "accuracy without a head": without}
        return heads.decide_verdict(numbers | scores | {heads.SWAPPED: swapped or without})

    apart, alike = [(0.8, 0.5), (0.81, 0.51)], [(0.2, 0.1), (0.21, 0.11)]
    good = verdict(apart, alike, [0.7, 0.712])
    assert good.word == "partly", "which relations they capture is not tested"
    assert "Not true" not in good.condition
    assert "for 0.805 of them, 0.205 before training: +0.600 [" in good.condition
    bad = verdict(alike, apart, [0.95, 0.961])
    assert bad.condition.count("Not true") == 1
    assert not bad.condition.startswith("True")
    assert bad.word == "does not hold"
    alike_heads = verdict(apart, alike, [0.7, 0.712], swapped=[0.9, 0.9101]).condition
    assert "heads contribute to accuracy" in alike_heads.partition("Not ")[0]
    assert "the attention of a head cannot be replaced" in alike_heads.partition("Not clear: ")[2]
    assert verdict([(0.2, 0.9), (0.9, 0.1)], alike, [0.9, 0.7]).word == "not clear here"


# ---- filters --------------------------------------------------------------------------------


def test_random_filters_leave_the_model_unchanged():
    model = filters.sample_model().model
    before = model.get_parameter("tokens.proj.weight").detach().clone()
    first, second = (filters._random_filters(model, seed) for seed in (0, 1))
    assert torch.equal(model.get_parameter("tokens.proj.weight"), before)
    assert not np.array_equal(first.components, second.components)
    assert filters.component_count(16) == 4
    assert filters.component_count(768) == 28


def test_verdict_on_filters():
    def verdict(smoothness, needed):
        random = {"random smoothness": [0.0, 0.05, 0.1, -0.05], "random needed": [100, 101, 102, 99]}
        numbers = {"components": 28, "pixels": 768, "filters": 192}
        return filters.decide_verdict(numbers | random | {"smoothness": smoothness, "needed": needed})

    assert verdict(0.6, 20).word == "holds"
    assert verdict(-0.6, 200).word == "does not hold"
    assert verdict(0.05, 100).word == "not clear here", "as random filters may be"
    assert "random filters -0.05 to 0.10" in verdict(0.6, 20).condition
    assert "(20 of 191, random" in verdict(0.6, 20).condition, "192 filters have 191 components"


# ---- subwords -------------------------------------------------------------------------------


def test_byte_pair_encoding():
    tokenizer = subwords.train_tokenizer("the cat the hat the bat " * 5, 6)
    assert len(tokenizer.pieces) == 256 + 6
    assert b" the" in tokenizer.pieces
    assert len(tokenizer.encode_word(" the")) == 1
    assert len(tokenizer.encode_word(" zoo")) == 4, "unseen: single bytes"
    assert tokenizer.encode_word("\N{BANANA}") == list("\N{BANANA}".encode())
    for text in ("the cat, the zoo! 12 \n\n", "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \N{BANANA}"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert "".join(subwords.split_words(text)) == text
    assert subwords.train_tokenizer("ab", 50).pieces[256:] == [b"ab"], "nothing left to merge"


def test_merging_a_pair():
    assert subwords.merge_pair([1, 2, 1, 2, 3], (1, 2), 9) == [9, 9, 3]
    assert subwords.merge_pair([1, 1, 1], (1, 1), 9) == [9, 1]


def test_verdict_on_subwords():
    numbers = {
        "words": 1_000,
        "words of one token": 700,
        "tokens of an emoji": 4,
        "characters per token": 2.5,
        "reproduced": True,
    }
    assert subwords.decide_verdict(numbers).word == "holds"
    few = subwords.decide_verdict({**numbers, "words of one token": 100})
    assert "Not true: many words map to one token (0.100 [" in few.condition
    assert subwords.decide_verdict({**numbers, "reproduced": False}).word == "partly"
    assert "Not clear" in subwords.decide_verdict({**numbers, "words of one token": 505}).condition


# ---- recurrent ------------------------------------------------------------------------------


def test_both_models_have_as_many_parameters():
    counts = {
        name: sum(p.numel() for p in build().parameters())
        for name, build in recurrent.build_models(128, 4, 64, 128).items()
    }
    assert counts["LSTM"] == pytest.approx(counts["Transformer"], rel=0.1)


def test_slope_of_time_over_length():
    linear = {"64": [1.0, 2.0], "128": [2.0, 4.0], "256": [4.0, 8.0]}
    assert recurrent.length_slopes(linear) == pytest.approx([1, 1])
    assert recurrent.length_slopes({length: [3.0, 4.0] for length in linear}) == pytest.approx([0, 0])


def test_verdict_on_recurrence():
    def verdict(transformer, lstm, losses):
        seconds = {"Transformer": transformer, "LSTM": lstm}
        return recurrent.decide_verdict(
            {
                "device": "cuda",
                "seconds per step": {"cuda": seconds},
                "parameters": {"cuda": {"Transformer": 1000, "LSTM": 1001}},
                "nats per character": dict(zip(("Transformer", "LSTM"), losses, strict=True)),
            }
        )

    flat = {"64": [1.0, 1.01, 1.02], "1024": [1.1, 1.12, 1.13]}
    steep = {"64": [1.0, 1.01, 1.02], "1024": [16.0, 16.3, 16.1]}
    low, high = [1.8, 1.81, 1.82], [2.0, 2.01, 2.03]
    assert verdict(flat, steep, (low, high)).word == "holds"
    assert "on the GPU" in verdict(flat, steep, (low, high)).condition
    assert verdict(steep, flat, (high, low)).word == "does not hold"
    assert "a training step with sequences of 1024 tokens" in verdict(steep, flat, (high, low)).condition
    between = {"64": [1.0, 1.0, 1.0], "1024": [2.0, 4.0, 8.0]}  # the power 0.25 to 0.75
    assert "the reason" in verdict(between, steep, (low, high)).condition.split("Not clear: ")[1]
    unclear = verdict(flat, steep, (low, [1.5, 1.9, 2.0]))
    assert "Not clear: the loss of the Transformer is lower" in unclear.condition
