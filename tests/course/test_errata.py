"""The errata: the evidence of each supports it, and docs/errata.md is up to date."""

import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from docs import errata_page
from vitrail_course.errata.erratum import ERRATA, NOTES
from vitrail_course.errata.page import format_value, page

SMALL = 1e-9
OLD_NAMES = [
    *("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
]

# What the numbers of each erratum must satisfy. Each would fail if the note were correct.
SUPPORTS = {
    # 000
    "large_has_304_million": lambda s: (
        [round(s[f"{name}, millions"]) for name in ("L/16", "L/16 without head", "L/32", "B/32")]
        == [304, 303, 307, 88]
    ),
    "patches_must_divide": lambda s: (
        s["HW/P^2 for 24 x 24, P = 16"] != s["patches of the convolution"] == 1
        and s["fraction of pixels dropped"] == pytest.approx(1 - 16**2 / 24**2)
    ),
    "two_meanings_of_768": lambda s: [name[:4] for name, (a, b) in s.items() if a == b] == ["B/16"],
    "scale_is_the_width_of_a_head": lambda s: (
        s["sqrt(D)"] / s["sqrt(d)"] == pytest.approx(12**0.5)
        and 4 * s["largest weight of a query with sqrt(D)"] < s["with sqrt(d)"]
    ),
    "queries_are_not_weights": lambda s: (
        s["Q, difference of two images"] > 0.1 and s["W, difference before and after"] == 0
    ),
    "one_matrix_for_each_head": lambda s: (
        s["weights (k, T, T)"] == (3, s["T"], s["T"]) and s["result (T, D)"] == (s["T"], 12)
    ),
    "three_heads": lambda s: list(s.values()) == [769_000, 769_000 + 768 * 769, 196 * 768 * 1000 + 1000],
    # 001
    "fourteen_along_each_side": lambda s: s["in total"] == s["along a side"] ** 2 != s["along a side"],
    "the_second_patch_is_to_the_right": lambda s: s["index of [1, 0]"] == 14 and s["index of [0, 1]"] == 1,
    "compared_in_two_shapes": lambda s: list(s.values())[2:] == ["ValueError", "runs"],
    "undefined_names": lambda s: list(s.values()) == ["NameError"] * 4 + ["runs"] * 2,
    "a_random_class_token": lambda s: s["class token, difference from the model's"] > 0.1,
    "prepended_not_appended": lambda s: list(s.values()) == [0, 196],
    "positions_have_no_batch": lambda s: list(s.values()) == [(197, 768), (8, 197, 768)],
    "dropout_of_pairs": lambda s: list(s.values()) == [0, 0.5, 0],
    "whose_weight_is_026": lambda s: list(s.values()) == [0.26, 0.0, 0.27],
    "layer_norm_of_the_class_token": lambda s: (
        s["embeddings[0][0], difference from the first patch"] > 0.1
        and s["embeddings[0][1], difference"] < SMALL
        and s["first_patch_std"] == pytest.approx(s["standard deviation"] ** 2)
        and abs(s["first_patch_std"] - s["standard deviation"]) > 0.1
    ),
    "residual_on_normed_states": lambda s: (
        s["difference from the block, as written"] > 0.1 and s["with the embeddings"] < SMALL
    ),
    "sum_first_then_norm": lambda s: s["difference of LN(attended + z) and LN(attended) + z"] > 0.1,
    "sequential_of_a_list": lambda s: list(s.values()) == ["TypeError", "TypeError", "runs"],
    "identity_doubles": lambda s: list(s.values()) == pytest.approx([2, 1]),
    "gelu_is_x_times_phi": lambda s: (
        s["GELU at -3 and 3"] == pytest.approx(s["x Phi(x) at -3 and 3"])
        and s["GELU at -3 and 3"] != pytest.approx(s["Phi(x) at -3 and 3"], abs=1e-3)
    ),
    "two_gelus": lambda s: (
        s["PyTorch, difference from exact"] < SMALL < 1e-4 < s["tanh, difference from exact"]
    ),
    "renamed_in_transformers_5": lambda s: (
        s["names that a model does not have"] == "vit.encoder.layer"
        and s["names that a model has"] == "vit.layers"
        and s["names that a layer does not have"].split(", ") == OLD_NAMES
        and len(s["names that a layer has"].split(", ")) == len(OLD_NAMES)
        and s["a layer called as in the article"] == "TypeError"
        and s["shape of layer(z)[0] for 8 images of 5 tokens"] == (5, 16)
        and s["difference of the logits with head_mask = 0 for all heads"] == 0
        and s["with all heads set to 0 by a hook"] > 0.1
    ),
    "used_before_they_are_set": lambda s: list(s.values()) == ["NameError", "runs"],
    "why_self_attention": lambda s: (
        s["scores of self-attention"] == s["of cross-attention"] == (5, 5)
        and s["difference of their outputs"] > 0.01
    ),
    "shape_is_not_power": lambda s: (
        s["error of 200 units for sin(8x), x^3 - x"]
        > 10 * max(s["error of 200 units for sin(8x), ReLU"], s["error of 200 units for sin(8x), GELU"])
    ),
    "pooler_is_dense_and_tanh": lambda s: (
        s["parameters of a pooler"] == 590_592
        and s["after dense and tanh"] < 1 < s["largest entry of the class token"]
    ),
    # 002
    "the_mlp_of_a_block_does_not_classify": lambda s: list(s.values()) == [3, (5, 12), 7],
    "a_decoder_only": lambda s: list(s.values()) == [0, (1, 8, 65)],
    "not_only_sixteen": lambda s: list(s.values()) == [49, 196, 256],
    "the_class_token_does_not_depend_on_classes": lambda s: list(s.values()) == [(1, 12), (1, 12)],
    "without_positions": lambda s: s["change of the logits without E_pos"] < SMALL and s["with it"] > 0.01,
    "rows_come_first": lambda s: (
        s["output of the convolution"] == s["columns, rows"][::-1] != s["columns, rows"]
    ),
    "channels_dropped": lambda s: list(s.values()) == [256, 768, 768, "RuntimeError", "runs"],
    "what_fine_tuning_keeps": lambda s: s["kept, B/16"] - s["on the slide's list"] > 7e6,
    "which_vit_outperforms": lambda s: list(s.values()) == [7, 5, 0],
    "accuracy_is_truncated": lambda s: s["accuracy"] - s["printed"] > 0.9,
    "not_deepmind": lambda s: list(s.values()) == [30],
    # 003
    "norm_before_or_after": lambda s: (
        s["difference of pre-norm and post-norm"] > 0.1 and s["of pre-norm and itself"] == 0
    ),
    "pixels_as_tokens": lambda s: s["with pixels"] == 256**2 * s["weights of a head, with patches of 16"],
    "residual_and_gradient": lambda s: (
        s["gradient at the first of 24 blocks, with residuals"] > 20 * s["without"]
        and 15 < s["without, at the last block"] / s["without"] < 25
        and s["difference in parameters"] == 0
    ),
    "no_guarantee_of_variance_one": lambda s: list(s.values()) == [(0, 1), (3, 4), (0, 0)],
    "two_linear_layers": lambda s: list(s.values()) == [2, 0.5, 0],
    "relu_or_gelu": lambda s: s["largest difference"] > 0.1,
    "not_only_blocks": lambda s: s["B/16 with 24 blocks, millions"] < 0.6 * s["L/16, millions"],
    "not_a_bigram_model": lambda s: (
        s["change of the last logits, the note's model"] > 0.01 and s["a bigram model"] == 0
    ),
    "dropout_is_not_defined": lambda s: list(s.values()) == ["NameError", "runs"],
    # 004
    "linear_or_mlp_on_patches": lambda s: (
        s["MLP"] - s["parameters, linear"] == 12 * 13 and len(set(s["(P^2 C, D)"])) == 2
    ),
    "two_meanings_of_d": lambda s: list(s.values()) == [256, 4096],
    "without_a_scale": lambda s: (
        s["difference of Q / sqrt(d) without scale and Q with it"] < SMALL
        and s["largest weight without scale"] > 0.5 > s["with"]
    ),
    "width_after_one_head": lambda s: list(s.values()) == [12, 4, "RuntimeError"],
    "missing_transpose": lambda s: list(s.values()) == ["RuntimeError", "runs"],
    "biases_of_q_k_v": lambda s: (
        s["parameters, B/16"] == 3 * 768 * 12
        and s["the key's"] < SMALL
        and min(s["change of the output without the query's"], s["the value's"]) > 0.01
    ),
    "pairwise_is_more_than_relative": lambda s: list(s.values()) == [196**2, 27**2],
    "one_matrix_for_each_offset": lambda s: list(s.values()) == [9 * 64, 9 + 64, 9, 1],
    "softmax_only_averages": lambda s: (
        s["smallest softmax(p)"] > 0
        and s["error of the best single head"] == pytest.approx(0.5**0.5)
        and s["of two heads"] == 0
    ),
    "association_needs_an_orthogonal_u": lambda s: (
        s["fraction found, U orthogonal"] == s["any U, with U^T"] == 1 and s["any U"] < 0.5
    ),
    "association_gives_the_mean": lambda s: (
        s["norm of f and of attention, three matches"] == pytest.approx((3, 1))
        and s["no match"][1] > 0.5
        and s["one match, difference of U v_1 and f"] < SMALL
    ),
    "sum_over_the_wrong_index": lambda s: list(s.values()) == [3, 8],
    "double_if_does_not_count": lambda s: (
        list(s.values()) == [(3, pytest.approx(1)), (0, pytest.approx(3 / 8))]
    ),
    "not_the_post_norm_of_vaswani": lambda s: (
        s["standard deviation after Vaswani's block"] == pytest.approx(1, abs=1e-3)
        and s["after the note's"] > 1.2
    ),
    "parts_not_listed": lambda s: (
        s["only in the original"] == "norm.bias, norm.weight, position.table, prefix"
        and "norm_after" in s["only in the note"]
    ),
    "large_with_256_patches": lambda s: list(s.values()) == [196, 256, 304_388_072],
    "another_title": lambda s: s["words of the title that are the same"] < s["of"] / 2,
}


@pytest.mark.parametrize("one", ERRATA, ids=lambda one: one.name)
def test_the_evidence_supports_the_erratum(one):
    numbers = dict(one.evidence())
    assert SUPPORTS[one.name](numbers), numbers


def test_every_erratum_is_complete_and_tested():
    assert [one.name for one in ERRATA] == list(SUPPORTS)
    assert {one.note for one in ERRATA} == set(NOTES)
    for one in ERRATA:
        assert one.kind in ("wrong", "imprecise")
        assert one.where
        assert [one.claim[-1], one.correction[-1]] == [".", "."], one.name


def test_evidence_is_deterministic_and_keeps_the_random_state():
    one = next(one for one in ERRATA if one.name == "residual_on_normed_states")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = one.evidence()
    assert torch.equal(torch.rand(3), expected)
    assert one.evidence() == first


def test_values_are_formatted():
    assert format_value(304_388_072) == "304,388,072"
    assert format_value((3072, 768)) == "(3072, 768)"
    assert (format_value(3e-16), format_value(-1 / 3), format_value("runs")) == ("0", "-0.3333", "runs")


def without_version(text):
    return re.sub(r"transformers: \*\*[^*]+\*\*", "transformers: **?**", text)


def test_the_page_is_up_to_date():
    """`python -m docs.errata_page` updates it."""
    assert without_version(page()) == without_version(errata_page.PAGE.read_text())


def test_the_command_prints_the_page():
    """In a process of its own, where nothing has made torchvision importable."""
    done = subprocess.run(
        [sys.executable, "-m", "vitrail_course.errata"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert without_version(done.stdout) == without_version(errata_page.PAGE.read_text())


def test_the_article_with_the_installed_transformers():
    """001.17 is measured, and names the version."""
    one = next(one for one in ERRATA if one.name == "renamed_in_transformers_5")
    assert one.evidence()["transformers"] == metadata.version("transformers")


def test_without_transformers_nothing_is_measured(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    one = next(one for one in ERRATA if one.name == "renamed_in_transformers_5")
    assert one.evidence() == {"transformers": "not installed, so nothing is measured here"}
