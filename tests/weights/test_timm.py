"""timm, DeiT, DeiT III, MAE and DINOv2: same logits, and bit-equal round trips."""

from functools import partial

import pytest
import safetensors.torch
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitrail as vt
from tests.support.bits import same_file
from tests.support.models import add_noise
from vitrail.weights.conversion import ConversionError
from vitrail.weights.load import describe
from vitrail.weights.readers.folder import open_model

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SILU = dict(act_layer=nn.SiLU)

# Arguments of timm's constructor, and fields that a file does not show.
MODELS = {
    "plain": ({}, {}),
    "no head": (dict(num_classes=0), {}),
    "mean": (dict(global_pool="avg"), {}),
    "mean, no class token": (dict(global_pool="avg", class_token=False), {}),
    "mean before norm": (dict(global_pool="avg", fc_norm=False), dict(pool="mean")),
    "mean of all": (dict(global_pool="avg", pool_include_prefix=True), dict(pool="mean-all")),
    "attention pool": (dict(global_pool="map", class_token=False), {}),
    "attention pool with registers": (dict(global_pool="map", class_token=False, reg_tokens=3), {}),
    "attention pool with class token": (dict(global_pool="map"), {}),
    "registers": (dict(reg_tokens=4), {}),
    "registers without rows": (dict(reg_tokens=4, no_embed_class=True), dict(rows="patches")),
    "layer scale": (dict(init_values=1e-5), {}),
    "qk norm": (dict(qk_norm=True), {}),
    "norm before": (dict(pre_norm=True), {}),
    "no last norm": (dict(final_norm=False), {}),
    "no qkv bias": (dict(qkv_bias=False), {}),
    "swiglu packed": (dict(mlp_layer=SwiGLUPacked, **SILU), {}),
    "swiglu not packed": (dict(mlp_layer=SwiGLU, **SILU), {}),
    "gelu tanh": (dict(act_layer="gelu_tanh"), dict(activation="gelu-tanh")),
    "another eps": (dict(norm_layer=partial(nn.LayerNorm, eps=1e-3)), dict(eps=1e-3)),
    "five channels": (dict(in_chans=5), {}),
    "rectangular": (dict(img_size=(16, 48), patch_size=(4, 8)), dict(size=(16, 48))),
    "odd mlp": (dict(mlp_ratio=2.65625), {}),
}


def saved(model, path, dtype=torch.float32):
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, path)
    return path


def agree(theirs, bundle, tolerance=1e-5):
    images = torch.randn(3, *bundle.model.config.input_shape)
    with torch.no_grad():
        expected, logits = theirs(images), bundle.model(images)
    assert expected.shape == logits.shape
    assert expected.abs().max() > 0.05
    assert (expected - logits).abs().max() < tolerance


@pytest.mark.parametrize(("arguments", "overrides"), MODELS.values(), ids=MODELS)
def test_logits_and_round_trip(arguments, overrides, tmp_path):
    theirs = add_noise(VisionTransformer(**SMALL | arguments))
    path = saved(theirs, tmp_path / "in.safetensors")
    bundle = vt.load(path, heads=2, **overrides)
    agree(theirs, bundle)

    vt.convert(path, tmp_path / "back.safetensors", to="timm", heads=2, **overrides)
    assert same_file(path, tmp_path / "back.safetensors")

    bundle.save(tmp_path / "ours.safetensors")
    again = vt.load(tmp_path / "ours.safetensors")
    images = torch.randn(2, *bundle.model.config.input_shape)
    assert torch.equal(again.model(images), bundle.model(images))
    assert again.model.config == bundle.model.config
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "later.safetensors", to="timm")
    assert same_file(path, tmp_path / "later.safetensors")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sampled_from([(24, 3), (32, 2), (64, 4)]),
    st.integers(1, 3),
    st.sampled_from([(8, 24), (4, 16), ((4, 8), (12, 32))]),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_mixture(tmp_path_factory, widths, depth, sides, registers, scaled, bare, dtype):
    folder = tmp_path_factory.mktemp("mixture")
    patch, size = sides
    theirs = VisionTransformer(
        size, patch, embed_dim=widths[0], num_heads=widths[1], depth=depth, reg_tokens=registers,
        init_values=0.1 if scaled else None, qkv_bias=not bare, num_classes=3,
    )  # fmt: skip
    theirs = add_noise(theirs).to(dtype)  # the values the file can hold
    path = saved(theirs, folder / "in.safetensors", dtype)
    bundle = vt.load(path, heads=widths[1], size=size)
    assert bundle.model.config.pixels == (size if isinstance(size, tuple) else (size, size))
    agree(theirs.float(), bundle)
    report = vt.convert(path, folder / "back.safetensors", to="timm", heads=widths[1], size=size)
    assert report.difference < 1e-5
    assert same_file(path, folder / "back.safetensors")


