"""A file with both towers and no classes of its own: commands say so, and take classes from words."""

import json

import pytest

import vitrail as vt
from tests.support.command import run_command
from tests.support.digit_clip import DIGITS, FILE, save_scenes
from vitrail.base.errors import InputError

NONE = "This model has a text tower and no classes of its own; "


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return save_scenes(tmp_path_factory.mktemp("scenes"), count=60)


def run(*arguments, cwd, code=0):
    done = run_command(*arguments, cwd=cwd, columns=500)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["evaluate", FILE, "PHOTOS"], "name some with --labels cat,dog, or save the embeddings"),
        (["predict", FILE, "PHOTOS"], "name some with --labels cat,dog, or save the embeddings"),
        (
            ["export", FILE, "--to", "onnx"],
            "vitrail convert MODEL NEW.safetensors --labels cat,dog; or remove",
        ),
        (["export", FILE, "--to", "html"], "its projection with --set classes=0 to export pooled vectors."),
    ],
    ids=["evaluate", "predict", "onnx", "html"],
)
def test_it_is_no_classifier(photos, tmp_path, arguments, advice):
    done = run(*(photos if word == "PHOTOS" else word for word in arguments), cwd=tmp_path, code=2)
    assert done.stdout == ""
    assert NONE in done.stderr
    assert advice in done.stderr
    assert not list(tmp_path.iterdir())


def test_python_says_what_to_call(photos):
    with pytest.raises(InputError, match=r"no classes of its own; give it some with bundle.zero_shot"):
        vt.evaluate(FILE, photos)


def test_its_features_are_probed_without_the_projection(photos, tmp_path):
    done = run("evaluate", FILE, photos, "--set", "classes=0", "--probe", "knn", cwd=tmp_path)
    assert "knn" in done.stdout


def test_it_is_exported_without_the_projection(tmp_path):
    done = run("export", FILE, "--to", "onnx", "--set", "classes=0", cwd=tmp_path)
    assert "embedding (batch, 32)" in done.stdout


def test_zero_shot_evaluation_is_one_command(photos, tmp_path):
    """The accuracy is that of the classifier that Python makes from the same words."""
    (tmp_path / "templates.txt").write_text("a {}\na small {}\n")
    words = ["--labels", ",".join(DIGITS), "--templates", "templates.txt"]
    done = run("evaluate", FILE, photos, *words, "--json", "-", cwd=tmp_path)
    assert "10 classes from 20 prompts" in done.stderr
    expected = vt.evaluate(vt.load(FILE).zero_shot(DIGITS, ["a {}", "a small {}"]), photos)
    assert json.loads(done.stdout)["metrics"]["top1"] == pytest.approx(expected.metrics.top1)
    assert expected.metrics.top1 > 0.3
    prompts = run("evaluate", FILE, photos, *words[:2], "--prompts", "a {}", "--quiet", cwd=tmp_path)
    assert "prompts" not in prompts.stderr


def test_info_does_not_call_the_embedding_classes(tmp_path):
    done = run("info", FILE, cwd=tmp_path)
    assert "classes by words: vitrail predict --labels cat,dog" in done.stdout
    assert "softmax" not in done.stdout
    facts = json.loads(run("info", FILE, "--json", cwd=tmp_path).stdout)
    assert (facts["classes"], facts["scores"]) == (None, None)
    vt.load(FILE).zero_shot(["one", "two"]).save(tmp_path / "baked.safetensors")
    facts = json.loads(run("info", "baked.safetensors", "--json", cwd=tmp_path).stdout)
    assert (facts["classes"], facts["zero-shot"]) == (2, None)
    assert "softmax" in facts["scores"]
