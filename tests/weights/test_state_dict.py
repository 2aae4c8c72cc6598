"""Our own plain state dicts: torch.save(model.state_dict(), "x.pth")."""

import pytest
import torch

import vitrail as vt
from tests.support.command import run_command
from vitrail.model.device import eval_mode

# Config fields, and what has to be given to load the state dict again.
MODELS = {
    "paper": ({}, {}),
    "no head": ({"classes": 0}, {}),
    "not square": ({"size": (16, 32)}, {"size": (16, 32)}),
    "registers": ({"registers": 3}, {}),
    "registers, no class token": (
        {"registers": 2, "class_token": False, "pool": "mean"},
        {"class_token": False, "pool": "mean"},
    ),
    "distilled": ({"distillation_token": True, "head": "distilled"}, {}),
    "mean pool": ({"class_token": False, "pool": "mean"}, {}),
    "class-mean": ({"pool": "class-mean"}, {}),
    "flatten": ({"pool": "flatten", "class_token": False}, {}),
    "attention pool": ({"pool": "attention", "class_token": False}, {}),
    "learned2d": ({"position": "learned2d", "size": (16, 32)}, {}),
    "relative": ({"position": "relative"}, {}),
    "pairwise": ({"position": "pairwise"}, {}),
    "sincos2d": ({"position": "sincos2d"}, {"position": "sincos2d", "size": 32}),
    "rotary": ({"position": "rotary"}, {"position": "rotary", "size": 32}),
    "head width": ({"heads": 2, "head_width": 8, "qk_norm": True}, {}),
    "gated rms": ({"mlp": "gated", "norm": "rms", "activation": "silu"}, {"activation": "silu"}),
    "conv stem": ({"embedding": "conv", "patch": 8}, {}),
    "mlp embedding": ({"embedding": "mlp", "channels": 1}, {}),
    "deep MLP, no norm": ({"mlp_hidden": 2, "norm": "none"}, {}),
    "layer scale": ({"layer_scale": 0.1, "qkv_bias": "none", "norm_pre": True}, {}),
    "tanh head": ({"head": "tanh"}, {"head": "tanh"}),
    "odd width": ({"width": 48, "heads": 6}, {"heads": 6}),
}


def build(**fields):
    torch.manual_seed(0)
    model = vt.create("mu/4", **{"classes": 5, "depth": 2, **fields})
    for parameter in model.parameters():  # heads begin at zero, which would make all logits equal
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_is_loaded_with_the_same_logits(tmp_path, name):
    fields, given = MODELS[name]
    model = build(**fields)
    torch.save(model.state_dict(), tmp_path / "x.pth")
    loaded = vt.load(tmp_path / "x.pth", **given)
    images = torch.randn(2, *model.config.input_shape)
    with eval_mode(model):
        assert torch.equal(loaded.model(images), model(images))
    assert loaded.model.config.pixels == model.config.pixels


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("key", ["", "model", "state_dict"])
def test_prefixes_and_wrappers_of_training_scripts(tmp_path, prefix, key):
    model = build()
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({key: state, "epoch": 3} if key else state, tmp_path / "x.pth")
    loaded = vt.load(tmp_path / "x.pth")
    assert all(torch.equal(t, loaded.model.state_dict()[n]) for n, t in model.state_dict().items())


def test_a_compiled_model_is_read(tmp_path):
    model = build()
    torch.save(torch.compile(model).state_dict(), tmp_path / "x.pth")
    assert vt.load(tmp_path / "x.pth").model.config == model.config


def test_what_is_assumed_is_a_note_and_can_be_given(tmp_path):
    torch.save(build().state_dict(), tmp_path / "x.pth")
    notes = " ".join(vt.load(tmp_path / "x.pth").notes)
    assert "heads=2" in notes
    assert "activation='gelu'" in notes
    assert "-1 ... 1" in notes
    loaded = vt.load(tmp_path / "x.pth", heads=4, activation="relu", classes=3, size=16)
    assert (loaded.model.config.heads, loaded.model.config.activation) == (4, "relu")
    assert (loaded.model.config.classes, loaded.model.config.pixels) == (3, (16, 16))


@pytest.mark.parametrize(
    ("fields", "given", "message"),
    [
        ({"width": 48, "heads": 6}, {}, r"number of heads.* width 48; give it: heads="),
        ({"width": 48, "heads": 6}, {"heads": 7}, "heads=7 does not divide"),
        ({"position": "rotary"}, {}, r"give position and size, such as position='sincos2d' and size=128"),
        ({"position": "rotary"}, {"position": "rotary"}, "give size, such as size=128"),
        ({"position": "pairwise", "size": (8, 16)}, {}, r"not a square; give size"),
        ({"head": "mlp"}, {}, "give head=mlp, tanh or cosine"),
        ({"input": "text", "size": 9, "patch": 1, "vocabulary": 7}, {}, r"images only; .*\.save"),
    ],
)
def test_what_no_shape_shows_is_asked_for(tmp_path, fields, given, message):
    torch.save(build(**fields).state_dict(), tmp_path / "x.pth")
    with pytest.raises(vt.ConfigError, match=message):
        vt.load(tmp_path / "x.pth", **given)


def test_other_tensors_and_missing_ones_are_named(tmp_path):
    state = build().state_dict()
    torch.save({**{f"a.{n}": t for n, t in state.items()}, "b.x": torch.zeros(1)}, tmp_path / "x.pth")
    with pytest.raises(vt.FileError, match=r"unknown tensors: b\.x"):
        vt.load(tmp_path / "x.pth")
    del state["blocks.1.mlp.fc2.weight"]
    torch.save(state, tmp_path / "y.pth")
    with pytest.raises(vt.FileError, match=r"is missing blocks\.1\.mlp\.fc2\.weight"):
        vt.load(tmp_path / "y.pth")


def test_info_and_convert_read_a_state_dict(tmp_path):
    torch.save(build(width=48, heads=6).state_dict(), tmp_path / "x.pth")
    refused = run_command("info", "x.pth", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--set heads" in " ".join(refused.stderr.split())
    shown = run_command("info", "x.pth", "--set", "heads=6", cwd=tmp_path)
    assert "the state dict of a vitrail model" in shown.stdout
    assert "6 heads" in shown.stdout
    vt.convert(tmp_path / "x.pth", tmp_path / "y.safetensors", to="vitrail", heads=6)
    assert vt.load(tmp_path / "y.safetensors").model.config.heads == 6


def test_save_refuses_a_pth_name_and_says_what_to_do(tmp_path):
    with pytest.raises(vt.FileError, match=r"\.safetensors.*torch\.save\(bundle\.model\.state_dict\(\)"):
        vt.Bundle(model=build()).save(tmp_path / "x.pth")
    assert not list(tmp_path.iterdir())
