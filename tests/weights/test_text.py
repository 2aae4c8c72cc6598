"""Text towers: the same vectors and scores as transformers and OpenCLIP, read from files with both towers."""

import json

import open_clip
import pytest
import safetensors.torch
import torch
import transformers as hf
from torch.nn import functional as F

import vitrail as vt
from tests.support.bits import same_file
from tests.support.hf_models import from_pretrained, save_pretrained
from tests.support.text_models import (
    apple_names,
    gemma_like,
    hf_clip_tokenizer,
    noisy,
    open_clip_model,
    save_clip_tokenizer,
    tiny_vocabulary,
)
from vitrail.base.errors import FileError, InputError
from vitrail.model.text_tower import TextConfig, TextTower
from vitrail.weights.text.words import load_text

VOCABULARY = len(tiny_vocabulary()[0])
TEXTS = ["a photo of a cat", "dog's paw, LARGE", "naïve 42 한국어", "small " * 40]
VISION = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    patch_size=8,
    image_size=32,
)
TEXT = dict(
    hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40, vocab_size=VOCABULARY,
    max_position_embeddings=16, bos_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1,
)  # fmt: skip


def close(ours, theirs):
    assert theirs.abs().max() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def check_scores(bundle, images, texts, logits, activation):
    """Ours and the library's logits, from unit vectors; and that the kind of score is said."""
    with torch.no_grad():
        vectors = F.normalize(bundle.model(images), dim=-1)
    ours = bundle.text.scale * vectors @ bundle.text(texts).T + bundle.text.bias
    close(ours, logits)
    assert bundle.text.activation == activation


@pytest.mark.parametrize("changes", [{}, dict(eos_token_id=2), dict(hidden_act="gelu", layer_norm_eps=1e-3)])
def test_transformers_clip(tmp_path, changes):
    torch.manual_seed(0)
    config = hf.CLIPConfig(text_config={**TEXT, **changes}, vision_config=VISION, projection_dim=20)
    theirs = noisy(hf.CLIPModel(config))
    save_pretrained(theirs, tmp_path)
    save_clip_tokenizer(tmp_path)
    bundle = vt.load(tmp_path)
    assert bundle.text.family == "hf-clip-text"
    tokenizer = hf_clip_tokenizer()
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        out = theirs(**inputs, pixel_values=images)
    close(bundle.text(TEXTS), out.text_embeds)
    check_scores(bundle, images, TEXTS, out.logits_per_image, "softmax")

    # One vitrail file is complete, and the library's file is written back bit-equal.
    bundle.save(tmp_path / "ours.safetensors")
    again = vt.load(tmp_path / "ours.safetensors")
    assert torch.equal(again.text(TEXTS), bundle.text(TEXTS))
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="hf")
    same_file(tmp_path / "model.safetensors", tmp_path / "back.safetensors")
    written = check_folder(tmp_path, hf.CLIPModel)
    with torch.no_grad():
        again = written(**inputs, pixel_values=images)
    assert torch.equal(again.logits_per_image, out.logits_per_image)