def test_distilled(tmp_path):
    theirs = add_noise(VisionTransformerDistilled(**SMALL))
    path = saved(theirs, tmp_path / "in.safetensors")
    bundle = vt.load(path, heads=2)
    assert bundle.model.config.head == "distilled"
    agree(theirs, bundle)
    assert vt.convert(path, tmp_path / "back.safetensors", to="timm", heads=2).difference < 1e-5
    assert same_file(path, tmp_path / "back.safetensors")


def test_deit_as_published_is_a_wrapped_pickle(tmp_path):
    theirs = add_noise(VisionTransformer(**SMALL))
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "deit.pth")
    bundle = vt.load(tmp_path / "deit.pth", heads=2)
    assert bundle.source.family == "deit"
    assert bundle.preprocess.mean == (0.485, 0.456, 0.406)
    agree(theirs, bundle)
    vt.convert(tmp_path / "deit.pth", tmp_path / "back.safetensors", to="deit", heads=2)
    assert same_file(saved(theirs, tmp_path / "as.safetensors"), tmp_path / "back.safetensors")


def test_deit_three_as_published(tmp_path):
    """gamma_1 and gamma_2, and no position row for the class token."""
    theirs = add_noise(VisionTransformer(**SMALL, init_values=1e-5, no_embed_class=True))
    state = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor
        for name, tensor in theirs.state_dict().items()
    }
    torch.save({"model": state}, tmp_path / "deit3.pth")
    bundle = vt.load(tmp_path / "deit3.pth", heads=2)
    assert bundle.model.config.rows == "patches"
    agree(theirs, bundle)
    vt.convert(tmp_path / "deit3.pth", tmp_path / "back.safetensors", to="deit", heads=2)
    safetensors.torch.save_file(state, tmp_path / "as.safetensors")
    assert same_file(tmp_path / "as.safetensors", tmp_path / "back.safetensors")


def test_the_decoder_of_mae_is_kept(tmp_path):
    theirs = add_noise(VisionTransformer(**SMALL | dict(num_classes=0)))
    more = {"mask_token": torch.randn(1, 1, 16), "decoder_pred.weight": torch.randn(192, 16)}
    torch.save({"model": {**theirs.state_dict(), **more}}, tmp_path / "mae.pth")
    bundle = vt.load(tmp_path / "mae.pth", heads=2)
    assert set(bundle.extras) == set(more)
    agree(theirs, bundle)
    report = vt.convert(tmp_path / "mae.pth", tmp_path / "back.safetensors", to="deit", heads=2)
    assert set(report.extras) == set(more)
    back = safetensors.torch.load_file(tmp_path / "back.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in more.items())


class DINOv2(VisionTransformer):
    """DINOv2 inserts registers after adding positions, which only the class token and the patches have."""

    def _pos_embed(self, x):
        classes = self.cls_token.expand(len(x), -1, -1)
        x = torch.cat([classes, x], dim=1) + self.rows
        return torch.cat([x[:, :1], self.registers.expand(len(x), -1, -1), x[:, 1:]], dim=1)


def dinov2(registers=0, chunked=False, gated=False):
    """A DINOv2, and its tensors under the names as first published."""
    mlp = dict(mlp_layer=SwiGLUPacked, **SILU) if gated else {}
    theirs = DINOv2(**SMALL | dict(depth=4, num_classes=0, init_values=1e-5), **mlp)
    theirs.rows = nn.Parameter(torch.randn(1, 17, 32))
    theirs.registers = nn.Parameter(torch.randn(1, registers, 32))
    theirs = add_noise(theirs)
    state = theirs.state_dict()
    del state["pos_embed"]
    state["pos_embed"], state["register_tokens"] = state.pop("rows"), state.pop("registers")
    if not registers:
        del state["register_tokens"]
    state["mask_token"] = torch.randn(1, 32)
    if gated:
        state = {n.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): t for n, t in state.items()}
    if chunked:  # two chunks of two blocks; the second index does not restart
        state = {
            f"blocks.{int(n.split('.')[1]) // 2}.{n[7:]}" if n.startswith("blocks.") else n: t
            for n, t in state.items()
        }
    return theirs, state


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_dinov2_as_published(registers, chunked, gated, tmp_path):
    theirs, state = dinov2(registers, chunked, gated)
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    bundle = vt.load(tmp_path / "in.safetensors", heads=2)
    assert bundle.source.family == ("dinov2-registers" if registers else "dinov2")
    assert bundle.model.config.registers == registers
    assert list(bundle.extras) == ["mask_token"]
    agree(theirs, bundle)
    vt.convert(tmp_path / "in.safetensors", tmp_path / "back.safetensors", to="dinov2", heads=2)
    assert same_file(tmp_path / "in.safetensors", tmp_path / "back.safetensors")


