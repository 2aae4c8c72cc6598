"""The vision towers of transformers' CLIP and SigLIP: same vectors, and bit-equal round trips."""

import copy
import json

import pytest
import safetensors.torch
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail as vt
from tests.support.bits import same_file
from tests.support.hf_models import agree, change_config, from_pretrained, save_pretrained
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError, FileError
from vitrail.weights.conversion import ConversionError

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, patch_size=8)
TOWER = dict(**SMALL, image_size=32)
TEXT = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=50,
    max_position_embeddings=8, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CLIP = hf.CLIPConfig(text_config=TEXT, vision_config=TOWER, projection_dim=7)
SIGLIP = hf.SiglipConfig(text_config=TEXT, vision_config=TOWER)
FIVE = {"id2label": {number: str(number) for number in range(5)}}


def pooled(model, images):
    return model(images).pooler_output


def classified(model, images):
    return model(images).logits


# The model, its config, what we compare, the family, and the number of extra tensors.
MODELS = {
    "clip": (hf.CLIPVisionModel, hf.CLIPVisionConfig(**TOWER), pooled, "hf-clip", 0),
    "clip with projection": (
        hf.CLIPVisionModelWithProjection,
        hf.CLIPVisionConfig(**TOWER, projection_dim=7, hidden_act="gelu", layer_norm_eps=1e-3),
        lambda model, images: model(images).image_embeds,
        *("hf-clip", 0),
    ),
    "clip with text": (
        hf.CLIPModel,
        CLIP,
        lambda model, images: model.visual_projection(model.vision_model(images).pooler_output),
        *("hf-clip", 22),
    ),
    "clip classifier": (
        hf.CLIPForImageClassification,
        hf.CLIPConfig(vision_config=TOWER, **FIVE),
        *(classified, "hf-clip-classifier", 2),
    ),
    "siglip": (hf.SiglipVisionModel, hf.SiglipVisionConfig(**TOWER), pooled, "hf-siglip", 0),
    "siglip that cuts": (
        hf.SiglipVisionModel,
        hf.SiglipVisionConfig(**SMALL, image_size=36, hidden_act="gelu", num_channels=1),
        *(pooled, "hf-siglip", 0),
    ),
    "siglip without its pool": (
        hf.SiglipVisionModel,
        hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        lambda model, images: model(images).last_hidden_state.mean(dim=1),
        *("hf-siglip", 0),
    ),
    "siglip with text": (
        hf.SiglipModel,
        SIGLIP,
        lambda model, images: model.vision_model(images).pooler_output,
        *("hf-siglip", 24),
    ),
    "siglip classifier": (
        hf.SiglipForImageClassification,
        hf.SiglipConfig(vision_config=TOWER, **FIVE),
        *(classified, "hf-siglip-classifier", 11),
    ),
}


def build(name):
    kind, config, read, *_ = MODELS[name]
    model = add_noise(kind(copy.deepcopy(config)))
    return model, lambda images: read(model, images)


def overrides(name):
    """What the weight file alone does not contain."""
    config = MODELS[name][1]
    config = getattr(config, "vision_config", config)
    activations = {"quick_gelu": "quick-gelu", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"}
    return dict(
        heads=4, eps=config.layer_norm_eps, activation=activations[config.hidden_act], size=config.image_size
    )


@pytest.mark.parametrize("name", MODELS)
def test_folder(name, tmp_path):
    model, theirs = build(name)
    family, extras = MODELS[name][3:]
    file = save_pretrained(model, tmp_path / "in")
    bundle = vt.load(tmp_path / "in")
    assert bundle.source.family == family
    assert len(bundle.extras) == extras
    agree(theirs, bundle)

    report = vt.convert(tmp_path / "in", tmp_path / "back.safetensors", to=family)
    assert same_file(file, tmp_path / "back.safetensors")
    if name == "siglip without its pool":  # transformers has no vector to compare with
        assert report.difference is None
        assert "pool" in report.checked_by
    else:
        assert report.difference < 1e-5, report

    bundle.save(tmp_path / "ours.safetensors")
    again = vt.load(tmp_path / "ours.safetensors")
    images = torch.randn(2, *bundle.model.config.input_shape)
    assert torch.equal(again.model(images), bundle.model(images))
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "later.safetensors", to="hf")
    assert same_file(file, tmp_path / "later.safetensors")


@pytest.mark.parametrize("outer", ["", "vision_model.", "model.vision_model."])
@pytest.mark.parametrize("name", ["clip", "siglip", "siglip without its pool"])
def test_a_tower_with_and_without_prefix(name, outer, tmp_path):
    """Files on the hub have the prefix "vision_model."; those that transformers 5 writes do not."""
    model, theirs = build(name)
    state = {outer + key: tensor for key, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "in.pt")
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    bundle = vt.load(tmp_path / "in.pt", **overrides(name))
    assert bundle.source.family == MODELS[name][3]
    agree(theirs, bundle)
    report = vt.convert(tmp_path / "in.pt", tmp_path / "back.safetensors", to="hf", **overrides(name))
    assert same_file(tmp_path / "in.safetensors", tmp_path / "back.safetensors")
    assert name == "siglip without its pool" or report.difference < 1e-5, report


