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
    association,
    permutation,
)
from vitrail_course.labs import lab as labs
from vitrail_course.labs.lab import LABS, find_lab, load_results, run_lab

EXPECTED = {  # the verdict of each lab that trains nothing
    "patching": "identity: holds",
    "walk": "identity: partly holds",
    "scale": "identity: partly holds; toy experiment: seen",
    "permutation": "identity: holds",
    "association": "identity: partly holds",
}


def find_verdict(result):
    return str(labs.result_verdict(result))


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
    assert result["verdict"] == "too small to judge: run the lab without --small"
    assert find_verdict(result) == EXPECTED[name]
    assert math.isfinite(result["number"])
    assert result["n"] >= 1
    assert "nan" not in result["setting"]
    assert result["command"] == f"vitrail lab {name}"
    assert re.match(r"00[0-4]", result["note"])


def test_labs_are_reproducible(small_results, tmp_path):
    """Independent of the global seed, up to rounding."""
    out, results = small_results
    for name in ("scale", "association"):
        torch.manual_seed(99)
        again = run_lab(name, tmp_path, "small")
        assert again["number"] == pytest.approx(results[name]["number"], rel=1e-9)
        assert (tmp_path / f"{name}.png").read_bytes() == (out / f"{name}.png").read_bytes()


def test_in_one_layer_relative_positions_do_not_change_the_class_token():
    """The class token has the same distance to every patch: a real case of the verdict's condition."""
    images = labs.load_images(None, 2)
    assert (
        permutation.shuffle_changes(images, "relative", 1, 2)[1]
        < 1e-10
        < permutation.shuffle_changes(images, "relative", 2, 2)[1]
    )


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


def test_shuffling_patches_can_be_undone():
    images = labs.load_images(None, 2)
    config = permutation.build_model(images, "none", 1).config
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
    assert find_verdict(result) == EXPECTED[name]


def test_data_for_a_lab_without_data_is_an_error(tmp_path):
    with pytest.raises(VitrailError, match="The lab scale takes no data"):
        run_lab("scale", tmp_path / "out", "small", "digits")
    assert not (tmp_path / "out").exists()


# ---- commands -------------------------------------------------------------------------------


def test_lab_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run_cli("lab")
    assert [line.split()[0] for line in output.splitlines() if line[0] != " "] == list(LABS)
    output = run_cli("lab", "patching", "--small")
    for word in (
        "note      002",
        "claim     Kernel size",
        "measured  ",
        "setting   8 images",
        "verdict   too small to judge: run the lab without --small",
        "lab-patching",
    ):
        assert word in output
    assert sorted(p.name for p in (tmp_path / "lab-patching").iterdir()) == [
        "patching.json",
        "patching.png",
        "patching.svg",
    ]
    with pytest.raises(VitrailError, match="--out must name a new or empty folder"):
        CliRunner().invoke(app, ["lab", "patching"], catch_exceptions=False)


def test_unknown_lab():
    with pytest.raises(VitrailError, match=r"(?i)unknown lab 'patchin'.*Did you mean 'patching'"):
        CliRunner().invoke(app, ["lab", "patchin"], catch_exceptions=False)


def test_notes_command():
    results = load_results()
    names = [result["name"] for result in results]
    assert names == [name for name in LABS if name in names]
    for result in results:
        assert result["size"] == "full"
        if result["name"] in EXPECTED:
            assert find_verdict(result) == EXPECTED[result["name"]]
        assert isinstance(result["warnings"], list)
        assert result["environment"]["torch"]
        assert "/" not in json.dumps([result["environment"], result["data"]])
    output = run_cli("notes", "--full")
    for name in names:
        assert f"vitrail lab {name}" in output


def test_notes_overview_and_one_note():
    output = run_cli("notes")
    assert max(map(len, output.splitlines())) <= 80
    assert all(len(find_lab(name).TITLE) <= 30 for name in LABS)
    for result in load_results():
        for word in labs.result_verdict(result).words.values():
            assert f" {word:16}{result['name']} " in output
    assert "003  slides" in output
    output = run_cli("notes", "004")
    assert "vitrail lab convolution" in output
    assert "vitrail lab tokens" not in output
    with pytest.raises(VitrailError, match="no lecture note '7'"):
        CliRunner().invoke(app, ["notes", "7"], catch_exceptions=False)


def test_published_table():
    output = run_cli("notes", "--table")
    assert "88.55" in output
    assert "2010.11929" in output
