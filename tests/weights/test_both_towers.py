"""Files with an image and a text tower of the newer models: the vectors of both are OpenCLIP's."""

import open_clip
import pytest
import safetensors.torch
import timm
import torch
from torch.nn import functional as F

import vitrail as vt
from tests.support.bits import same_file
from tests.support.text_models import apple_names, noisy
from tests.weights.test_newer_towers import (
    eva02,
    mobileclip,
    perception_encoder,
    published_mobileclip,
    published_pe,
)

TEXTS = ["a photo of a cat", "dog's paw, LARGE", "naïve 42 한국어", "small " * 40]
EMBEDDING, LENGTH = 6, 16


def both_towers(trunk):
    """OpenCLIP's model with this image tower of timm's, and a text tower of random parameters."""
    text = open_clip.CLIPTextCfg(context_length=LENGTH, vocab_size=49_408, width=64, heads=1, layers=2)
    vision = open_clip.CLIPVisionCfg(timm_model_name="vit_tiny_patch16_224", timm_pool="token", timm_proj="")
    model = noisy(open_clip.CustomTextCLIP(EMBEDDING, vision, text), 0.05)
    model.visual.trunk = trunk
    return model.eval()


def openclip_names(model):
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def apple_file(model):
    """As Apple published MobileCLIP-B. OpenCLIP's own conversion makes its own tensors of it again."""
    text = {n: t for n, t in apple_names(model).items() if not n.startswith("image_encoder.")}
    state = published_mobileclip(model.visual.trunk) | text
    back = open_clip.convert.convert_mobile_clip_state_dict(model, state, fastvit=False)
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())
    return state


def meta_file(model):
    """As Meta published Perception Encoder. timm's own conversion makes its own tensors of it again."""
    text = {n.removeprefix("text."): t for n, t in model.state_dict().items() if n.startswith("text.")}
    state = published_pe(model.visual.trunk) | text | {"logit_scale": model.logit_scale.detach()}
    back = timm.models.eva.checkpoint_filter_fn(state, model.visual.trunk)
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.visual.trunk.state_dict().items())
    return state


FILES = {  # image tower, names of the file, families of the image and of the text tower
    "MobileCLIP-B of Apple": (mobileclip, apple_file, "mobileclip", "mobileclip-text"),
    "MobileCLIP-B of OpenCLIP": (mobileclip, openclip_names, "timm-mobileclip", "clip-text"),
    "Perception Encoder of Meta": (perception_encoder, meta_file, "perception-encoder", "clip-text"),
    "Perception Encoder of OpenCLIP": (
        perception_encoder,
        openclip_names,
        "timm-perception-encoder",
        "clip-text",
    ),
    "EVA-02 CLIP of OpenCLIP": (
        lambda: eva02("CLIP, norm on the heads"),
        openclip_names,
        "timm-eva02",
        "clip-text",
    ),
}


@pytest.fixture(params=FILES)
def both(request, tmp_path):
    """OpenCLIP's model, its file, and the families of its towers."""
    torch.manual_seed(0)
    tower, names, *families = FILES[request.param]
    trunk = tower()
    if names is not openclip_names:
        trunk.head.bias.data.zero_()  # the projection has none
    if "EVA" in request.param:
        trunk.reset_classifier(EMBEDDING)
        torch.nn.init.normal_(trunk.head.weight, std=0.2)
    model = both_towers(trunk)
    safetensors.torch.save_file(
        {name: tensor.clone() for name, tensor in names(model).items()}, tmp_path / "both.safetensors"
    )
    return model, tmp_path / "both.safetensors", families


def close(ours, theirs):
    assert theirs.abs().max() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_both_towers_of_one_file(both, tmp_path):
    theirs, file, (family, text_family) = both
    bundle = vt.load(file, heads=2)
    assert (bundle.source.family, bundle.text.family) == (family, text_family)
    assert (bundle.text.tower.config.causal, bundle.text.tower.config.activation) == (True, "gelu")
    images = torch.randn(3, *bundle.model.config.input_shape)
    tokens = open_clip.tokenizer.SimpleTokenizer(context_length=LENGTH)(TEXTS)
    assert torch.equal(bundle.text.tokens(TEXTS), tokens)
    with torch.no_grad():
        close(bundle.model(images), theirs.encode_image(images))
        close(bundle.text.tower(tokens), theirs.encode_text(tokens))
        close(bundle.text(TEXTS), theirs.encode_text(tokens, normalize=True))
        logits, _ = theirs.get_logits(images, tokens)
        ours = bundle.text.scale * F.normalize(bundle.model(images), dim=-1) @ bundle.text(TEXTS).T
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-4)  # of cosines times 14
    assert (bundle.text.activation, bundle.text.bias) == ("softmax", 0)


def test_both_towers_are_written_back(both, tmp_path):
    _, file, (family, _) = both
    bundle = vt.load(file, heads=2)
    vt.convert(file, tmp_path / "back.safetensors", to=family, heads=2)
    assert same_file(file, tmp_path / "back.safetensors")
    bundle.save(tmp_path / "ours.safetensors")
    again = vt.load(tmp_path / "ours.safetensors")
    assert torch.equal(again.text(TEXTS), bundle.text(TEXTS))
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "again.safetensors", to=family)
    assert same_file(file, tmp_path / "again.safetensors")


def test_words_make_a_classifier(both):
    """The scores of a baked head are those of OpenCLIP's two towers."""
    theirs, file, _ = both
    baked = vt.load(file, heads=2).zero_shot(["cat", "dog"], ["a photo of a {}"])
    images = torch.randn(2, *baked.model.config.input_shape)
    tokens = open_clip.tokenizer.SimpleTokenizer(context_length=LENGTH)(
        ["a photo of a cat", "a photo of a dog"]
    )
    with torch.no_grad():
        torch.testing.assert_close(
            baked.model(images), theirs.get_logits(images, tokens)[0], rtol=0, atol=1e-4
        )
