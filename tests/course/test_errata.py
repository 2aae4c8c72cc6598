"""The errata: the evidence of each supports it, and docs/errata.md is up to date."""

import subprocess
import sys

import pytest
import torch

from docs import errata_page
from vitrail.weights.families.hf import VIT_NAMES
from vitrail_course.errata.erratum import NOTES, format_value, load_errata, page

SMALL = 1e-9

# What the numbers of each evidence must satisfy. Each would fail if the note were correct.
SUPPORTS = {
    "parameters_by_patch_size": lambda s: [round(value) for value in s.values()] == [87, 88, 304, 307, 303],
    "scale_is_the_width_of_a_head": lambda s: (
        4 * s["largest weight of a query with sqrt(D)"] < s["with sqrt(d)"]
    ),
    "parameters_of_three_heads": lambda s: (
        list(s.values()) == [769_000, 769_000 + 768 * 769, 196 * 768 * 1000 + 1000]
    ),
    "what_fine_tuning_keeps": lambda s: s["parameters of B/16 kept"] - s["on the slide's list"] > 7e6,
    "bytes_of_the_token_ids": lambda s: (
        list(s.values()) == ["a4 9a, 8f be", "\N{RAISED BACK OF HAND}\U0001f3fe", "235, 234"]
    ),
    "residual_and_gradient": lambda s: (
        s["gradient at the first of 24 blocks, with residuals"] > 20 * s["without"]
        and 15 < s["without, at the last block"] / s["without"] < 25
    ),
    "biases_of_q_k_v": lambda s: (
        s["parameters, B/16"] == 3 * 768 * 12
        and s["the key's"] < SMALL
        and min(s["change of the output without the query's"], s["the value's"]) > 0.01
    ),
    "not_the_post_norm_of_vaswani": lambda s: (
        s["standard deviation after Vaswani's block"] == pytest.approx(1, abs=1e-3)
        and s["after the note's"] > 1.2
    ),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_the_evidence_supports_the_erratum(name):
    [one] = [one for one in load_errata() if one.evidence == name]
    numbers = dict(one.numbers())
    assert SUPPORTS[name](numbers), numbers


def test_every_erratum_is_complete_and_tested():
    errata = load_errata()
    assert [one.evidence for one in errata if one.evidence] == list(SUPPORTS)
    assert [one.note for one in errata] == sorted(one.note for one in errata)
    assert {one.note for one in errata} == set(NOTES)
    for one in errata:
        assert one.kind in ("wrong", "imprecise", "outdated")
        assert one.where
        assert [one.claim[-1], one.correct[-1]] == [".", "."], one


def test_evidence_is_deterministic_and_keeps_the_random_state():
    one = next(one for one in load_errata() if one.evidence == "biases_of_q_k_v")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = one.numbers()
    assert torch.equal(torch.rand(3), expected)
    assert one.numbers() == first


def test_what_attention_and_its_biases_cannot_do():
    """Statements of errata that have no numbers: the softmax is never negative, a ViT without E_pos has no order."""
    assert torch.randn(9).softmax(dim=0).min() > 0
    offsets = {(a - c, b - d) for a in range(14) for c in range(14) for b in range(14) for d in range(14)}
    assert (len(offsets), 196**2) == (729, 38_416)
    assert round(224**4 * 4 / 1e9) == 10


def test_the_names_of_the_article_with_the_installed_transformers():
    """Erratum 001.17, on a model of two layers with random weights."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, initializer_range=0.5)
    model = transformers.ViTForImageClassification(config).double().eval().requires_grad_(False)
    images = torch.randn(8, 3, 16, 16, dtype=torch.float64)
    layer, z = model.vit.layers[0], model.vit.embeddings(images)
    for name in (name.strip(".") for name in VIT_NAMES.values()):  # those of the article, and of files
        with pytest.raises(AttributeError):
            layer.get_submodule(name)
    for name in VIT_NAMES:
        layer.get_submodule(name.strip("."))
    assert not hasattr(model.vit, "encoder")
    with pytest.raises(TypeError):
        layer(z, None, False)
    assert layer(z)[0].shape == (5, 16), "the first of 8 images"
    assert torch.equal(model(images, head_mask=torch.zeros(2, 2)).logits, model(images).logits)


def test_values_are_formatted():
    assert format_value(304_388_072) == "304,388,072"
    assert format_value((3072, 768)) == "(3072, 768)"
    assert (format_value(3e-16), format_value(-1 / 3), format_value("runs")) == ("0", "-0.3333", "runs")


def test_the_page_is_up_to_date():
    """`python -m docs.errata_page` updates it."""
    assert page() == errata_page.PAGE.read_text()


def test_the_command_prints_the_page():
    done = subprocess.run(
        [sys.executable, "-m", "vitrail_course.errata"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == errata_page.PAGE.read_text()