def test_old_files_hold_position_ids(tmp_path):
    model, theirs = build("clip with text")
    numbers = torch.arange(17)[None]
    state = {**model.state_dict(), "vision_model.embeddings.position_ids": numbers}
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    bundle = vt.load(tmp_path / "in.safetensors", heads=4)
    assert torch.equal(bundle.extras["vision_model.embeddings.position_ids"], numbers)
    agree(theirs, bundle)
    vt.convert(tmp_path / "in.safetensors", tmp_path / "back.safetensors", to="hf", heads=4)
    assert same_file(tmp_path / "in.safetensors", tmp_path / "back.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["clip with text", "siglip with text", "siglip classifier"])
def test_half_precision_round_trips(name, dtype, tmp_path):
    file = save_pretrained(build(name)[0].to(dtype), tmp_path / "in")
    vt.load(tmp_path / "in").save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="hf")
    assert same_file(file, tmp_path / "back.safetensors")


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.sampled_from([(24, 3), (32, 2)]),
    st.integers(1, 3),
    st.sampled_from([(8, 24), (4, 16), (8, 20)]),
    st.sampled_from([1, 3]),
    st.sampled_from([1e-6, 1e-5, 1e-2]),
    st.sampled_from(["gelu", "gelu_pytorch_tanh", "quick_gelu"]),
    st.sampled_from([hf.CLIPVisionModel, hf.CLIPVisionModelWithProjection, hf.SiglipVisionModel]),
)
def test_any_tower(tmp_path_factory, widths, depth, sides, channels, eps, act, kind):
    folder = tmp_path_factory.mktemp("tower")
    config = kind.config_class(
        hidden_size=widths[0], num_attention_heads=widths[1], num_hidden_layers=depth, intermediate_size=40,
        patch_size=sides[0], image_size=sides[1], num_channels=channels, layer_norm_eps=eps, hidden_act=act,
    )  # fmt: skip
    model = add_noise(kind(config))
    file = save_pretrained(model, folder / "in")
    bundle = vt.load(folder / "in")
    vector = "image_embeds" if "Projection" in kind.__name__ else "pooler_output"
    agree(lambda images: getattr(model(images), vector), bundle)
    assert vt.convert(folder / "in", folder / "out", to="hf").difference < 1e-5
    assert same_file(file, folder / "out" / "model.safetensors")
    again = from_pretrained(kind, folder / "out")
    agree(lambda images: getattr(again(images), vector), bundle)


@pytest.mark.parametrize("name", ["clip", "siglip"])
@pytest.mark.parametrize("size", [(48, 48), (16, 40)])
def test_positions_are_resized_as_in_transformers(name, size, tmp_path):
    model, _ = build(name)
    save_pretrained(model, tmp_path / "in")
    bundle = vt.load(tmp_path / "in", size=size)
    agree(lambda images: model(images, interpolate_pos_encoding=True).pooler_output, bundle)


# ---- settings ----------------------------------------------------------------------


def test_missing_config_keys_have_transformers_defaults(tmp_path):
    """The vision_config of SigLIP B/16 on the hub has only the model_type."""
    vision = dict(num_attention_heads=12, num_hidden_layers=12, hidden_size=24, image_size=224, patch_size=56)
    model = add_noise(hf.SiglipVisionModel(hf.SiglipVisionConfig(**vision, intermediate_size=40)))
    save_pretrained(model, tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}})
    )
    bundle = vt.load(tmp_path)
    assert (bundle.model.config.heads, bundle.model.config.pixels) == (12, (224, 224))
    agree(lambda images: model(images).pooler_output, bundle, 1e-4)  # each sum is over 9408 pixels


def test_of_two_vision_configs_the_second_is_used(tmp_path):
    save_pretrained(build("clip with text")[0], tmp_path)
    change_config(tmp_path, vision_config_dict={"hidden_act": "gelu"})
    assert vt.load(tmp_path).model.config.activation == "gelu"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(vision_config=[1]), "vision_config"),
        (dict(vision_config={"hidden_act": "mish"}), "mish"),
        (dict(model_type="siglip"), "siglip"),
        (dict(model_type="altclip"), "altclip"),
    ],
)
def test_settings_are_checked(settings, named, tmp_path):
    save_pretrained(build("clip with text")[0], tmp_path)
    with pytest.raises(ConfigError, match=named):
        vt.load(change_config(tmp_path, **settings))


def test_published_preprocessing(tmp_path):
    clip, siglip = (
        save_pretrained(build("clip")[0], tmp_path / "c"),
        save_pretrained(build("siglip")[0], tmp_path / "s"),
    )
    assert vt.load(clip, heads=4).preprocess.mean[0] == 0.48145466
    assert vt.load(siglip, heads=4).preprocess.resize == "squash"


