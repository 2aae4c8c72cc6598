"""`vitrail probe`: logistic regression on frozen features becomes the head of an ordinary file."""

import json

import pytest
import torch
from typer.testing import CliRunner

import vitrail as vt
from tests.support.digit_clip import FILE, save_scenes
from vitrail.cli import app
from vitrail.evaluation.probes import fit_head, predict_logistic


def command(*arguments, code=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    save_scenes(folder / "train", 300, seed=11)
    save_scenes(folder / "val", 100, seed=12)
    return folder


def test_an_ordinary_file(tmp_path, photos):
    saved = tmp_path / "head.safetensors"
    output = command("probe", FILE, photos, "--save", saved).output
    accuracy = float(output.split("accuracy")[1].split("%")[0]) / 100
    assert accuracy > 0.7
    evaluated = json.loads(command("evaluate", saved, photos, "--split", "val", "--json", "-").stdout)
    assert evaluated["metrics"]["top1"] == pytest.approx(accuracy, abs=0.011)  # one image of a hundred
    bundle = vt.load(saved)
    assert (bundle.model.config.head, bundle.model.config.head_bias) == ("linear", True)
    assert bundle.labels == sorted(bundle.labels)
    assert not bundle.extras
    before = vt.load(FILE).model.state_dict()
    for name, tensor in bundle.model.state_dict().items():
        assert name.startswith("head.") or torch.equal(tensor, before[name])  # frozen
    command("verify", saved)


def test_gray_arrays_and_a_model_of_color_images(tmp_path):
    vt.Bundle(model=vt.create("mu/4@16", classes=3)).save(tmp_path / "color.safetensors")
    assert "accuracy" in command("probe", tmp_path / "color.safetensors", "digits").output


def test_the_head_needs_no_standardized_features():
    torch.manual_seed(0)
    y = torch.randint(3, (90,))
    x = 5 + 3 * torch.randn(90, 4) + 2 * torch.nn.functional.one_hot(y, 4)
    weight, bias = fit_head(x, y, 3, 1e-2)
    (expected,) = predict_logistic(x, y, x, 3, [1e-2])
    assert torch.equal((x.double() @ weight.T + bias).argmax(dim=1), expected)


def test_bad_use(tmp_path, photos):
    result = CliRunner().invoke(app, ["probe", str(FILE), str(photos), "--save", str(tmp_path / "x.pt")])
    assert ".safetensors" in str(result.exception)
    result = CliRunner().invoke(app, ["probe", str(FILE), str(tmp_path / "nothing")])
    assert isinstance(result.exception, vt.VitrailError)