@pytest.mark.parametrize("wrapper", ["module.", "model.backbone.", "visual.trunk."])
def test_prefixed_names(wrapper, tmp_path):
    theirs = add_noise(VisionTransformer(**SMALL))
    state = {wrapper + name: tensor for name, tensor in theirs.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    agree(theirs, vt.load(tmp_path / "in.safetensors", heads=2))
    vt.convert(tmp_path / "in.safetensors", tmp_path / "back.safetensors", to="timm", heads=2)
    assert same_file(tmp_path / "in.safetensors", tmp_path / "back.safetensors")


# ---- written from other models -----------------------------------------------------------

OURS = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=5)
WRITTEN = [
    {},
    dict(pool="mean", pool_norm="after"),
    dict(pool="mean", class_token=False, pool_norm="before"),
    dict(pool="mean-all", registers=2),
    dict(pool="attention", class_token=False),
    dict(registers=3, rows="patches", layer_scale=0.1),
    dict(mlp="gated", activation="silu", mlp_width=40),
    dict(norm_pre=True, embedding_bias=False, qk_norm=True, qkv_bias="none"),
    dict(head="distilled", distillation_token=True),
    dict(activation="quick-gelu", size=(16, 40), channels=1, mlp_width=85),
    dict(position="none", classes=0),
]


@pytest.mark.parametrize("fields", WRITTEN, ids=range(len(WRITTEN)))
def test_timm_loads_our_files(fields, tmp_path):
    config = vt.ViTConfig(**OURS | fields)
    vt.Bundle(model=add_noise(vt.ViT(config))).save(tmp_path / "ours.safetensors")
    report = vt.convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="timm")
    assert report.difference < 1e-5  # timm's own model, strictly loaded
    assert report.checked_by == "timm itself, on the golden inputs"


@pytest.mark.parametrize("fields", [WRITTEN[0], WRITTEN[5], WRITTEN[8], WRITTEN[9]], ids=range(4))
def test_timm_loads_our_folders(fields, tmp_path):
    model = add_noise(vt.ViT(vt.ViTConfig(**OURS | fields)))
    labels = ["ant", "bee", "cat", "dog", "eel"]
    preprocess = vt.Preprocess(size=model.config.size, resize="shortest", resize_to=max(model.config.pixels))
    if model.config.channels == 3:
        vt.Bundle(model=model, labels=labels, preprocess=preprocess).save(tmp_path / "ours.safetensors")
    else:
        vt.Bundle(model=model, labels=labels).save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "folder", to="timm")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "ours.safetensors"]
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    agree(theirs, vt.load(tmp_path / "ours.safetensors"))
    again = vt.load(tmp_path / "folder")  # heads, size and activation are in its settings
    agree(theirs, again)
    assert again.model.config.heads == 2


