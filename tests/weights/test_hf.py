"""transformers' ViT, DeiT, DINOv2 and ViT-MAE: same logits, and bit-equal round trips."""

import copy
import json

import pytest
import safetensors.torch
import timm
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

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
SMALL = dict(**SIZES, intermediate_size=48)
DECODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
REGISTERS = dict(num_register_tokens=3)


def class_token(output):
    return output.last_hidden_state[:, 0]


def logits(output):
    return output.logits


# The model, its config, what we compare, the family, and the number of extra tensors.
MODELS = {
    "vit": (hf.ViTForImageClassification, hf.ViTConfig(**SMALL, num_labels=5), logits, "hf-vit", 0),
    "vit without bias": (
        hf.ViTForImageClassification,
        hf.ViTConfig(**SMALL, num_labels=5, qkv_bias=False, layer_norm_eps=1e-3, hidden_act="quick_gelu"),
        *(logits, "hf-vit", 0),
    ),
    "vit rectangular": (
        hf.ViTForImageClassification,
        hf.ViTConfig(**SMALL | dict(image_size=[16, 64], patch_size=[4, 8], num_channels=2), num_labels=3),
        *(logits, "hf-vit", 0),
    ),
    "vit that cuts": (
        hf.ViTForImageClassification,
        hf.ViTConfig(**SMALL | dict(image_size=38), num_labels=3),
        *(logits, "hf-vit", 0),
    ),
    "vit bare": (hf.ViTModel, hf.ViTConfig(**SMALL), class_token, "hf-vit", 2),
    "vit masked": (hf.ViTForMaskedImageModeling, hf.ViTConfig(**SMALL, encoder_stride=8), None, "hf-vit", 3),
    "deit": (hf.DeiTForImageClassification, hf.DeiTConfig(**SMALL, num_labels=5), logits, "hf-deit", 0),
    "deit with teacher": (
        hf.DeiTForImageClassificationWithTeacher,
        hf.DeiTConfig(**SMALL, num_labels=5),
        *(logits, "hf-deit", 0),
    ),
    "deit bare": (hf.DeiTModel, hf.DeiTConfig(**SMALL), class_token, "hf-deit", 2),
    "dinov2": (
        hf.Dinov2ForImageClassification,
        hf.Dinov2Config(**SIZES, num_labels=5),
        *(logits, "hf-dinov2", 1),
    ),
    "dinov2 swiglu": (
        hf.Dinov2ForImageClassification,
        hf.Dinov2Config(**SIZES, num_labels=5, use_swiglu_ffn=True, use_mask_token=False),
        *(logits, "hf-dinov2", 0),
    ),
    "dinov2 without classes": (
        hf.Dinov2ForImageClassification,
        hf.Dinov2Config(**SIZES, num_labels=0),
        *(logits, "hf-dinov2", 1),
    ),
    "dinov2 bare": (hf.Dinov2Model, hf.Dinov2Config(**SIZES, mlp_ratio=2), class_token, "hf-dinov2", 1),
    "registers": (
        hf.Dinov2WithRegistersForImageClassification,
        hf.Dinov2WithRegistersConfig(**SIZES, **REGISTERS, num_labels=5, use_swiglu_ffn=True),
        *(logits, "hf-dinov2-registers", 1),
    ),
    "registers bare": (
        hf.Dinov2WithRegistersModel,
        hf.Dinov2WithRegistersConfig(**SIZES, **REGISTERS),
        *(class_token, "hf-dinov2-registers", 1),
    ),
    "mae": (hf.ViTMAEModel, hf.ViTMAEConfig(**SMALL, mask_ratio=0.0), class_token, "hf-mae", 0),
    "mae with decoder": (
        hf.ViTMAEForPreTraining,
        hf.ViTMAEConfig(**SMALL, mask_ratio=0.0, **{f"decoder_{key}": n for key, n in DECODER.items()}),
        *(None, "hf-mae", 24),
    ),
}


def build(name):
    kind, config, read, *_ = MODELS[name]
    model = add_noise(kind(copy.deepcopy(config)))
    encoder = model if read else model.vit  # the pretraining head is not part of our model
    return model, lambda images: (read or class_token)(encoder(images))


