"""Labs `activation`, `heads`, `filters`, `subwords`, `recurrent`, `tokens` and `convolution`: small runs, known cases."""

import json
import math
import re

import numpy as np
import pytest
import torch

from vitrail.experiment.trial import one_thread
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail_course.labs import activation, convolution, filters, heads, recurrent, subwords, tokens


@pytest.mark.parametrize("lab", [activation, convolution, filters, heads, recurrent, subwords, tokens])
def test_small_run(lab, tmp_path):
    with one_thread():
        torch.manual_seed(0)
        result = lab.run(tmp_path, "small")
    assert list(tmp_path.iterdir()) == []
    assert math.isfinite(result.number)
    assert not re.search(r"\bnan\b", result.setting)
    assert result.interval is None or result.interval[0] < result.number < result.interval[1]
    assert lab.decide_verdict(json.loads(json.dumps(result.numbers))).words
    assert result.figure.axes


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


# ---- filters --------------------------------------------------------------------------------


def test_random_filters_leave_the_model_unchanged():
    model = filters.sample_model().model
    before = model.get_parameter("tokens.proj.weight").detach().clone()
    first, second = (filters._random_filters(model, seed) for seed in (0, 1))
    assert torch.equal(model.get_parameter("tokens.proj.weight"), before)
    assert not np.array_equal(first.components, second.components)


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