REFUSED = [
    (dict(eps=1e-12), "eps is 1e-06 there, and 1e-12 here.* such as eps can be overridden"),
    (dict(position="rotary", head_width=8), "position is 'learned' or 'none' there, and 'rotary' here"),
    (dict(block="post-norm"), "block is 'pre-norm' there, and 'post-norm' here"),
    (dict(norm="rms"), "norm is 'layer' there"),
    (dict(rows="class", registers=2), "rows is 'all' or 'patches' there"),
    (dict(head="tanh"), "head is 'linear' or 'distilled' there"),
    (dict(norm_pre=True), "either a norm before the first block or a bias"),
    (dict(pool="attention", qk_norm=True), "its attention pool has no q and k norm"),
    (dict(distillation_token=True, registers=1), "a plain DeiT"),
    (dict(scale="width"), "scale is 'head' there, and 'width' here"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_unsupported_models_are_refused(fields, reason, tmp_path):
    model = vt.ViT(vt.ViTConfig(**OURS | fields))
    vt.Bundle(model=model).save(tmp_path / "ours.safetensors")
    with pytest.raises(ConversionError, match=reason):
        vt.convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="timm")
    assert [p.name for p in tmp_path.iterdir()] == ["ours.safetensors"]


# ---- incomplete files and missing fields ----------------------------------


def change(tmp_path, **tensors):
    state = VisionTransformer(**SMALL).state_dict()
    for name, tensor in tensors.items():
        state.pop(name) if tensor is None else state.__setitem__(name, tensor)
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


@pytest.mark.parametrize(
    ("tensors", "overrides", "message"),
    [
        ({"rel_pos.table": torch.zeros(3)}, dict(heads=2), "is a timm file with unknown tensors: rel_pos.table"),
        ({"blocks.1.norm1.weight": None}, dict(heads=2), "does not hold the tensors .* missing blocks.1.norm1.weight"),
        ({"head.bias": torch.zeros(6)}, dict(heads=2), "head.bias 6 instead of 5"),
        ({}, {}, "number of heads, .* head width 64 does not divide the attention width 32"),
        ({}, dict(heads=5), "heads=5 does not divide the attention width 32"),
        ({"pos_embed": torch.zeros(1, 25, 32)}, dict(heads=2), "25 position rows with 1 prefix tokens .* [Gg]ive size"),
        ({}, dict(heads=2, family="tim"), "unknown family 'tim'. Did you mean 'timm'"),
        ({}, dict(heads=2, family="dinov2"), "is not a file of the family dinov2"),
        ({}, dict(heads=2, activation="gleu"), "unknown activation 'gleu'"),
        ({}, dict(heads=2, hidden_size=2), "has no field 'hidden_size'"),
        ({"patch_embed.proj.weight": None}, dict(heads=2), "is of no known family"),
    ],
)  # fmt: skip
def test_wrong_files_and_fields_are_refused(tensors, overrides, message, tmp_path):
    with pytest.raises(vt.VitrailError, match=message):
        vt.load(change(tmp_path, **tensors), **overrides)


def test_twenty_five_rows_on_four_by_six(tmp_path):
    """25 rows are 1 + 4 x 6 or 5 x 5: the size must be given."""
    theirs = add_noise(VisionTransformer(**SMALL | dict(img_size=(32, 48))))
    path = saved(theirs, tmp_path / "in.safetensors")
    bundle = vt.load(path, heads=2, size=(32, 48))
    assert bundle.model.config.grid == (4, 6)
    assert len(bundle.notes) == 2
    assert "published for augreg is used: mean 0.5, std 0.5." in bundle.notes[0]
    assert "a guess: files of deit look the same" in bundle.notes[1]
    agree(theirs, bundle)


def test_the_usual_head_width_is_assumed(tmp_path):
    theirs = add_noise(VisionTransformer(**SMALL | dict(embed_dim=128, num_heads=2)))
    path = saved(theirs, tmp_path / "in.safetensors")
    bundle = vt.load(path)
    assert bundle.notes[0].startswith("Assumed 2 heads of width 64")
    agree(theirs, bundle)
    assert vt.load(path, heads=4).model.config.heads == 4


def test_describe(tmp_path):
    path = saved(VisionTransformer(**SMALL), tmp_path / "in.safetensors")
    with open_model(path) as files:
        description = describe(files, heads=2)
    config = description.config
    assert (description.family, config.depth, config.classes) == ("timm", 2, 5)