def overrides(name):
    """What the weight file alone does not contain."""
    config = MODELS[name][1]
    fields = {"heads": 4, "eps": config.layer_norm_eps}
    if config.hidden_act == "quick_gelu":
        fields["activation"] = "quick-gelu"
    if name == "dinov2 without classes":
        fields["pool"] = "class-mean"
    size = config.image_size
    return fields | {"size": tuple(size) if isinstance(size, list) else size}


@pytest.mark.parametrize("name", MODELS)
def test_folder(name, tmp_path):
    """The usual case: the settings have everything, and every tensor is written back."""
    model, theirs = build(name)
    family, extras = MODELS[name][3:]
    file = save_pretrained(model, tmp_path / "in")
    bundle = vt.load(tmp_path / "in")
    assert bundle.source.family == family
    assert len(bundle.extras) == extras
    assert not any("heads" in note for note in bundle.notes)
    agree(theirs, bundle)

    report = vt.convert(tmp_path / "in", tmp_path / "back.safetensors", to=family)
    assert same_file(file, tmp_path / "back.safetensors")
    assert report.difference < 1e-5, report

    bundle.save(tmp_path / "ours.safetensors")
    again = vt.load(tmp_path / "ours.safetensors")
    images = torch.randn(2, *bundle.model.config.input_shape)
    assert torch.equal(again.model(images), bundle.model(images))
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "later.safetensors", to="hf")
    assert same_file(file, tmp_path / "later.safetensors")


@pytest.mark.parametrize(
    ("name", "outer"),
    [(name, "") for name in MODELS if name != "mae"]  # which is a ViT without its config.json
    + [
        (name, "module.")
        for name in ("vit", "vit bare", "deit with teacher", "registers", "mae with decoder")
    ],
)
def test_state_dict(name, outer, tmp_path):
    """The in-memory names of transformers 5, in a torch.save file without settings."""
    model, theirs = build(name)
    state = {outer + key: tensor for key, tensor in model.state_dict().items()}
    assert not any("attention.attention.query" in key for key in state)
    torch.save(state, tmp_path / "in.pt")
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    bundle = vt.load(tmp_path / "in.pt", **overrides(name))
    assert bundle.source.family == MODELS[name][3]
    agree(theirs, bundle)
    report = vt.convert(tmp_path / "in.pt", tmp_path / "back.safetensors", to="hf", **overrides(name))
    assert same_file(tmp_path / "in.safetensors", tmp_path / "back.safetensors")
    assert report.difference < 1e-5, report


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["vit bare", "deit with teacher", "dinov2 swiglu", "registers"])
def test_half_precision_round_trips(name, dtype, tmp_path):
    model, theirs = build(name)
    file = save_pretrained(model.to(dtype), tmp_path / "in")
    vt.load(tmp_path / "in").save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="hf")
    assert same_file(file, tmp_path / "back.safetensors")
    model.float()
    agree(theirs, vt.load(tmp_path / "in"))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.sampled_from([(24, 3), (32, 2)]),
    st.integers(1, 3),
    st.sampled_from([(8, 24), (4, [8, 16]), ([4, 8], [12, 32]), (8, 20)]),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.sampled_from([1e-12, 1e-5, 1e-2]),
    st.sampled_from(["gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"]),
    st.sampled_from([hf.ViTForImageClassification, hf.DeiTForImageClassificationWithTeacher]),
)
def test_any_vit(tmp_path_factory, widths, depth, sides, channels, bias, eps, act, kind):
    folder = tmp_path_factory.mktemp("vit")
    config = kind.config_class(
        hidden_size=widths[0], num_attention_heads=widths[1], num_hidden_layers=depth, intermediate_size=40,
        patch_size=sides[0], image_size=sides[1], num_channels=channels, qkv_bias=bias, layer_norm_eps=eps,
        hidden_act=act, num_labels=4,
    )  # fmt: skip
    model = add_noise(kind(config))
    file = save_pretrained(model, folder / "in")
    bundle = vt.load(folder / "in")
    agree(lambda images: model(images).logits, bundle)
    assert bundle.model.config.eps == eps
    report = vt.convert(folder / "in", folder / "out", to="hf")
    assert same_file(file, folder / "out" / "model.safetensors")
    assert report.difference < 1e-5
    auto = hf.AutoModelForImageClassification if "Teacher" not in kind.__name__ else kind
    agree(lambda images: from_pretrained(auto, folder / "out")(images).logits, bundle)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.sampled_from([(24, 3), (32, 2)]),
    st.integers(1, 2),
    st.sampled_from([(8, 24), (4, 16), ([4, 8], 16), (8, 20)]),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from([0, 4]),
)
def test_any_dinov2(tmp_path_factory, widths, depth, sides, ratio, gated, bias, registers, classes):
    folder = tmp_path_factory.mktemp("dino")
    more = dict(num_register_tokens=registers) if registers else {}
    head = "ForImageClassification" if classes else "Model"
    kind = getattr(hf, f"Dinov2{'WithRegisters' if registers else ''}{head}")
    config = kind.config_class(
        hidden_size=widths[0], num_attention_heads=widths[1], num_hidden_layers=depth, mlp_ratio=ratio,
        use_swiglu_ffn=gated, patch_size=sides[0], image_size=sides[1], qkv_bias=bias, num_labels=classes,
        **more,
    )  # fmt: skip
    model = add_noise(kind(config))
    file = save_pretrained(model, folder / "in")
    bundle = vt.load(folder / "in")
    read = logits if classes else class_token
    agree(lambda images: read(model(images)), bundle)
    report = vt.convert(folder / "in", folder / "out", to="hf")
    assert same_file(file, folder / "out" / "model.safetensors")
    assert report.difference < 1e-5
    agree(lambda images: read(from_pretrained(kind, folder / "out")(images)), bundle)