@pytest.mark.parametrize("kind", ["siglip", "siglip2"])
def test_transformers_siglip(tmp_path, kind):
    torch.manual_seed(0)
    tokenizer = gemma_like()
    text = {**TEXT, "vocab_size": len(tokenizer) if kind == "siglip" else 256_000, "projection_size": 32}
    text |= {"bos_token_id": 2, "eos_token_id": 1}
    theirs = noisy(hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=VISION)))
    save_pretrained(theirs, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    bundle = vt.load(tmp_path)
    assert bundle.text.family == "hf-siglip-text"
    words = ["a cat of dogs", "long " * 30] if kind == "siglip" else ["A CAT, of dogs!", "é"]
    inputs = tokenizer(words, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        out = theirs(input_ids=inputs["input_ids"], pixel_values=images)
    close(bundle.text(words), out.text_embeds)
    check_scores(bundle, images, words, out.logits_per_image, "sigmoid")
    bundle.save(tmp_path / "ours.safetensors")
    assert torch.equal(vt.load(tmp_path / "ours.safetensors").text(words), bundle.text(words))

    # Written back: the tensors bit-equal, and a folder that transformers reads with both towers.
    for source in (tmp_path, tmp_path / "ours.safetensors"):
        vt.convert(source, tmp_path / "back.safetensors", to="hf-siglip")
        assert same_file(tmp_path / "model.safetensors", tmp_path / "back.safetensors")
        (tmp_path / "back.safetensors").unlink()
    again = check_folder(tmp_path, hf.SiglipModel)
    with torch.no_grad():
        logits = again(input_ids=inputs["input_ids"], pixel_values=images).logits_per_image
    assert torch.equal(logits, out.logits_per_image)


def check_folder(folder, model):
    """Write a folder of the same family, and load its two towers by transformers' own loader."""
    vt.convert(folder, folder / "written", to="hf")
    assert same_file(folder / "model.safetensors", folder / "written" / "model.safetensors")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        if (folder / name).exists():
            assert (folder / "written" / name).read_bytes() == (folder / name).read_bytes()
    return from_pretrained(model, folder / "written")


@pytest.mark.parametrize("kind", ["gelu", "quick-gelu", "custom", "siglip"])
def test_open_clip(tmp_path, kind):
    torch.manual_seed(0)
    theirs = noisy(open_clip_model(kind), 0.05)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    more = (
        {"activation": "quick-gelu"}
        if kind == "quick-gelu"
        else {}
        if kind == "siglip"
        else {"activation": "gelu"}
    )
    heads = {"heads": 3} if kind == "siglip" else {"heads": 2}
    images = torch.randn(2, 3, *([224, 224] if kind == "siglip" else [32, 32]))
    if kind == "siglip":
        gemma_like().save_pretrained(tmp_path)
        tokens = torch.randint(5, 300, (4, 16))
    else:
        tokens = open_clip.tokenizer.SimpleTokenizer(context_length=16)(TEXTS)
    bundle = vt.load(tmp_path, **more, **heads)
    with torch.no_grad():
        expected, image, scale = (
            theirs.encode_text(tokens),
            theirs.encode_image(images),
            theirs.logit_scale.exp(),
        )
        ours = bundle.text.tower(tokens)
        logits = scale * F.normalize(image, dim=-1) @ F.normalize(expected, dim=-1).T
    close(ours, expected)
    close(bundle.model(images).detach(), image)
    assert bundle.text.scale == pytest.approx(scale.item())
    if kind == "siglip":
        assert (bundle.text.bias, bundle.text.activation) == (-3.0, "sigmoid")
        assert bundle.text.tower.config.causal is False
    else:
        assert torch.equal(bundle.text.tokens(TEXTS), tokens)
        check_scores(bundle, images, TEXTS, logits, "softmax")
    bundle.save(tmp_path / "ours.st.safetensors")
    again = vt.load(tmp_path / "ours.st.safetensors")
    assert torch.equal(again.text.tower(tokens), ours)
    vt.convert(tmp_path / "ours.st.safetensors", tmp_path / "back.safetensors", to="clip")
    same_file(tmp_path / "model.safetensors", tmp_path / "back.safetensors")


def test_mobileclip_text_tower(tmp_path):
    """Apple's names, made from OpenCLIP's tower: the reverse of OpenCLIP's own conversion."""
    torch.manual_seed(0)
    theirs = noisy(open_clip_model("custom"), 0.05)
    state = apple_names(theirs)
    torch.save(state, tmp_path / "mobileclip_b.pt")
    encoder = load_text(tmp_path / "mobileclip_b.pt")
    tokens = open_clip.tokenizer.SimpleTokenizer(context_length=16)(TEXTS)
    with torch.no_grad():
        close(encoder.tower(tokens), theirs.encode_text(tokens))
        close(encoder(TEXTS), theirs.encode_text(tokens, normalize=True))


def test_a_folder_without_settings_of_the_text_tower_says_so(tmp_path):
    save_pretrained(hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=VISION)), tmp_path)
    report = vt.convert(tmp_path / "model.safetensors", tmp_path / "out", to="hf", heads=2)
    assert any("config.json describes the image tower alone" in note for note in report.notes)
    assert same_file(tmp_path / "model.safetensors", tmp_path / "out" / "model.safetensors")


