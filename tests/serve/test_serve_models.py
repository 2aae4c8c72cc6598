"""Embeddings, classes by words, and several models in one server."""

import json
import time

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import vitrail as vt
from tests.serve.test_serve_app import check
from tests.support.digit_clip import DIGITS, FILE, scenes
from tests.support.models import add_noise
from tests.support.serving import LABELS, form, make_image, serving, toy
from vitrail.cli import app
from vitrail.cli.serve import parse_models
from vitrail.predict.index import build_index
from vitrail.serve.served_model import fit_memory
from vitrail.serve.server_settings import ServeConfig
from vitrail.weights.text.prompts import bake_prompts, fill_templates


def as_png(pixels, path):
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def two():
    """A server with a classifier and a real, tiny CLIP."""
    models = {"pets": vt.Predictor(toy()), "digits": vt.Predictor(FILE)}
    with serving(models) as running:
        yield running
    assert not [line for line in running.log if line.startswith("internal error")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    pixels, _ = scenes(4, 3)
    return [as_png(one, folder / f"{number}.png") for number, one in enumerate(pixels)], folder


def post(server, path, *files, **fields):
    body, kind = form(*files, **fields)
    return server.get(path, body=body, headers={"Content-Type": kind})


# ---- embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["pets", "digits"])
def test_embeddings_are_those_of_the_index(two, photos, model):
    files, folder = photos
    status, said = post(two, f"/v1/models/{model}/embed", *files, b"no image")
    assert status == 200
    assert said["model"] == model
    *good, bad = said["embeddings"]
    assert bad["embedding"] is None
    assert bad["error"].startswith("The file is not an image")
    index = build_index(two.app.models[model].predictor, [folder])
    np.testing.assert_allclose([one["embedding"] for one in good], index.embeddings, atol=1e-6)
    assert np.linalg.norm(good[0]["embedding"]) == pytest.approx(1, abs=1e-5)


def test_one_image_as_the_body(two):
    status, said = two.get("/v1/embed", body=make_image(), headers={"Content-Type": "image/png"})
    assert status == 200
    assert said["model"] == "pets"
    assert len(said["embeddings"][0]["embedding"]) == 32
    assert two.get("/v1/embed", body=b"no image", headers={"Content-Type": "image/png"})[0] == 415


# ---- words --------------------------------------------------------------------------------------


def test_labels_of_a_request_give_what_baked_prompts_give(two, photos, tmp_path):
    files, folder = photos
    labels = DIGITS[:4]
    expected = vt.Predictor(bake_prompts(vt.load(FILE), fill_templates(labels)))(sorted(folder.iterdir()))
    status, said = post(two, "/v1/models/digits/predict", *files, labels=", ".join(labels), top=4)
    assert status == 200
    for found, one in zip(said["predictions"], expected, strict=True):
        assert found["label"] == one.label
        scores = {guess["label"]: guess["score"] for guess in found["top"]}
        assert scores == pytest.approx(dict(one.top(4)), abs=1e-5)
    assert set(labels) <= two.app.models["digits"].zero_shot.kept.keys()


def test_the_time_of_texts_is_not_that_of_decoding(two, photos, monkeypatch):
    zero_shot = two.app.models["digits"].zero_shot
    encode = zero_shot._encode
    monkeypatch.setattr(zero_shot, "_encode", lambda texts: time.sleep(0.5) or encode(texts))
    path = "/v1/models/digits/predict"
    seconds = post(two, path, photos[0][0], labels="eight,nine")[1]["seconds"]
    assert 0.5 <= seconds["text"] <= seconds["total"]
    assert seconds["decode"] < 0.5
    assert sum(seconds[name] for name in ("text", "decode", "model")) == pytest.approx(seconds["total"])


def test_labels_in_the_query(two, photos):
    path = "/v1/models/digits/predict?labels=zero,one&top=1"
    status, said = two.get(path, body=photos[0][0], headers={"Content-Type": "image/png"})
    assert status == 200
    assert said["predictions"][0]["label"] in ("zero", "one")


@pytest.mark.parametrize(
    ("labels", "code"),
    [
        ("zero", "bad_labels"),
        ("zero,zero", "bad_labels"),
        ("zero,", "bad_labels"),
        ("zero,\x00", "bad_labels"),
        ("zero," + "x" * 101, "bad_labels"),
        (",".join(f"word{n}" for n in range(101)), "bad_labels"),
        ("x" * 10_001, "bad_form"),
    ],
)
def test_bad_labels(two, photos, labels, code):
    status, said = post(two, "/v1/models/digits/predict", photos[0][0], labels=labels)
    assert (status, said["error"]["code"]) == (400, code)


def test_a_model_of_words_needs_labels(two, photos):
    status, said = post(two, "/v1/models/digits/predict", photos[0][0])
    assert (status, said["error"]["code"]) == (400, "no_labels")
    assert "labels=cat,dog" in said["error"]["message"]
    model = two.get("/v1/models/digits/model")[1]
    assert (model["words"], model["labels"]) == (True, {"count": 0, "first": []})
    assert two.get("/v1/model")[1]["words"] is False
    status, said = post(two, "/v1/models/digits/explain", photos[0][0])
    assert status == 200
    assert said["prediction"]["label"] is None
    assert "words" in said["lens"]["reason"]


def test_labels_for_a_model_without_words(two):
    status, said = post(two, "/v1/predict", make_image(), labels="cat,dog")
    assert (status, said["error"]["code"]) == (400, "no_text_tower")


# ---- several models -----------------------------------------------------------------------------


def test_the_first_model_is_the_default(two):
    assert two.get("/v1/models") == (
        200,
        [
            {"name": "pets", "url": "/v1/models/pets", "default": True},
            {"name": "digits", "url": "/v1/models/digits", "default": False},
        ],
    )
    expected = vt.Predictor(toy())
    assert two.predict()[1]["model"] == "pets"
    status, said = post(two, "/v1/models/pets/predict", make_image())
    assert status == 200
    assert said["predictions"][0]["label"] in LABELS
    assert two.get("/v1/models/digits/model")[1]["name"] == "digits"
    assert two.get("/v1/models/digits/model")[1]["width"] == 32
    assert expected.config.width == 32
    assert two.get("/v1/models/pets/explain", body=make_image())[1]["model"] == "pets"


def test_images_of_two_models_never_share_a_batch(two, photos):
    before = two.count("vitrail_batch_size_count")
    for _ in range(3):
        assert post(two, "/v1/models/digits/predict", photos[0][0], labels="one,two")[0] == 200
        assert two.predict()[0] == 200
    assert two.count("vitrail_batch_size_count") >= before + 6


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/models/none/predict", 404, "no_such_model"),
        ("/v1/models/pets/load", 404, "not_found"),
        ("/v1/models/pets/predict/x", 404, "not_found"),
        ("/v1/models/../predict", 404, "no_such_model"),
        ("/v1/models//predict", 404, "not_found"),
    ],
)
def test_unknown_models(two, path, status, code):
    found, said = two.get(path, body=make_image(), headers={"Content-Type": "image/png"})
    assert (found, said["error"]["code"]) == (status, code)