# ---- other sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "deit with teacher", "dinov2", "registers"])
@pytest.mark.parametrize("size", [(48, 48), (16, 40)])
def test_positions_are_resized_as_in_transformers(name, size, tmp_path):
    model, _ = build(name)
    save_pretrained(model, tmp_path / "in")
    bundle = vt.load(tmp_path / "in", size=size)
    assert bundle.model.config.pixels == size
    how = {} if "din" in model.base_model_prefix else {"interpolate_pos_encoding": True}
    agree(lambda images: model(images, **how).logits, bundle)


def test_the_settings_determine_the_grid_of_the_positions(tmp_path):
    """16 rows are 4 x 4 or 2 x 8: with a config.json, positions are resized to 2 x 8."""
    model, _ = build("vit")
    file = save_pretrained(model, tmp_path / "in")
    assert any("resized" in note for note in vt.load(tmp_path / "in", size=(16, 64)).notes)
    assert not any("resized" in note for note in vt.load(file, heads=4, size=(16, 64)).notes)
    rectangular, _ = build("vit rectangular")
    save_pretrained(rectangular, tmp_path / "rectangular")
    assert vt.load(tmp_path / "rectangular", size=(16, 16)).model.config.grid == (4, 2)


# ---- settings ----------------------------------------------------------------------


def test_missing_config_keys_have_transformers_defaults(tmp_path):
    config = hf.ViTConfig(**SMALL | dict(hidden_size=24, num_attention_heads=12, num_hidden_layers=12))
    model = add_noise(hf.ViTForImageClassification(config))
    save_pretrained(model, tmp_path)
    missing = ["num_attention_heads", "num_hidden_layers", "layer_norm_eps", "hidden_act", "image_size"]
    change_config(tmp_path, **dict.fromkeys(missing, ...))
    bundle = vt.load(tmp_path)
    assert bundle.model.config.heads == 12  # 64, the usual width of a head, does not divide 24
    agree(lambda images: model(images).logits, bundle)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(hidden_act="mish"), "mish"),
        (dict(hidden_act=["gelu"]), "hidden_act"),
        (dict(hidden_act={"module": "os", "call": "system"}), "hidden_act"),
        (dict(model_type="beit"), "beit"),
        (dict(model_type=["vit"]), "model_type"),
        (dict(num_attention_heads="4"), "num_attention_heads"),
        (dict(num_attention_heads=0), "num_attention_heads"),
        (dict(num_attention_heads=5), "heads=5"),
        (dict(num_hidden_layers=True), "num_hidden_layers"),
        (dict(num_hidden_layers=3), "2 blocks"),
        (dict(image_size="32"), "image_size"),
        (dict(image_size=[32, 32, 32]), "size"),
        (dict(layer_norm_eps=0), "eps"),
        (dict(layer_norm_eps="1e-12"), "eps"),
    ],
)
def test_settings_are_checked(settings, named, tmp_path):
    save_pretrained(build("vit")[0], tmp_path)
    with pytest.raises((ConfigError, FileError), match=named):
        vt.load(change_config(tmp_path, **settings))


