"""Predictions of images in their own shape."""

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from vitrail.cli import app
from vitrail.images.any_size import native_preprocess, native_size

LABELS = ["ant", "bee", "cat"]


def save_model(path, **fields):
    model = add_noise(vt.create("mu/8@32", classes=3, **fields))
    vt.Bundle(model=model, labels=LABELS).save(path)
    return path


def photo(height, width, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize("patches", [16, 256])
def test_sizes_are_those_of_naflex(patches):
    for height, width in [(100, 100), (480, 640), (33, 900), (4000, 17), (1, 1), (7, 5), (1, 3000)]:
        expected = get_image_size_for_max_num_patches(height, width, 16, patches)
        assert native_size(height, width, (16, 16), patches) == expected


def test_the_shape_is_kept_and_the_pixels_are_not_cropped():
    spec = native_preprocess(vt.Preprocess(size=32, resize="shortest", resize_to=40), (8, 8), 16)
    assert spec.pixels(photo(100, 100)).shape == (32, 32, 3)
    tall = spec.pixels(photo(300, 100))
    assert tall.shape == (48, 16, 3)
    assert tall.shape[0] // 8 * (tall.shape[1] // 8) <= 16
    assert "in its own shape to at most 16 patches" in " ".join(spec.describe())
    assert "crop" not in " ".join(spec.describe())


def test_a_batch_gives_what_each_image_gives_alone(tmp_path):
    file = save_model(tmp_path / "model.safetensors")
    photos = [photo(50, 50, 1), photo(30, 90, 2), photo(120, 20, 3), photo(50, 50, 4)]
    together = vt.Predictor(file, native=True)(photos)
    alone = [vt.Predictor(file, native=True, batch=1)(one) for one in photos]
    for one, other in zip(together, alone, strict=True):
        assert one.label == other.label
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-5)
    squashed = vt.Predictor(file)(photos)
    assert np.abs(squashed[1].logits - together[1].logits).max() > 1e-3
    model = vt.load(file).model.accept_any_size()
    spec = native_preprocess(vt.load(file).preprocess, (8, 8), 16)
    with torch.no_grad():
        expected = model(spec(photos[1])[None])[0].numpy()
    np.testing.assert_allclose(together[1].logits, expected, atol=1e-5)


def test_siglip2_naflex_as_transformers_pads_it(tmp_path):
    """Three images of different shapes, cut, padded and masked by transformers; packed here."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config = hf.Siglip2VisionConfig(**sizes, patch_size=8, num_patches=16)
    model = add_noise(hf.Siglip2VisionModel(config))
    model.save_pretrained(tmp_path / "in")
    photos = [photo(50, 50, 1), photo(30, 90, 2), photo(120, 20, 3)]
    processor = hf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16, resample=2)
    inputs = processor(photos, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).pooler_output.numpy()
    predictor = vt.Predictor(tmp_path / "in", native=True)
    vectors = np.stack([one.embedding for one in predictor(photos)])
    np.testing.assert_allclose(vectors, expected, atol=1e-4)


def test_the_command(tmp_path):
    file = save_model(tmp_path / "model.safetensors")
    (tmp_path / "photos").mkdir()
    photo(30, 90).save(tmp_path / "photos" / "wide.png")
    photo(90, 30).save(tmp_path / "photos" / "tall.png")
    (tmp_path / "photos" / "bad.png").write_bytes(b"no image")
    run = ["predict", str(file), str(tmp_path / "photos"), "--native", "--format", "csv"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 1  # one image cannot be read
    assert len(done.stdout.strip().splitlines()) == 4
    refused = CliRunner().invoke(app, [*run, "--out", str(tmp_path / "parts") + "/"])
    assert "--native is not for a folder of parts" in str(refused.exception)


@pytest.mark.parametrize(
    ("fields", "message"),
    [(dict(position="relative"), "one size only"), (dict(pool="flatten"), "one size only")],
)
def test_models_of_one_size_are_refused(fields, message, tmp_path):
    with pytest.raises(vt.InputError, match=message):
        vt.Predictor(save_model(tmp_path / "model.safetensors", **fields), native=True)


def test_an_onnx_file_is_refused(tmp_path):
    with pytest.raises(vt.InputError, match="a graph for images of one shape"):
        vt.Predictor(tmp_path / "model.onnx", native=True)


def test_an_accelerated_model_takes_one_shape(tmp_path):
    with pytest.raises(vt.InputError, match="native and precision exclude each other"):
        vt.Predictor(save_model(tmp_path / "model.safetensors"), native=True, precision="fp32")