def test_the_routes_are_in_the_document(two):
    paths = two.get("/openapi.json")[1]["paths"]
    assert set(paths) == {path for path in two.app.routes if path not in two.app.page or path == "/"}
    for name in ("predict", "embed"):
        (operation,) = paths[f"/v1/models/{{model}}/{name}"].values()
        _, said = post(two, f"/v1/models/pets/{name}", make_image(), b"bad")
        check(said, operation["responses"]["200"]["content"]["application/json"]["schema"], name)
    (operation,) = paths["/v1/models"].values()
    check(
        two.get("/v1/models")[1], operation["responses"]["200"]["content"]["application/json"]["schema"], ""
    )


def test_the_log_has_no_text_of_clients(two):
    two.get("/v1/models/secret-name/predict", body=make_image())
    assert not [line for line in two.log if "secret-name" in line]
    assert [line for line in two.log if "/v1/models/{model}/predict" in line]


def test_a_token_guards_every_model():
    models = {"a": vt.Predictor(toy()), "b": vt.Predictor(toy())}
    with serving(models, token="correct-horse-battery-staple") as running:
        assert running.get("/v1/models")[0] == 401
        assert running.get("/v1/models/b/model")[0] == 401
        given = {"Authorization": "Bearer correct-horse-battery-staple"}
        assert running.get("/v1/models/b/model", headers=given)[0] == 200


# ---- memory and names ---------------------------------------------------------------------------


def test_a_batch_is_made_to_fit_the_memory():
    predictor = vt.Predictor(vt.Bundle(model=add_noise(vt.create("Ti/16", classes=3))))
    assert fit_memory(predictor, ServeConfig(), "x").batch == 16
    small = fit_memory(predictor, ServeConfig(model_memory=30 * 2**20), "x")
    assert 1 <= small.batch < 16
    with pytest.raises(vt.InputError, match=r"x needs 2\d MB for its weights and one image.*may take 10 MB"):
        fit_memory(predictor, ServeConfig(model_memory=10 * 10**6), "x")


def test_names_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.safetensors").touch()
    assert parse_models(["x.safetensors"]) == {"": "x.safetensors"}
    assert parse_models(["a=b.safetensors"]) == {"": "a=b.safetensors"}  # a file of that name
    assert parse_models(["a=x.onnx", "b=hf:o/n"]) == {"a": "x.onnx", "b": "hf:o/n"}
    assert parse_models(["runs/lr=3/x.onnx"]) == {"": "runs/lr=3/x.onnx"}
    for bad in (["x.onnx", "y.onnx"], ["a=x.onnx", "a=y.onnx"]):
        done = CliRunner().invoke(app, ["serve", *bad, "--port", "0"])
        assert "Several models need different names" in str(done.exception)
    assert json.dumps(parse_models(["a=x"])) == '{"a": "x"}'