def test_a_padded_neighbour_changes_nothing():
    tower = noisy(TextTower(TextConfig(vocabulary=50, width=16, depth=2, heads=2, length=12, projection=8)))
    tokens = torch.tensor([[48, 3, 4, 49, 0, 0], [48, 5, 49, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(tower(tokens)[1], tower(tokens[1:, :3])[0], rtol=0, atol=1e-6)


def test_clear_messages(tmp_path):
    plain = vt.Bundle(model=vt.create("mu/4", size=8, channels=3, classes=3))
    with pytest.raises(InputError, match="no text tower"):
        _ = plain.text
    config = hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=20)
    save_pretrained(hf.CLIPModel(config), tmp_path)
    with pytest.raises(FileError, match="no tokenizer is beside its weights"):
        vt.load(tmp_path).text(["cat"])
    save_clip_tokenizer(tmp_path)
    text = vt.load(tmp_path).text
    for bad in ("", "  ", "x" * 10_001):
        with pytest.raises(InputError, match="A text must be a string"):
            text([bad])
    with pytest.raises(InputError, match="longer than the tower's length"):
        text.tower(torch.zeros(1, 17, dtype=torch.int64))

    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del state["text_model.encoder.layers.1.mlp.fc1.bias"]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"blocks\.1\.mlp\.fc1\.bias"):
        _ = vt.load(tmp_path).text


def test_the_format_says_when_a_file_has_a_tokenizer(tmp_path):
    """An older vitrail must refuse the file, not misread it."""
    plain = vt.Bundle(model=vt.create("mu/4", size=8, channels=3, classes=3))
    plain.save(tmp_path / "plain.safetensors")
    plain.text_files = {"merges.txt": b"abc"}
    plain.save(tmp_path / "text.safetensors")
    formats = []
    for name in ("plain", "text"):
        with safetensors.safe_open(tmp_path / f"{name}.safetensors", "pt") as file:
            formats.append(json.loads(file.metadata()["vitrail"])["format"])
    assert formats == [2, 3]


def test_the_settings_of_openclip_are_read(tmp_path):
    """quick_gelu, heads and preprocessing are in no tensor, but in open_clip_config.json beside it."""
    torch.manual_seed(0)
    theirs = noisy(open_clip_model("gelu"), 0.05)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "open_clip_model.safetensors")
    settings = {
        "model_cfg": {
            "embed_dim": 20, "vision_cfg": {"width": 64, "head_width": 32, "patch_size": 8},
            "text_cfg": {"context_length": 16, "vocab_size": 49_408, "width": 64, "heads": 1, "layers": 2},
        },
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"},
    }  # fmt: skip
    (tmp_path / "open_clip_config.json").write_text(json.dumps(settings))
    bundle = vt.load(tmp_path)
    tokens, images = open_clip.tokenizer.SimpleTokenizer(context_length=16)(TEXTS), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        close(bundle.model(images), theirs.encode_image(images))
        close(bundle.text.tower(tokens), theirs.encode_text(tokens))
    spec = bundle.preprocess
    assert (spec.mean, spec.std) == ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert (spec.interpolation, spec.resize) == ("bilinear", "squash")
    (tmp_path / "open_clip_config.json").write_text('{"model_cfg": [], "preprocess_cfg": {"mean": ["x"]}}')
    odd = vt.load(tmp_path, heads=2)
    assert odd.preprocess.mean == (0.48145466, 0.4578275, 0.40821073)
    assert any("was not used" in note for note in odd.notes)
    (tmp_path / "open_clip_config.json").write_text("[]")
    with pytest.raises(FileError, match="must be a JSON object"):
        vt.load(tmp_path)