def test_settings_without_a_model_type_are_ignored(tmp_path):
    save_pretrained(build("vit")[0], tmp_path)
    change_config(tmp_path, model_type=..., hidden_act="relu")
    with pytest.raises(ConfigError, match="number of heads"):
        vt.load(tmp_path)
    assert vt.load(tmp_path, heads=4).model.config.activation == "gelu"


def test_given_fields_override_the_settings(tmp_path):
    save_pretrained(build("vit")[0], tmp_path)
    config = vt.load(tmp_path, heads=2, eps=1e-5, activation="relu").model.config
    assert (config.heads, config.eps, config.activation) == (2, 1e-5, "relu")


def test_swiglu_always_has_silu(tmp_path):
    save_pretrained(build("registers")[0], tmp_path)
    change_config(tmp_path, hidden_act="relu")
    assert vt.load(tmp_path).model.config.activation == "silu"


def test_labels_and_preprocessing_are_converted(tmp_path):
    model, _ = build("vit")
    names = ["ant", "bee", "cat", "dog", "eel"]
    model.config.id2label = dict(enumerate(names))
    save_pretrained(model, tmp_path / "in")
    hf.ViTImageProcessor(size={"height": 32, "width": 32}, resample=3).save_pretrained(tmp_path / "in")
    bundle = vt.load(tmp_path / "in")
    assert bundle.labels == names
    assert bundle.preprocess.interpolation == "bicubic"
    vt.convert(tmp_path / "in", tmp_path / "out", to="hf")
    again = vt.load(tmp_path / "out")
    assert again.labels == names
    assert again.preprocess == bundle.preprocess
    assert from_pretrained(hf.AutoModelForImageClassification, tmp_path / "out").config.id2label[3] == "dog"


def test_default_labels_are_not_labels(tmp_path):
    save_pretrained(build("vit")[0], tmp_path)
    assert "LABEL_4" in (tmp_path / "config.json").read_text()
    assert vt.load(tmp_path).labels is None


def test_msn_is_a_vit(tmp_path):
    config = hf.ViTMSNConfig(**SMALL, num_labels=5)
    model = add_noise(hf.ViTMSNForImageClassification(config))
    config.save_pretrained(tmp_path)  # the model's save_pretrained omits "vit." in half of the names
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    bundle = vt.load(change_config(tmp_path, layer_norm_eps=...))
    assert bundle.model.config.eps == 1e-6
    agree(lambda images: model(images).logits, bundle)


# ---- recognizing the family ---------------------------------------------------------------------


def test_the_settings_distinguish_vit_and_mae(tmp_path):
    file = save_pretrained(build("mae")[0], tmp_path)
    assert vt.load(tmp_path).source.family == "hf-mae"
    assert vt.load(tmp_path).preprocess.mean == (0.485, 0.456, 0.406)
    assert vt.load(file, heads=4).source.family == "hf-vit"
    assert vt.load(file, heads=4, family="hf-mae").source.family == "hf-mae"


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2", "registers", "mae with decoder"])
def test_a_file_matches_one_family(name, tmp_path):
    file = save_pretrained(build(name)[0], tmp_path)
    mine = MODELS[name][3]
    with pytest.raises(FileError, match="family timm"):
        vt.load(file, heads=4, family="timm")
    for other in {family for *_, family, _ in MODELS.values()} - {mine, "hf-mae"}:
        with pytest.raises(FileError, match=f"family {other}"):
            vt.load(file, heads=4, family=other)


def test_timm_is_not_mistaken_for_transformers(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "in.safetensors")
    with pytest.raises(FileError, match="family hf"):
        vt.load(tmp_path / "in.safetensors", family="hf")


