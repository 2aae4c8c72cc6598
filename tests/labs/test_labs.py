"""Labs at their small size: a number, a picture, a verdict that comes from the numbers; and the table.

Labs that train models have tests of their own (test_lab_*.py): at a small size, their verdicts are chance's.
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
from vitrail.errors import VitrailError
from vitrail.labs import activation, association, convolution, double_if, patching, permutation, scale, walk
from vitrail.labs import lab as labs
from vitrail.labs.collect import merged
from vitrail.labs.lab import LABS, Verdict, find, known, perform

WORDS = ("holds", "holds if", "does not hold")
EXPECTED = {  # what each lab finds, whatever its size
    "patching": "holds if patch and kernel are flattened in the same order",
    "walk": "holds if the first residual adds the embeddings, not the normed ones",
    "scale": "holds if the divisor grows as sqrt(d); sqrt(D) does too, if the number of heads stays",
    "permutation": "holds",
    "activation": "holds if GELU is x times the distribution function, not the function itself",
    "association": "holds if U is orthogonal (or U^T stands for U^-1), at most one patch matches, "
    "a sink token takes the attention where none does",
    "double-if": "holds if it is asked whether b is there, not how often, by a threshold; patches that differ "
    "are at right angles; the convolution does not reach every patch (one that does decides it too)",
    "convolution": "holds if the kernel's weights are of one sign, or there are several heads",
}

app = typer.Typer()
app.command()(lab_command)
app.command()(notes_command)


def say(*words, code=0):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def performed(tmp_path_factory):
    """Each of them, once."""
    place = tmp_path_factory.mktemp("labs")
    return place, {name: perform(name, place, "small") for name in EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_lab_gives_a_number_a_picture_and_the_verdict_we_know(performed, name):
    place, results = performed
    found = results[name]
    assert json.loads((place / f"{name}.json").read_text()) == json.loads(json.dumps(found))
    assert (place / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"{found['verdict']} {found['condition']}".strip() == EXPECTED[name]
    assert math.isfinite(found["number"])
    assert found["n"] >= 1
    assert "nan" not in found["sentence"]
    assert found["command"] == f"vitrail lab {name}"
    assert re.match(r"00[0-4]", found["note"])


def test_a_lab_gives_the_same_twice(performed, tmp_path):
    """Whatever chance was used before; the last bits of a sum are the processor's."""
    place, results = performed
    for name in ("scale", "association", "activation"):
        torch.manual_seed(99)
        again = perform(name, tmp_path, "small")
        assert again["number"] == pytest.approx(results[name]["number"], rel=1e-9)
        assert again["sentence"] == results[name]["sentence"]
        assert (tmp_path / f"{name}.png").read_bytes() == (place / f"{name}.png").read_bytes()


# ---- verdicts, both ways --------------------------------------------------------------------


def test_patching_can_fail():
    assert patching.judge(1e-16, 1e-7, 0.9).word == "holds if"
    assert patching.judge(1e-16, 1e-7, 0.0) == Verdict("holds")
    assert patching.judge(1e-3, 1e-3, 0.9).word == "does not hold"


def test_walk_can_fail():
    assert walk.judge(True, 1e-15, 0.5).word == "holds if"
    assert walk.judge(True, 1e-15, 1e-15) == Verdict("holds")
    assert walk.judge(True, 0.1, 0.5).word == "does not hold"
    assert walk.judge(False, 1e-15, 0.5).word == "does not hold"


def test_scale_can_fail():
    steady, falls, half = [0.9, 0.9], [0.7, 0.1], [0.99, 0.8]
    assert scale.judge({"head": steady, "width": steady, "none": falls}).word == "holds if"
    assert scale.judge({"head": steady, "width": half, "none": falls}) == Verdict("holds")
    assert scale.judge({"head": falls, "width": steady, "none": falls}).word == "does not hold"
    assert scale.judge({"head": steady, "width": steady, "none": steady}).word == "does not hold"


def test_permutation_can_fail():
    assert permutation.judge({"none": 1e-15, "learned": 0.1}, 1e-15) == Verdict("holds")
    assert permutation.judge({"none": 0.1, "learned": 0.1}, 1e-15).word == "does not hold"
    assert "not relative" in permutation.judge({"none": 1e-15, "relative": 0.0}, 1e-15).condition


