"""Labs without training at their small size, their verdicts, the commands, and the table of results.

Labs that train models have their own tests (test_lab_*.py): at the small size, nothing is learned.
"""

import json
import math
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vitrail.base.errors import VitrailError
from vitrail.cli import app
from vitrail_course.labs import (
    activation,
    association,
    convolution,
    double_if,
    patching,
    permutation,
    scale,
    walk,
)
from vitrail_course.labs import lab as labs
from vitrail_course.labs.collect import merge_results
from vitrail_course.labs.lab import LABS, find_lab, load_results, run_lab

VERDICTS = ("holds", "partly", "does not hold", "not clear here")
EXPECTED = {  # the verdict of each lab without training, and a telling part of its condition
    "patching": ("holds", "threshold 1e-12.*flattened in another order"),
    "walk": ("partly", "adds the embeddings.*threshold 1e-09"),
    "scale": ("holds", "without a divisor softmax saturates.*with 1/sqrt.D."),
    "permutation": ("holds", "threshold 1e-10"),
    "activation": ("partly", "Not true: GELU is the cumulative"),
    "association": ("partly", "orthogonal.*at most one patch.*sink token.*threshold 0.01"),
    "double-if": ("partly", "orthogonal.*Not true: self-attention counts.*reaches all patches"),
}


def check_expected(result):
    result = result | labs.verdict_fields(result["name"], result["numbers"], "full")
    verdict, condition = EXPECTED[result["name"]]
    assert result["verdict"] == verdict
    assert re.search(condition, result["condition"])