def change_tensors(file, key=None, **more):
    state = safetensors.torch.load_file(file)
    state.pop(key, None)
    safetensors.torch.save_file({**state, **more}, file)
    return file


def test_unknown_tensors_are_named(tmp_path):
    file = change_tensors(save_pretrained(build("vit")[0], tmp_path), None, **{"vit.detector": torch.ones(3)})
    with pytest.raises(FileError, match=r"vit\.detector"):
        vt.load(file, heads=4)


def test_two_spellings_of_one_tensor(tmp_path):
    """It is not possible to know which one is meant."""
    more = {"vit.layers.1.mlp.fc1.bias": torch.ones(48)}
    file = change_tensors(save_pretrained(build("vit")[0], tmp_path), None, **more)
    with pytest.raises(FileError, match=r"mlp\.fc1\.bias|intermediate\.dense\.bias"):
        vt.load(file, heads=4)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("vit.encoder.layer.1.attention.attention.key.weight", "attention.query.weight"),
        ("vit.encoder.layer.1.output.dense.bias", "blocks.1.mlp.fc2.bias"),
        ("vit.layernorm.weight", "norm.weight"),
        ("classifier.bias", "head_bias|head.bias"),
    ],
)
def test_missing_tensors_are_named(missing, named, tmp_path):
    file = change_tensors(save_pretrained(build("vit")[0], tmp_path), missing)
    if missing == "classifier.bias":  # that is a head without a bias
        assert not vt.load(file, heads=4).model.config.head_bias
        return
    with pytest.raises(FileError, match=named.replace(".", r"\.")):
        vt.load(file, heads=4)


# ---- written from other models --------------------------------------------------------------

OURS = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=5)
DINO = dict(layer_scale=0.5, pool="class-mean", activation="gelu")
WRITTEN = {
    "hf-vit": [
        {},
        dict(classes=0),
        dict(eps=1e-3, qkv_bias="none", activation="gelu-tanh", mlp_width=40),
        dict(size=(16, 48), patch=(4, 8), channels=1),
        dict(size=36, remainder="cut"),
        dict(head_width=8),
        dict(rows="class"),
    ],
    "hf-deit": [dict(distillation_token=True), dict(distillation_token=True, head="distilled")],
    "hf-dinov2": [
        DINO,
        DINO | dict(classes=0),
        DINO | dict(mlp="gated", mlp_width=88, activation="silu"),
        dict(layer_scale=0.5, classes=0, head_width=8, qkv_bias="none"),
    ],
    "hf-dinov2-registers": [
        DINO | dict(registers=3, rows="class"),
        dict(
            layer_scale=0.5,
            classes=0,
            registers=1,
            rows="class",
            mlp="gated",
            mlp_width=88,
            activation="silu",
        ),
    ],
}


def fresh(path, **fields):
    vt.Bundle(model=add_noise(vt.ViT(vt.ViTConfig(**OURS | fields)))).save(path)
    return path


@pytest.mark.parametrize(("family", "fields"), [(name, one) for name in WRITTEN for one in WRITTEN[name]])
def test_new_models_are_written(family, fields, tmp_path):
    path = fresh(tmp_path / "ours.safetensors", **fields)
    report = vt.convert(path, tmp_path / "out", to="hf")
    assert report.target == family
    assert report.difference < 1e-5, report
    bundle = vt.load(path)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    model = from_pretrained(getattr(hf, settings["architectures"][0]), tmp_path / "out")
    read = logits if "Classification" in type(model).__name__ else class_token
    agree(lambda images: read(model(images)), bundle)
    back = vt.load(tmp_path / "out")
    assert back.source.family == family
    agree(back.model, bundle)


@pytest.mark.parametrize("distilled", [False, True])
def test_from_timm(distilled, tmp_path):
    name = "deit_tiny_distilled_patch16_224" if distilled else "vit_tiny_patch16_224"
    small = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    theirs = add_noise(timm.create_model(name, **small))
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "in.safetensors")
    report = vt.convert(tmp_path / "in.safetensors", tmp_path / "out", to="hf", heads=2)
    assert report.target == ("hf-deit" if distilled else "hf-vit")
    assert report.difference < 1e-5
    kind = hf.DeiTForImageClassificationWithTeacher if distilled else hf.AutoModelForImageClassification
    model = from_pretrained(kind, tmp_path / "out")
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert (model(images).logits - theirs(images)).abs().max() < 1e-5
    # timm rounds the start of a crop to even, transformers rounds it down.
    assert any("crop_rounding" in note for note in report.notes)