def test_in_one_layer_relative_positions_leave_the_class_token_as_it_was():
    """It sees every patch at the same distance: a real case of the verdict's condition."""
    images = labs.pictures(None, 2)
    assert (
        permutation.changes(images, "relative", 1, 2)[1]
        < 1e-10
        < permutation.changes(images, "relative", 2, 2)[1]
    )


def test_activation_can_fail():
    worst, said = {"x Phi(x)": 0.0, "Phi(x)": 7.0, "tanh": 5e-4}, {"gelu is smooth": True}
    assert activation.judge(worst, said).word == "holds if"
    assert activation.judge({**worst, "Phi(x)": 0.0}, said) == Verdict("holds")
    assert activation.judge({**worst, "tanh": 0.1}, said).word == "does not hold"
    assert "gelu is smooth" in activation.judge(worst, {"gelu is smooth": False}).condition


def test_association_can_fail():
    found = dict.fromkeys(
        ["one match", "the same with U^T", "the same with a sink", "one match, U not orthogonal"], 1e-6
    ) | {"three matches": 0.0, "none or one match": 0.0, "convolution, none or one": 0.7}
    assert association.judge(found) == Verdict("holds")
    assert association.judge({**found, "three matches": 0.7}).condition == "at most one patch matches"
    assert association.judge({**found, "one match": 0.5}).word == "does not hold"
    assert association.judge({**found, "convolution, none or one": 0.01}).word == "does not hold"


def test_double_if_can_fail():
    found = {
        "attention": 1.0,
        "the same at random angles": 1.0,
        "convolution of all patches": 0.7,
        "convolution of 2 patches": 0.6,
    }
    assert double_if.judge(found, 0.0) == Verdict("holds")
    assert "not how often" in double_if.judge(found, 0.6).condition
    assert double_if.judge({**found, "attention": 0.8}, 0.0).word == "does not hold"


def test_convolution_can_fail():
    losses = {"mean, one head": 0.01, "edge, one head": 0.01, "edge, several heads": 0.01}
    assert convolution.judge(0.1, 0.95, losses) == Verdict("holds")
    assert convolution.judge(0.1, 0.95, {**losses, "edge, one head": 0.5}).word == "holds if"
    assert convolution.judge(0.1, 0.12, losses).word == "does not hold"


# ---- what the labs rest on ------------------------------------------------------------------


def test_a_sample_for_association_is_as_the_slide_has_it():
    for orthogonal in (True, False):
        sample = association.draw_sample(50, 1, orthogonal=orthogonal)
        assert torch.allclose(sample.v.norm(dim=-1), torch.ones(50, 16, dtype=torch.float64))
        partner = sample.v[:, 0] @ sample.U.T
        matches = (sample.v[:, 1:] - partner[:, None]).norm(dim=-1) < 1e-9
        assert (matches.sum(dim=1) == 1).all()
        assert torch.allclose(sample.wanted, partner)
        assert torch.allclose(sample.U @ sample.U.T, torch.eye(16, dtype=torch.float64)) == orthogonal


def test_the_size_of_softmaxs_derivative():
    p = torch.randn(3, 5, dtype=torch.float64).softmax(dim=-1)
    plain = torch.stack([(torch.diag(row) - torch.outer(row, row)).norm() for row in p])
    assert torch.allclose(scale.jacobian_size(p), plain)


def test_the_edge_kernel_is_the_convolution():
    picture = torch.randn(1, 1, 5, 5)
    expected = torch.nn.functional.conv2d(picture, convolution.EDGE[None, None], padding=1).flatten()
    assert torch.allclose(convolution.edges(5) @ picture.flatten(), expected, atol=1e-5)
    assert (convolution.edges(5) != 0).sum() < convolution.neighbours(5).sum() == 13 * 13


