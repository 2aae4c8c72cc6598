"""Labs without training at their small size, their verdicts, the commands, and the table of results.

Labs that train models have their own tests (test_lab_*.py): at the small size, their verdicts are random.
"""

import json
import math
import re

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from vitrail.cli.lab import lab as lab_command
from vitrail.cli.lab import notes as notes_command
from vitrail.course.labs import (
    activation,
    association,
    convolution,
    double_if,
    patching,
    permutation,
    scale,
    walk,
)
from vitrail.course.labs import lab as labs
from vitrail.course.labs.collect import merge_results
from vitrail.course.labs.lab import LABS, Verdict, find_lab, load_results, run_lab
from vitrail.errors import VitrailError

VERDICTS = ("holds", "partly", "does not hold")
EXPECTED = {  # the verdict of each lab at any size, and a telling part of its condition
    "patching": ("partly", "flattened in the same order"),
    "walk": ("partly", "must add the embeddings"),
    "scale": ("partly", "grow as sqrt"),
    "permutation": ("holds", ""),
    "activation": ("partly", "x times the cumulative"),
    "association": ("partly", "orthogonal.*at most one patch.*sink token"),
    "double-if": ("partly", "whether b occurs.*orthogonal.*not reach every patch"),
    "convolution": ("partly", "one sign.*several heads"),
}

app = typer.Typer()
app.command()(lab_command)
app.command()(notes_command)


def check_expected(result):
    verdict, condition = EXPECTED[result["name"]]
    assert result["verdict"] == verdict
    assert re.search(condition, result["condition"])
    assert bool(result["condition"]) == (verdict != "holds")


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
    assert patching.decide_verdict(1e-16, 1e-7, 0.9).word == "partly"
    assert patching.decide_verdict(1e-16, 1e-7, 0.0) == Verdict("holds")
    assert patching.decide_verdict(1e-3, 1e-3, 0.9).word == "does not hold"


def test_walk_can_fail():
    assert walk.decide_verdict(True, 1e-15, 0.5).word == "partly"
    assert walk.decide_verdict(True, 1e-15, 1e-15) == Verdict("holds")
    assert walk.decide_verdict(True, 0.1, 0.5).word == "does not hold"
    assert walk.decide_verdict(False, 1e-15, 0.5).word == "does not hold"


def test_scale_can_fail():
    steady, falls, half = [0.9, 0.9], [0.7, 0.1], [0.99, 0.8]
    assert scale.decide_verdict({"head": steady, "width": steady, "none": falls}).word == "partly"
    assert scale.decide_verdict({"head": steady, "width": half, "none": falls}) == Verdict("holds")
    assert scale.decide_verdict({"head": falls, "width": steady, "none": falls}).word == "does not hold"
    assert scale.decide_verdict({"head": steady, "width": steady, "none": steady}).word == "does not hold"


def test_permutation_can_fail():
    assert permutation.decide_verdict({"none": 1e-15, "learned": 0.1}, 1e-15) == Verdict("holds")
    assert permutation.decide_verdict({"none": 0.1, "learned": 0.1}, 1e-15).word == "does not hold"
    assert (
        "relative positions" in permutation.decide_verdict({"none": 1e-15, "relative": 0.0}, 1e-15).condition
    )


def test_in_one_layer_relative_positions_do_not_change_the_class_token():
    """The class token has the same distance to every patch: a real case of the verdict's condition."""
    images = labs.load_images(None, 2)
    assert (
        permutation.shuffle_changes(images, "relative", 1, 2)[1]
        < 1e-10
        < permutation.shuffle_changes(images, "relative", 2, 2)[1]
    )


def test_activation_can_fail():
    max_error, output = {"x Phi(x)": 0.0, "Phi(x)": 7.0, "tanh": 5e-4}, {"gelu is smooth": True}
    assert activation.decide_verdict(max_error, output).word == "partly"
    assert activation.decide_verdict({**max_error, "Phi(x)": 0.0}, output) == Verdict("holds")
    assert activation.decide_verdict({**max_error, "tanh": 0.1}, output).word == "does not hold"
    assert "gelu is smooth" in activation.decide_verdict(max_error, {"gelu is smooth": False}).condition


def test_association_can_fail():
    result = dict.fromkeys(
        ["one match", "the same with U^T", "the same with a sink", "one match, U not orthogonal"], 1e-6
    ) | {"three matches": 0.0, "none or one match": 0.0, "convolution, none or one": 0.7}
    assert association.decide_verdict(result) == Verdict("holds")
    assert (
        association.decide_verdict({**result, "three matches": 0.7}).condition
        == "at most one patch may match"
    )
    assert association.decide_verdict({**result, "one match": 0.5}).word == "does not hold"
    assert association.decide_verdict({**result, "convolution, none or one": 0.01}).word == "does not hold"


def test_double_if_can_fail():
    result = {
        "attention": 1.0,
        "attention, random directions": 1.0,
        "convolution of all patches": 0.7,
        "convolution of 2 patches": 0.6,
    }
    assert double_if.decide_verdict(result, 0.0) == Verdict("holds")
    assert "not how often" in double_if.decide_verdict(result, 0.6).condition
    assert double_if.decide_verdict({**result, "attention": 0.8}, 0.0).word == "does not hold"


def test_convolution_can_fail():
    losses = {"mean, one head": 0.01, "edge, one head": 0.01, "edge, several heads": 0.01}
    assert convolution.decide_verdict(0.1, 0.95, losses) == Verdict("holds")
    assert convolution.decide_verdict(0.1, 0.95, {**losses, "edge, one head": 0.5}).word == "partly"
    assert convolution.decide_verdict(0.1, 0.12, losses).word == "does not hold"


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
        "verdict   partly",
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
    assert [result["name"] for result in results] == list(LABS)
    for result in results:
        assert result["size"] == "full"
        assert result["verdict"] in VERDICTS
        assert result["claim"] == find_lab(result["name"]).CLAIM, "run python -m vitrail.course.labs.collect"
        assert result["note"] == find_lab(result["name"]).NOTE
        if result["name"] in EXPECTED:
            check_expected(result)
        assert result["environment"]["torch"]
        assert "/" not in json.dumps([result["environment"], result["data"]])
    output = run_cli("notes", "--full")
    for name in LABS:
        assert f"vitrail lab {name}" in output
    table = run_cli("notes", "--markdown").splitlines()
    assert table[0] == "| note | claim | command | number | verdict |"
    assert len(table) == 2 + len(LABS)
    assert {line.count(" | ") for line in table} == {4}


def test_notes_overview_and_one_note():
    output = run_cli("notes")
    assert max(map(len, output.splitlines())) <= 80
    for result in load_results():
        assert f"\n{result['verdict']:14}{result['name']} " in output
    assert "003  slides" in output
    output = run_cli("notes", "004")
    assert "vitrail lab convolution" in output
    assert "vitrail lab speech" not in output
    with pytest.raises(VitrailError, match="no lecture note '7'"):
        CliRunner().invoke(app, ["notes", "7"], catch_exceptions=False)


def test_notes_run(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.course.labs.collect.LABS", {"activation": "activation"})
    before = labs.RESULTS.read_bytes()
    output = run_cli("notes", "--run", "--small", "--out", tmp_path / "new")
    assert "activation: partly" in output
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