def run_cli(*words, code=0):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def small_results(tmp_path_factory):
    """Every lab, run once."""
    out = tmp_path_factory.mktemp("labs")
    return out, {name: run_lab(name, out, "small") for name in EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_number_figure_and_expected_verdict(small_results, name):
    out, results = small_results
    result = results[name]
    assert json.loads((out / f"{name}.json").read_text()) == json.loads(json.dumps(result))
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert result["verdict"] == "too small to judge"
    check_expected(result)
    assert math.isfinite(result["number"])
    assert result["n"] >= 1
    assert "nan" not in result["sentence"]
    assert result["command"] == f"vitrail lab {name}"
    assert re.match(r"00[0-4]", result["note"])


def test_labs_are_reproducible(small_results, tmp_path):
    """Independent of the global seed, up to rounding."""
    out, results = small_results
    for name in ("scale", "association", "activation"):
        torch.manual_seed(99)
        again = run_lab(name, tmp_path, "small")
        assert again["number"] == pytest.approx(results[name]["number"], rel=1e-9)
        assert again["sentence"] == results[name]["sentence"]
        assert (tmp_path / f"{name}.png").read_bytes() == (out / f"{name}.png").read_bytes()


# ---- verdicts for every outcome -------------------------------------------------------------


def test_patching_can_fail():
    numbers = {"float64": 1e-16, "float32": 1e-7, "channels last": 0.9}
    assert patching.decide_verdict(numbers).word == "holds"
    assert patching.decide_verdict({**numbers, "float64": 1e-3}).word == "does not hold"
    assert patching.decide_verdict({**numbers, "float32": 1e-3}).word == "does not hold"


def test_walk_can_fail():
    numbers = {"same shapes": True, "corrected": [0.0, 1e-15], "as printed": [0.0, 0.5]}
    assert walk.decide_verdict(numbers).word == "partly"
    assert walk.decide_verdict({**numbers, "as printed": [0.0, 1e-15]}).word == "holds"
    assert walk.decide_verdict({**numbers, "corrected": [0.0, 0.1]}).word == "does not hold"
    assert walk.decide_verdict({**numbers, "same shapes": False}).word == "does not hold"


def test_scale_can_fail():
    steady, falls, half = [0.9, 0.9], [0.7, 0.1], [0.99, 0.8]

    def word(head, width, none):
        return scale.decide_verdict(
            {"d": [4, 64], "entropy": {"head": head, "width": width, "none": none}}
        ).word

    assert word(steady, steady, falls) == "holds"
    assert word(steady, half, falls) == "partly"
    assert word(falls, half, steady) == "does not hold"


def test_permutation_can_fail():
    def verdict(none, other):
        values = {"none": none, "relative": other}
        return permutation.decide_verdict({k: {"tokens": v, "class token": v} for k, v in values.items()})

    assert verdict(1e-15, 0.1).word == "holds"
    assert "Not true: without positions" in verdict(0.1, 0.1).condition
    assert "not with relative" in verdict(1e-15, 0.0).condition
    assert verdict(0.1, 0.0).word == "does not hold"


def test_in_one_layer_relative_positions_do_not_change_the_class_token():
    """The class token has the same distance to every patch: a real case of the verdict's condition."""
    images = labs.load_images(None, 2)
    assert (
        permutation.shuffle_changes(images, "relative", 1, 2)[1]
        < 1e-10
        < permutation.shuffle_changes(images, "relative", 2, 2)[1]
    )


def test_activation_can_fail():
    errors, properties = {"x Phi(x)": 0.0, "Phi(x)": 7.0, "tanh": 5e-4}, {"gelu is smooth": True}

    def verdict(properties=properties, **changed):
        return activation.decide_verdict({"differences": errors | changed, "properties": properties})

    assert verdict().word == "partly"
    assert verdict(**{"Phi(x)": 0.0}).word == "holds"
    assert "the tanh formula" in verdict(tanh=0.1).condition.partition("Not true")[2]
    assert "not: gelu is smooth" in verdict({"gelu is smooth": False}).condition


def test_association_can_fail():
    result = dict.fromkeys(
        ["one match", "the same with U^T", "the same with a sink", "one match, U not orthogonal"], 1e-6
    ) | {"three matches": 0.0, "none or one match": 0.0, "convolution, none or one": 0.7}
    assert association.decide_verdict(result).word == "holds"
    three = association.decide_verdict({**result, "three matches": 0.7})
    assert ", if at most one patch matches (" in three.condition
    assert "Not true: self-attention" in association.decide_verdict({**result, "one match": 0.5}).condition
    correct = association.decide_verdict({**result, "convolution, none or one": 0.01})
    assert "Not true: a convolution does not" in correct.condition


def test_double_if_can_fail():
    accuracy = {
        "attention": 1.0,
        "attention, random directions": 1.0,
        "convolution of all patches": 0.7,
        "convolution of 2 patches": 0.6,
    }

    def verdict(error=0.0, **changed):
        numbers = {"accuracy": accuracy | changed, "relative error as a count": error, "samples": 20_000}
        return double_if.decide_verdict(numbers)

    assert verdict().word == "holds"
    assert "not how often" in verdict(0.6).condition
    assert "Not true: with a threshold" in verdict(attention=0.8).condition
    assert "Not clear: with a threshold" in verdict(attention=0.99).condition, "exactly the threshold"


def convolution_numbers(**after):
    on_neighbors = dict.fromkeys(convolution.ARMS, 0.95) | after
    return {
        "on neighbors": {arm: [mean, mean + 0.002, mean - 0.001] for arm, mean in on_neighbors.items()},
        "error": {arm: [0.01, 0.011, 0.012] for arm in convolution.ARMS},
        "Q K^T after over before": [0.01, 0.011, 0.012],
        "steps": dict.fromkeys(convolution.ARMS, 300),
        "rate of p over that of the rest": 360.0,
    }


def test_convolution_can_fail():
    numbers = convolution_numbers()
    assert convolution.decide_verdict(numbers).word == "holds"
    slow = convolution.decide_verdict(convolution_numbers(**{convolution.PLAIN: 0.28}))
    assert slow.word == "partly"
    assert "Not true: they do by SGD with one learning rate for all in 300 steps (28.0 [" in slow.condition
    assert "360 times the rate" in slow.condition
    near = convolution.decide_verdict(convolution_numbers(**{convolution.LONG: 0.9}))
    assert "Not clear: they do by SGD with one learning rate in 300 steps (90.0 [" in near.condition
    content = convolution.decide_verdict({**numbers, "Q K^T after over before": [0.5, 0.51, 0.52]})
    assert "Not true: attention no longer depends on the content" in content.condition
    one_head = numbers["error"] | {convolution.EDGE_ONE: [0.5, 0.52, 0.51]}
    assert "Not true: one head fits" in convolution.decide_verdict({**numbers, "error": one_head}).condition


# ---- parts of the labs ----------------------------------------------------------------------


def test_samples_of_association():
    for orthogonal in (True, False):
        sample = association.draw_sample(50, 1, orthogonal=orthogonal)
        assert torch.allclose(sample.v.norm(dim=-1), torch.ones(50, 16, dtype=torch.float64))
        partner = sample.v[:, 0] @ sample.U.T
        matches = (sample.v[:, 1:] - partner[:, None]).norm(dim=-1) < 1e-9
        assert (matches.sum(dim=1) == 1).all()
        assert torch.allclose(sample.target, partner)
        assert torch.allclose(sample.U @ sample.U.T, torch.eye(16, dtype=torch.float64)) == orthogonal


def test_norm_of_the_jacobian_of_softmax():
    p = torch.randn(3, 5, dtype=torch.float64).softmax(dim=-1)
    plain = torch.stack([(torch.diag(row) - torch.outer(row, row)).norm() for row in p])
    assert torch.allclose(scale.jacobian_norm(p), plain)


def test_edge_weights_equal_a_convolution():
    image = torch.randn(1, 1, 5, 5)
    expected = torch.nn.functional.conv2d(image, convolution.EDGE[None, None], padding=1).flatten()
    assert torch.allclose(convolution.edge_weights(5) @ image.flatten(), expected, atol=1e-5)
    assert (convolution.edge_weights(5) != 0).sum() < convolution.neighbor_matrix(5).sum() == 13 * 13


def test_shuffling_patches_can_be_undone():
    images = labs.load_images(None, 2)
    config = permutation.build_model(images, "none", 1, False).config
    order = torch.randperm(config.patches)
    moved = permutation.shuffle_patches(images, order, config)
    back = permutation.shuffle_patches(moved, order.argsort(), config)
    assert not torch.equal(moved, images)
    assert torch.equal(back, images)


# ---- data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["patching", "walk", "permutation"])
def test_user_data(tmp_path, name):
    file = tmp_path / "own.npz"
    x = np.random.default_rng(0).integers(0, 256, (12, 16, 24, 3), dtype=np.uint8)
    np.savez(file, x_train=x, y_train=np.arange(12) % 2)
    result = run_lab(name, tmp_path / "out", "small", file)
    assert result["data"] == "own.npz"
    check_expected(result)


def test_data_for_a_lab_without_data_is_an_error(tmp_path):
    with pytest.raises(VitrailError, match="The lab scale takes no data"):
        run_lab("scale", tmp_path / "out", "small", "digits")
    assert not (tmp_path / "out").exists()


# ---- commands -------------------------------------------------------------------------------


def test_lab_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run_cli("lab")
    assert [line.split()[0] for line in output.splitlines() if line[0] != " "] == list(LABS)
    output = run_cli("lab", "activation", "--small")
    for word in (
        "note      001",
        "claim     GELU",
        "measured  0.000473",
        "verdict   too small to judge: run the lab without --small",
        "lab-activation",
    ):
        assert word in output
    assert sorted(p.name for p in (tmp_path / "lab-activation").iterdir()) == [
        "activation.json",
        "activation.png",
        "activation.svg",
    ]
    with pytest.raises(VitrailError, match="--out must name a new or empty folder"):
        CliRunner().invoke(app, ["lab", "activation"], catch_exceptions=False)


def test_unknown_lab():
    with pytest.raises(VitrailError, match=r"(?i)unknown lab 'patchin'.*Did you mean 'patching'"):
        CliRunner().invoke(app, ["lab", "patchin"], catch_exceptions=False)


def test_notes_command():
    results = load_results()
    names = [result["name"] for result in results]
    assert names == [name for name in LABS if name in names]
    for result in results:
        assert result["size"] == "full"
        assert result["verdict"] in VERDICTS
        assert result["claim"] == find_lab(result["name"]).CLAIM, "run python -m vitrail_course.labs.collect"
        assert result["note"] == find_lab(result["name"]).NOTE
        if result["name"] in EXPECTED:
            check_expected(result)
        assert isinstance(result["warnings"], list)
        assert result["environment"]["torch"]
        assert "/" not in json.dumps([result["environment"], result["data"]])
    output = run_cli("notes", "--full")
    for name in names:
        assert f"vitrail lab {name}" in output
    table = run_cli("notes", "--markdown").splitlines()
    assert table[0] == "| note | claim | command | number | verdict |"
    assert len(table) == 2 + len(names)
    assert {line.count(" | ") for line in table} == {4}


def test_notes_overview_and_one_note():
    output = run_cli("notes")
    assert max(map(len, output.splitlines())) <= 80
    assert all(len(find_lab(name).TITLE) <= 30 for name in LABS)
    for result in load_results():
        assert f"\n{result['verdict']:15}{result['name']} " in output
    assert "003  slides" in output
    output = run_cli("notes", "004")
    assert "vitrail lab convolution" in output
    assert "vitrail lab speech" not in output
    with pytest.raises(VitrailError, match="no lecture note '7'"):
        CliRunner().invoke(app, ["notes", "7"], catch_exceptions=False)


def test_notes_run(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail_course.labs.collect.LABS", {"activation": "activation"})
    before = labs.RESULTS.read_bytes()
    output = run_cli("notes", "--run", "--small", "--out", tmp_path / "new")
    assert "activation: too small to judge" in output
    assert [r["name"] for r in load_results(tmp_path / "new" / "results.json")] == ["activation"]
    assert labs.RESULTS.read_bytes() == before
    with pytest.raises(VitrailError, match="--small is an option for --run"):
        CliRunner().invoke(app, ["notes", "--small"], catch_exceptions=False)


def test_new_results_replace_old_ones():
    old = [{"name": "walk", "n": 1}, {"name": "scale", "n": 1}]
    assert merge_results(old, [{"name": "patching", "n": 2}, {"name": "scale", "n": 2}]) == [
        {"name": "patching", "n": 2},
        {"name": "walk", "n": 1},
        {"name": "scale", "n": 2},
    ]


def test_published_table():
    output = run_cli("notes", "--table")
    assert "88.55" in output
    assert "2010.11929" in output
    assert run_cli("notes", "--table", "--markdown").startswith("|")
    with pytest.raises(VitrailError, match="--table prints published results"):
        CliRunner().invoke(app, ["notes", "--table", "--run"], catch_exceptions=False)