def test_shuffled_patches_are_the_same_patches():
    images = labs.pictures(None, 2)
    config = permutation.build(images, "none", 1, False).config
    order = torch.randperm(config.patches)
    moved = permutation.shuffled(images, order, config)
    back = permutation.shuffled(moved, order.argsort(), config)
    assert not torch.equal(moved, images)
    assert torch.equal(back, images)


# ---- data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["patching", "walk", "permutation"])
def test_a_lab_with_data_of_ones_own(tmp_path, name):
    file = tmp_path / "own.npz"
    x = np.random.default_rng(0).integers(0, 256, (12, 16, 24, 3), dtype=np.uint8)
    np.savez(file, x_train=x, y_train=np.arange(12) % 2)
    found = perform(name, tmp_path / "out", "small", file)
    assert found["data"] == "own.npz"
    assert found["verdict"] == EXPECTED[name][: len(found["verdict"])]


def test_a_lab_that_takes_no_data_says_so(tmp_path):
    with pytest.raises(VitrailError, match="The lab scale takes no data"):
        perform("scale", tmp_path / "out", "small", "digits")
    assert not (tmp_path / "out").exists()


# ---- commands -------------------------------------------------------------------------------


def test_lab_lists_and_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = say("lab")
    assert [line.split()[0] for line in said.splitlines()] == list(LABS)
    said = say("lab", "activation", "--small")
    for word in ("note:    001", "claim:   GELU", "number:  0.000473", "verdict: holds if", "lab-activation"):
        assert word in said
    assert sorted(p.name for p in (tmp_path / "lab-activation").iterdir()) == [
        "activation.json",
        "activation.png",
        "activation.svg",
    ]
    with pytest.raises(VitrailError, match="nothing of yours is overwritten"):
        CliRunner().invoke(app, ["lab", "activation"], catch_exceptions=False)


def test_an_unknown_lab_is_named():
    with pytest.raises(
        VitrailError, match=r"A lab must be one there is. Got 'patchin'. Did you mean 'patching'"
    ):
        CliRunner().invoke(app, ["lab", "patchin"], catch_exceptions=False)


def test_the_table_of_all_claims():
    results = known()
    assert [result["name"] for result in results] == list(LABS)
    for result in results:
        assert result["size"] == "full"
        assert result["verdict"] in WORDS
        assert result["claim"] == find(result["name"]).CLAIM, "run python -m vitrail.labs.collect"
        assert result["note"] == find(result["name"]).NOTE
        if result["name"] in EXPECTED:
            assert f"{result['verdict']} {result['condition']}".strip() == EXPECTED[result["name"]]
        assert result["environment"]["torch"]
        assert "/" not in json.dumps([result["environment"], result["data"]])
    said = say("notes")
    for name in LABS:
        assert f"vitrail lab {name}" in said
    table = say("notes", "--markdown").splitlines()
    assert table[0] == "| note | claim | command | number | verdict |"
    assert len(table) == 2 + len(LABS)
    assert {line.count(" | ") for line in table} == {4}


def test_notes_run_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.labs.collect.LABS", {"activation": "activation"})
    before = labs.RESULTS.read_bytes()
    said = say("notes", "--run", "--small", "--out", tmp_path / "new")
    assert "activation: holds if" in said
    assert [r["name"] for r in known(tmp_path / "new" / "results.json")] == ["activation"]
    assert labs.RESULTS.read_bytes() == before
    with pytest.raises(VitrailError, match="--small is for --run"):
        CliRunner().invoke(app, ["notes", "--small"], catch_exceptions=False)


def test_a_lab_that_is_run_again_takes_its_own_place():
    old = [{"name": "walk", "n": 1}, {"name": "scale", "n": 1}]
    assert merged(old, [{"name": "patching", "n": 2}, {"name": "scale", "n": 2}]) == [
        {"name": "patching", "n": 2},
        {"name": "walk", "n": 1},
        {"name": "scale", "n": 2},
    ]


def test_the_published_table():
    said = say("notes", "--table")
    assert "88.55" in said
    assert "2010.11929" in said
    assert say("notes", "--table", "--markdown").startswith("|")
    with pytest.raises(VitrailError, match="Published results are not run"):
        CliRunner().invoke(app, ["notes", "--table", "--run"], catch_exceptions=False)