# ---- recognizing the family ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip", "clip classifier", "siglip", "siglip classifier"])
def test_a_file_matches_one_family(name, tmp_path):
    file = save_pretrained(build(name)[0], tmp_path)
    others = {family for *_, family, _ in MODELS.values()} - {MODELS[name][3]}
    for other in others | {"hf-vit", "hf-dinov2", "timm"}:
        with pytest.raises(FileError, match=f"family {other}"):
            vt.load(file, heads=4, family=other)


@pytest.mark.parametrize("name", ["clip with text", "siglip with text"])
def test_unknown_and_missing_tensors(name, tmp_path):
    file = save_pretrained(build(name)[0], tmp_path)
    state = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**state, "vision_model.prompt": torch.ones(2)}, file)
    with pytest.raises(FileError, match=r"vision_model\.prompt"):
        vt.load(tmp_path)
    del state["vision_model.post_layernorm.bias"]
    safetensors.torch.save_file(state, file)
    with pytest.raises(FileError, match=r"norm\.bias"):
        vt.load(tmp_path)


# ---- written from other models --------------------------------------------------------------

OURS = dict(width=32, depth=2, heads=2, patch=8, size=32)
AS_CLIP = dict(
    embedding_bias=False, norm_pre=True, pool_norm="after", activation="quick-gelu", head_bias=False, eps=1e-5
)
AS_SIGLIP = dict(class_token=False, pool="attention", classes=0, activation="gelu-tanh")
WRITTEN = [
    ("hf-clip", AS_CLIP | dict(classes=6)),
    ("hf-clip", AS_CLIP | dict(classes=0, head_bias=True)),
    ("hf-siglip", AS_SIGLIP),
    ("hf-siglip", AS_SIGLIP | dict(size=36, remainder="cut", rows="patches")),
    ("hf-siglip-classifier", AS_SIGLIP | dict(pool="mean", classes=5)),
]


def fresh(path, **fields):
    vt.Bundle(model=add_noise(vt.ViT(vt.ViTConfig(**OURS | fields)))).save(path)
    return path


@pytest.mark.parametrize(("family", "fields"), WRITTEN)
def test_new_models_are_written(family, fields, tmp_path):
    path = fresh(tmp_path / "ours.safetensors", **fields)
    report = vt.convert(path, tmp_path / "out", to="hf")
    assert report.target == family
    assert report.difference < 1e-5, report
    bundle = vt.load(path)
    name = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0]
    model = from_pretrained(getattr(hf, name), tmp_path / "out")
    vector = {"CLIPVisionModelWithProjection": "image_embeds", "SiglipForImageClassification": "logits"}
    agree(lambda images: getattr(model(images), vector.get(name, "pooler_output")), bundle)
    back = vt.load(tmp_path / "out")
    assert back.source.family == family
    agree(back.model, bundle)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("hf-clip", AS_CLIP | dict(head_bias=True, classes=6), "projection has no bias"),
        ("hf-clip", AS_CLIP | dict(embedding_bias=True), "embedding_bias"),
        ("hf-clip", AS_CLIP | dict(norm_pre=False), "norm_pre"),
        ("hf-clip", AS_CLIP | dict(pool_norm="before"), "pool_norm"),
        ("hf-clip", AS_CLIP | dict(size=(32, 16)), "square"),
        ("hf-clip", AS_CLIP | dict(patch=(8, 4)), "square"),
        ("hf-clip", AS_CLIP | dict(qkv_bias="none"), "qkv_bias"),
        ("hf-clip", AS_CLIP | dict(layer_scale=0.1), "layer scale"),
        ("hf-siglip", AS_SIGLIP | dict(classes=3), "no classes"),
        ("hf-siglip", AS_SIGLIP | dict(class_token=True), "class_token"),
        ("hf-siglip", AS_SIGLIP | dict(pool="mean"), "pool"),
        ("hf-siglip", AS_SIGLIP | dict(layer_scale=0.1), "layer scale"),
        ("hf-siglip-classifier", AS_SIGLIP | dict(classes=3), "pool"),
        ("hf-siglip-classifier", AS_SIGLIP | dict(pool="mean", size=(16, 32), classes=3), "square"),
    ],
)
def test_unsupported_models_are_refused(family, fields, reason, tmp_path):
    path = fresh(tmp_path / "ours.safetensors", **fields)
    with pytest.raises(ConversionError, match=reason):
        vt.convert(path, tmp_path / "out", to=family)
    assert not (tmp_path / "out").exists()


def test_clip_classifiers_are_only_written_back(tmp_path):
    path = fresh(tmp_path / "ours.safetensors", **AS_CLIP | dict(classes=6))
    with pytest.raises(ConfigError, match="not a family that can be written"):
        vt.convert(path, tmp_path / "out", to="hf-clip-classifier")
