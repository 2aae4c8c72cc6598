"""SigLIP 2 NaFlex with its text tower: transformers' text vectors, and its scores of images in their own shape."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch.nn import functional as F
from typer.testing import CliRunner

import vitrail as vt
from tests.support.bits import same_file
from tests.support.hf_models import from_pretrained, save_pretrained
from tests.support.models import add_noise
from tests.support.text_models import gemma_like
from vitrail.cli import app

TEXTS = ["a cat of dogs", "A CAT, of dogs!", "é 한국어 🙂", "long " * 30]
TOWER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
LENGTH = 16
SIZES = [(50, 50), (30, 90), (120, 20)]


@pytest.fixture(scope="module")
def naflex(tmp_path_factory):
    """transformers' model with both towers, and its folder with processor and tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("naflex") / "in"
    text = dict(**TOWER, vocab_size=256_000, max_position_embeddings=LENGTH, bos_token_id=2, eos_token_id=1)
    vision = dict(**TOWER, patch_size=8, num_patches=16)
    model = hf.Siglip2Model(
        hf.Siglip2Config(text_config={**text, "projection_size": 32}, vision_config=vision)
    )
    model = add_noise(model)
    model.logit_scale.data.fill_(1.5)
    model.logit_bias.data.fill_(-1.0)
    save_pretrained(model, folder)
    gemma_like().save_pretrained(folder)
    processor().save_pretrained(folder)
    return model, folder


def processor():
    return hf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16, resample=2)


def token_ids(texts):
    """As the model card says: padded to the full length."""
    inputs = gemma_like()(
        texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    return inputs["input_ids"]


def test_the_text_tower(naflex):
    model, folder = naflex
    bundle = vt.load(folder)
    assert (bundle.source.family, bundle.text.family) == ("hf-siglip2-naflex", "hf-siglip-text")
    assert torch.equal(bundle.text.tokens(TEXTS), token_ids(TEXTS))
    with torch.no_grad():
        expected = model.get_text_features(token_ids(TEXTS)).pooler_output
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(bundle.text.tower(token_ids(TEXTS)), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(bundle.text(TEXTS), F.normalize(expected, dim=-1), rtol=0, atol=1e-5)
    assert (bundle.text.activation, bundle.text.bias) == ("sigmoid", -1.0)
    assert bundle.text.scale == pytest.approx(model.logit_scale.exp().item())


def test_both_towers_are_written_back(naflex, tmp_path):
    _, folder = naflex
    vt.load(folder).save(tmp_path / "ours.safetensors")
    for source in (folder, tmp_path / "ours.safetensors"):
        back = tmp_path / f"back-{source.stem}.safetensors"
        vt.convert(source, back, to="hf-siglip2-naflex")
        assert same_file(folder / "model.safetensors", back)
    again = vt.load(tmp_path / "ours.safetensors")
    assert torch.equal(again.text(TEXTS), vt.load(folder).text(TEXTS))


def test_the_written_folder_is_transformers(naflex, tmp_path):
    """Both towers, the tokenizer and a processor that keeps the shape of images."""
    model, folder = naflex
    vt.convert(folder, tmp_path / "out", to="hf")
    theirs = from_pretrained(hf.Siglip2Model, tmp_path / "out")
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 90, 3), np.uint8))
    inputs = processor()(photo, return_tensors="pt")
    written = hf.Siglip2ImageProcessorPil.from_pretrained(tmp_path / "out")(photo, return_tensors="pt")
    assert all(torch.equal(inputs[name], written[name]) for name in inputs)
    with torch.no_grad():
        one, other = (m(input_ids=token_ids(TEXTS), **inputs).logits_per_image for m in (model, theirs))
    assert torch.equal(one, other)
    assert torch.equal(vt.load(tmp_path / "out").text(TEXTS), vt.load(folder).text(TEXTS))


def test_a_baked_head_on_images_in_their_own_shape(naflex, tmp_path):
    """`convert --prompts`, then `predict --native`: the scores that transformers computes of both towers."""
    model, folder = naflex
    prompts = {"cat": ["a cat"], "dog": ["a dog"], "boat": ["the boat at sea"]}
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    photos = tmp_path / "photos"
    photos.mkdir()
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for size in SIZES]
    for number, image in enumerate(images):
        image.save(photos / f"{number}.png")

    baked = tmp_path / "baked.safetensors"
    run("convert", folder, baked, "--to", "vitrail", "--prompts", tmp_path / "prompts.json")
    with torch.no_grad():
        ids = token_ids([text for [text] in prompts.values()])
        logits = model(input_ids=ids, **processor()(images, return_tensors="pt")).logits_per_image
    expected = logits.sigmoid().numpy()
    for options in (["--native"], []):  # by default, as the file was trained
        lines = run("predict", baked, photos, "--format", "jsonl", "--top", "3", *options).stdout.splitlines()
        assert len(lines) == len(images)
        for line, scores in zip(map(json.loads, lines), expected, strict=True):
            ours = {one["label"]: one["score"] for one in line["top"]}
            assert ours == pytest.approx(dict(zip(prompts, scores.tolist(), strict=True)), abs=1e-4)
    squashed = vt.Predictor(baked, native=False)(images)
    assert np.abs(squashed[1].logits - logits[1].numpy()).max() > 1e-3


def run(*arguments):
    done = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, f"{done.output} {done.exception!r}"
    return done
