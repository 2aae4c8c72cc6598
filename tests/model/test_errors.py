"""Every message about a wrong model or wrong pictures: what must hold, what came, what to do."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import vitrail as vt

GOOD = dict(width=12, depth=2, heads=3, patch=4, size=8, channels=2, classes=5)

CONFIG_ERRORS = [
    (
        dict(widht=3),
        r"takes only the fields it has. Got widht=3. Did you mean 'width'\? There is: width, depth",
    ),
    (dict(hidden_size=768), r"Got hidden_size=768. There is: width, depth, heads"),
    (
        dict(heads=5),
        r"width must be a multiple of heads.* Got width=12, heads=5. Use heads=4 or heads=6, or give",
    ),
    (dict(heads=24), r"Got width=12, heads=24. Use heads=12, or give head_width."),
    (
        dict(size=10),
        r"whole number of patches .* Got size 10x10 with patches of 4x4. Use size 8x8 or 12x12, another",
    ),
    (dict(size=(8, 3)), r"Got size 8x3 with patches of 4x4. Use size 8x4, another patch, or remainder="),
    (dict(patch=(3, 4)), r"Got size 8x8 with patches of 3x4. Use size 6x8 or 9x8"),
    (dict(width=0), r"width must be a whole number from 1 to .* Got width=0. Set width to a whole number."),
    (dict(width=-12), r"Got width=-12."),
    (dict(depth=2.0), r"depth must be a whole number .* Got depth=2.0."),
    (dict(depth=True), r"Got depth=True."),
    (dict(heads="3"), r"Got heads='3'."),
    (dict(channels=None), r"channels must be a whole number .* Got channels=None."),
    (dict(classes=-1), r"classes must be a whole number from 0 to .* Got classes=-1."),
    (dict(head_width=0), r"Got head_width=0."),
    (dict(mlp_width=0), r"Got mlp_width=0."),
    (
        dict(size=(8, 8, 8)),
        r"size must be one number, or \(height, width\). Got size=\(8, 8, 8\). Give one number or 2",
    ),
    (dict(size=-8), r"size must be a whole number .* Got size=-8."),
    (dict(patch=(4, 0)), r"patch must be a whole number .* Got patch=0."),
    (dict(dropout=1), r"dropout must be at least 0 and below 1. Got dropout=1."),
    (dict(dropout=-0.1), r"Got dropout=-0.1."),
    (dict(dropout=float("nan")), r"Got dropout=nan."),
    (
        dict(attention_dropout="0.1"),
        r"attention_dropout must be at least 0 and below 1. Got attention_dropout='0.1'.",
    ),
    (dict(eps=0), r"eps must be above 0 and at most 1. Got eps=0."),
    (dict(eps=float("inf")), r"Got eps=inf."),
    (dict(depth=20_000), r"depth must be at most 10,000. Got depth=20,000. Use fewer blocks."),
    (
        dict(width=3 * 10**6, mlp_width=1),
        r"at most 100,000,000,000 parameters, .* [0-9,]+; most of them are in attention: make",
    ),
    (dict(mlp_width=10**11), r"most of them are in the MLPs"),
    (dict(classes=10**12), r"most of them are in the head"),
    (dict(size=4 * 10**6), r"most of them are in the position table"),
    (dict(channels=10**11), r"most of them are in the patch projection"),
    (dict(dropout=10**400), r"dropout must be at least 0 and below 1. Got dropout=a number beyond"),
    (
        dict(scale=float("nan")),
        r"scale must be one of its words or a number. Got scale=nan. There is: head, width",
    ),
    (dict(scale="heads"), r"Got scale='heads'. Did you mean 'head'\? There is: head, width, none."),
    (
        dict(position="sincos"),
        r"position must be one of its words. Got position='sincos'. Did you mean 'sincos",
    ),
    (dict(pool=3), r"Got pool=3. There is: class, mean"),
    (dict(qk_norm=1), r"qk_norm must be True or False. Got qk_norm=1."),
    (dict(registers=-1), r"registers must be a whole number from 0"),
    (dict(layer_scale=0), r"layer_scale must be above 0 and at most 10. Got layer_scale=0."),
    (
        dict(class_token=False),
        r"pool='class' needs a class token. Got class_token=False. Change pool or class_token.",
    ),
    (dict(class_token=False, pool="mean", rows="class"), r"rows='class' needs a class token."),
    (dict(class_token=False, pool="mean", distillation_token=True), r"distillation_token=True needs it too."),
    (dict(head="distilled"), r"head='distilled' needs a distillation token. Got distillation_token=False."),
    (
        dict(head="distilled", distillation_token=True, pool="mean"),
        r"needs the class token as pool. Got pool='mean'",
    ),
    (dict(mlp="gated", mlp_hidden=2), r"mlp='gated' needs one hidden layer. Got mlp_hidden=2."),
    (dict(width=6, position="sincos2d"), r"position='sincos2d' needs a width that 4 divides. Got width=6."),
    (dict(width=9, position="learned2d"), r"position='learned2d' needs an even width. Got width=9."),
    (dict(position="rotary", head_width=6), r"position='rotary' needs a head width that 4 divides. Got d=6."),
    (
        dict(position="none", position_at="every"),
        r"position_at='every' needs added positions. Got position='none'.",
    ),
    (dict(scale=0), r"scale=0.0 needs pairwise or relative positions. Got position='learned'."),
    (
        dict(patch_dropout=0.5, position="rotary"),
        r"patch_dropout=0.5 needs added positions. Got position='rotary'.",
    ),
    (dict(patch_dropout=0.5, position_at="every"), r"patch_dropout=0.5 needs positions at the start."),
    (dict(patch_dropout=0.5, pool="flatten"), r"patch_dropout=0.5 needs a pool for any count of patches."),
    (
        dict(embedding="resnet"),
        r"embedding='resnet' needs multiples of 16. Got patch=\(4, 4\). Change embedding or patch.",
    ),
    (dict(depth=10**5000), r"Got depth=a number beyond a million million."),
    (dict(width="x" * 500), r"Got width='x{76}\.\.\.\."),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS)
def test_config_errors(fields, message):
    with pytest.raises(vt.ConfigError, match=message):
        vt.ViTConfig(**{**GOOD, **fields})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "b/16",
            r"starts with a known size. Got 'b/16'. .*There is: mu, Ti, S, M, B, L, So400m, H, g, g-opt",
        ),
        ("So400/14", r"Did you mean 'So400m'\?"),
        ("B", r"A model name is size/patch or size/patch@pixels, such as \"B/16\".* Got 'B'. Sizes: mu, Ti"),
        ("B/16@", r"Got 'B/16@'."),
        ("vit_base_patch16_224", r"Got 'vit_base_patch16_224'."),
        (16, r"Got 16."),
        ("B/0", r"patch must be a whole number"),
        ("B/16x0", r"patch must be a whole number .* Got patch=0."),
        ("B/16@0", r"size must be a whole number .* Got size=0."),
        ("B/16@224x0", r"size must be a whole number .* Got size=0."),
        ("B/16@0x224", r"size must be a whole number .* Got size=0."),
        ("B/16@250", r"Got size 250x250 with patches of 16x16. Use size 240x240 or 256x256"),
        ("B/" + "9" * 5000, r"A model name is size/patch"),
    ],
)
def test_name_errors(name, message):
    with pytest.raises(vt.ConfigError, match=message):
        vt.create(name)


def test_an_absurd_model_is_refused_before_anything_is_allocated():
    code = (
        "import time, vitrail as vt; start = time.perf_counter()\n"
        "try: vt.preset('B/16', width=768 * 4096, heads=12, depth=24)\n"
        "except vt.ConfigError as error: print(error)\n"
        "assert time.perf_counter() - start < 1\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "assert int(peak.split()[1]) < 60_000, peak  # kB: no torch, no tensors"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "may have at most 100,000,000,000 parameters" in done.stdout


def test_numpy_numbers_are_numbers():
    config = vt.ViTConfig(
        **{**GOOD, "width": np.int64(12), "size": [np.int32(8), 8], "dropout": np.float32(0.5)}
    )
    assert config == vt.ViTConfig(**{**GOOD, "dropout": 0.5})
    assert type(config.width) is int
    assert type(config.dropout) is float


def test_errors_survive_a_process_boundary():
    with pytest.raises(vt.ConfigError) as caught:
        vt.create("b/16")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert isinstance(again, ValueError)


IMAGE_ERRORS = [
    (
        torch.zeros(2, 8, 8),
        r"shape \(batch, 2, 8, 8\) that the model was built for. Got \(2, 8, 8\). Add a batch axis",
    ),
    (torch.zeros(1, 8, 8, 2), r"Got \(1, 8, 8, 2\). Put the channels first: images.permute\(0, 3, 1, 2\)."),
    (
        torch.zeros(1, 3, 8, 8),
        r"Got \(1, 3, 8, 8\). Build the model with channels=3, or convert the pictures.",
    ),
    (
        torch.zeros(1, 2, 8, 12),
        r"Got \(1, 2, 8, 12\). Resize the pictures, or the model: size=\(8, 12\).",
    ),
    (torch.zeros(1, 2, 9, 9), r"Got \(1, 2, 9, 9\). Resize the pictures.$"),
    (
        torch.zeros(1, 64, 64, 2),
        r"Got \(1, 64, 64, 2\). Put the channels first: images.permute\(0, 3, 1, 2\).",
    ),
    (
        torch.zeros(9, 9, 2),
        r"Got \(9, 9, 2\). Put the channels first and add a batch axis: images.permute\(2, 0, 1\)",
    ),
    (torch.zeros(8), r"Got \(8,\). Stack the pictures into one batch."),
    (
        torch.zeros(1, 2, 8, 8, dtype=torch.uint8),
        r"dtype, torch.float32. Got torch.uint8. .*, and scale them as",
    ),
    (
        torch.zeros(1, 2, 8, 8, dtype=torch.float64),
        r"Got torch.float64. Convert them with .to\(torch.float32\).$",
    ),
    (
        np.zeros((1, 2, 8, 8), np.float32),
        r"Pictures must come as a torch tensor. Got ndarray. Convert them with",
    ),
    ([torch.zeros(2, 8, 8)], r"Got list."),
]


@pytest.mark.parametrize(("images", "message"), IMAGE_ERRORS)
def test_picture_errors(images, message):
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with pytest.raises(vt.InputError, match=message):
        model(images)


@pytest.mark.parametrize("layer", [2, -1, "0"])
def test_layer_errors(layer):
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with pytest.raises(
        vt.InputError, match=rf"block numbers from 0 to 1. Got {layer!r}. Blocks count from 0."
    ):
        model.encode(torch.zeros(1, 2, 8, 8), layers=[0, layer])


def test_autocast_takes_pictures_of_another_dtype():
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert model(torch.zeros(1, 2, 8, 8, dtype=torch.float16)).shape == (1, 5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_autocast_does_not_excuse_a_dtype_it_cannot_cast(dtype):
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with torch.autocast("cpu", torch.float16), pytest.raises(vt.InputError, match=f"Got {dtype}"):
        model(torch.zeros(1, 2, 8, 8, dtype=dtype))


def test_layers_may_come_as_any_sequence_or_not_at_all():
    model, images = vt.ViT(vt.ViTConfig(**GOOD)), torch.zeros(1, 2, 8, 8)
    assert list(model.encode(images, layers=None).layers) == []
    assert list(model.encode(images, layers=iter([1, 0])).layers) == [0, 1]
    assert list(model.encode(images, layers=1).layers) == [1]


def test_missing_fields_and_missing_configs():
    with pytest.raises(
        vt.ConfigError, match=r"ViTConfig needs width, depth, heads, patch. Got no depth, patch."
    ):
        vt.ViTConfig(width=4, heads=2)
    with pytest.raises(
        vt.InputError, match=r"built from a ViTConfig. Got 'B/16'. By name it is vitrail.create"
    ):
        vt.ViT("B/16")


def test_what_follows_from_other_fields_follows_them():
    config = vt.ViTConfig(width=12, depth=1, heads=3, patch=4)
    wider = dataclasses.replace(config, width=24)
    assert (config.d, config.F, wider.d, wider.F) == (4, 48, 8, 96)
    assert copy.deepcopy(pickle.loads(pickle.dumps(wider))) == wider
    assert vt.preset("B/16", width=384).F == 1536


def test_an_empty_batch_gives_no_logits():
    assert vt.ViT(vt.ViTConfig(**GOOD))(torch.zeros(0, 2, 8, 8)).shape == (0, 5)