def test_to_timm(tmp_path):
    """They differ only in eps, and in how remaining pixels are treated."""
    config = hf.ViTConfig(**SMALL, num_labels=5, layer_norm_eps=1e-6)
    save_pretrained(add_noise(hf.ViTForImageClassification(config)), tmp_path / "in")
    report = vt.convert(tmp_path / "in", tmp_path / "out.safetensors", to="timm")
    assert report.difference < 1e-5
    change_config(tmp_path / "in", image_size=36)
    with pytest.raises(ConversionError, match="remainder"):
        vt.convert(tmp_path / "in", tmp_path / "other.safetensors", to="timm")


def test_a_new_head_is_written_back(tmp_path):
    save_pretrained(build("vit bare")[0], tmp_path / "in")
    report = vt.convert(tmp_path / "in", tmp_path / "out.safetensors", to="hf", classes=7)
    state = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert state["classifier.weight"].shape == (7, 32)
    assert "pooler.dense.weight" in state
    assert report.difference < 1e-5


def test_mae_is_only_written_back(tmp_path):
    path = fresh(tmp_path / "ours.safetensors", classes=0)
    with pytest.raises(ConfigError, match="not a family that can be written"):
        vt.convert(path, tmp_path / "out", to="hf-mae")
    save_pretrained(build("mae")[0], tmp_path / "in")
    with pytest.raises(ConfigError, match="written as one file"):
        vt.convert(tmp_path / "in", tmp_path / "out", to="hf-mae")


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("hf-vit", dict(layer_scale=0.1), "no layer scale"),
        ("hf-vit", dict(registers=2), "registers is 0"),
        ("hf-vit", dict(pool="mean"), "pool is .class. there"),
        ("hf-vit", dict(norm_pre=True), "norm_pre"),
        ("hf-vit", dict(block="parallel"), "block"),
        ("hf-vit", dict(qk_norm=True), "qk_norm"),
        ("hf-vit", dict(mlp="gated"), "mlp"),
        ("hf-vit", dict(qkv_bias="no-k"), "qkv_bias"),
        ("hf-vit", dict(embedding_bias=False), "embedding_bias"),
        ("hf-vit", dict(position="sincos2d"), "position"),
        ("hf-vit", dict(head="tanh"), "head is"),
        ("hf-vit", dict(distillation_token=True), "distillation_token"),
        ("hf-vit", dict(scale=0.5), "scale"),
        ("hf-deit", {}, "distillation_token"),
        ("hf-deit", dict(distillation_token=True, layer_scale=0.1), "no layer scale"),
        ("hf-dinov2", DINO | dict(layer_scale=None), "always have a layer scale"),
        ("hf-dinov2", DINO | dict(pool="class"), "concatenated"),
        ("hf-dinov2", DINO | dict(size=(16, 32)), "square"),
        ("hf-dinov2", DINO | dict(mlp_width=40), "mlp_ratio, and 40"),
        ("hf-dinov2", DINO | dict(mlp="gated", mlp_width=80, activation="silu"), "mlp_ratio, and 80"),
        ("hf-dinov2", DINO | dict(mlp="gated", mlp_width=88, activation="gelu"), "gated MLP always has silu"),
        ("hf-dinov2", DINO | dict(registers=2, rows="class"), "registers is 0"),
        ("hf-dinov2-registers", DINO | dict(rows="class"), "at least one register"),
        ("hf-dinov2-registers", DINO | dict(registers=2, rows="all"), "rows"),
    ],
)
def test_unsupported_models_are_refused(family, fields, reason, tmp_path):
    path = fresh(tmp_path / "ours.safetensors", **fields)
    with pytest.raises(ConversionError, match=reason):
        vt.convert(path, tmp_path / "out", to=family)
    assert not (tmp_path / "out").exists()
