"""The messages about invalid configs and images."""

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
    (dict(widht=3), r"no field 'widht'. Did you mean 'width'\? Choose from: width, depth"),
    (dict(hidden_size=768), r"no field 'hidden_size'; here it is called 'width'"),
    (dict(num_classes=10), r"no field 'num_classes'; here it is called 'classes'"),
    (dict(img_size=224), r"here it is called 'size'"),
    (dict(embed_dim=192), r"here it is called 'width'"),
    (dict(learning_rate=1), r"no field 'learning_rate'. Choose from"),  # a field of TrainConfig
    (dict(heads=5), r"width=12 is not a multiple of heads=5; use heads=4 or heads=6, or set head_width"),
    (dict(heads=24), r"heads=24; use heads=12, or set head_width"),
    (dict(size=10), r"size 10x10 is not a multiple of the patch size 4x4; use 8x8 or 12x12, .*remainder"),
    (dict(size=(8, 3)), r"size 8x3 is not a multiple of the patch size 4x4; use 8x4, another patch"),
    (dict(patch=(3, 4)), r"size 8x8 .* 3x4; use 6x8 or 9x8"),
    (dict(width=0), r"width must be an integer from 1 to .*, not 0"),
    (dict(width=-12), r"not -12"),
    (dict(depth=2.0), r"depth must be an integer .*, not 2.0"),
    (dict(depth=True), r"depth .* not True"),
    (dict(heads="3"), r"heads .* not '3'"),
    (dict(channels=None), r"channels must be an integer .*, not None"),
    (dict(classes=-1), r"classes must be an integer from 0 to .*, not -1"),
    (dict(head_width=0), r"head_width .* not 0"),
    (dict(mlp_width=0), r"mlp_width .* not 0"),
    (dict(size=(8, 8, 8)), r"size must be one integer or \(height, width\), not \(8, 8, 8\)"),
    (dict(size=-8), r"size must be an integer .*, not -8"),
    (dict(patch=(4, 0)), r"patch must be an integer .*, not 0"),
    (dict(dropout=1), r"dropout must be at least 0 and below 1, not 1"),
    (dict(dropout=-0.1), r"not -0.1"),
    (dict(dropout=float("nan")), r"not nan"),
    (dict(attention_dropout="0.1"), r"attention_dropout must be at least 0 and below 1, not '0.1'"),
    (dict(eps=0), r"eps must be above 0 and at most 1, not 0"),
    (dict(eps=float("inf")), r"not inf"),
    (dict(depth=20_000), r"depth must be at most 10,000, not 20,000"),
    (dict(width=3 * 10**6, mlp_width=1), r"[0-9,]+ parameters, more than the limit .* in attention"),
    (dict(mlp_width=10**11), r"in the MLPs"),
    (dict(classes=10**12), r"in the head"),
    (dict(size=4 * 10**6), r"in the position table"),
    (dict(channels=10**11), r"in the patch projection"),
    (dict(dropout=10**400), r"dropout must be at least 0 and below 1, not an integer above 10\^12"),
    (dict(scale=float("nan")), r"unknown scale nan. Choose from: head, width, none. Or a number"),
    (dict(scale="heads"), r"unknown scale 'heads'. Did you mean 'head'\?"),
    (dict(position="sincos"), r"unknown position 'sincos'. Did you mean 'sincos"),
    (dict(pool=3), r"unknown pool 3. Choose from: class, mean"),
    (dict(qk_norm=1), r"qk_norm must be True or False, not 1"),
    (dict(registers=-1), r"registers must be an integer from 0"),
    (dict(layer_scale=0), r"layer_scale must be above 0 and at most 10, not 0. Use layer_scale=None"),
    (dict(class_token=False), r"pool='class' needs a class token, but class_token=False"),
    (dict(class_token=False, pool="mean", rows="class"), r"rows='class' needs a class token"),
    (dict(class_token=False, pool="mean", distillation_token=True), r"distillation_token=True needs a class"),
    (dict(head="distilled"), r"head='distilled' needs a distillation token, but distillation_token=False"),
    (dict(head="distilled", distillation_token=True, pool="mean"), r"needs pool=\"class\", but pool='mean'"),
    (dict(mlp="gated", mlp_hidden=2), r"mlp='gated' needs one hidden layer, but mlp_hidden=2"),
    (dict(width=6, position="sincos2d"), r"position='sincos2d' needs a width divisible by 4, but width=6"),
    (dict(width=9, position="learned2d"), r"position='learned2d' needs a width divisible by 2, but width=9"),
    (dict(position="rotary", head_width=6), r"needs a head width divisible by 4, but d=6"),
    (dict(position="none", position_at="every"), r"needs added positions, but position='none'"),
    (dict(scale=0), r"scale=0.0 needs a position bias, but position='learned'"),
    (dict(patch_dropout=0.5, position="rotary"), r"patch_dropout=0.5 needs added positions, but position="),
    (dict(patch_dropout=0.5, position_at="every"), r"patch_dropout=0.5 needs position_at=\"start\""),
    (dict(patch_dropout=0.5, pool="flatten"), r"patch_dropout=0.5 needs a pool that takes any number"),
    (dict(embedding="resnet"), r"embedding='resnet' needs a patch size divisible by 16, but patch=\(4, 4\)"),
    (dict(depth=10**5000), r"depth .* not an integer above 10\^12"),
    (dict(width="x" * 500), r"width .* not 'x{76}\.\.\.\."),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS)
def test_config_errors(fields, message):
    with pytest.raises(vt.ConfigError, match=message):
        vt.ViTConfig(**{**GOOD, **fields})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b/16", r"unknown size 'b' in 'b/16'.* Choose from: mu, Ti, S, M, B, L, So400m, H, g, g-opt"),
        ("So400/14", r"Did you mean 'So400m'\?"),
        ("B", r"'B' is not a model name; .* such as \"B/16\".* sizes are mu, Ti"),
        ("B/16@", r"'B/16@' is not a model name"),
        ("vit_base_patch16_224", r"'vit_base_patch16_224' is not a model name"),
        (16, r"16 is not a model name"),
        ("B/0", r"patch must be an integer"),
        ("B/16x0", r"patch must be an integer .*, not 0"),
        ("B/16@0", r"size must be an integer .*, not 0"),
        ("B/16@224x0", r"size must be an integer .*, not 0"),
        ("B/16@0x224", r"size must be an integer .*, not 0"),
        ("B/16@250", r"size 250x250 is not a multiple of the patch size 16x16; use 240x240 or 256x256"),
        ("B/" + "9" * 5000, r"is not a model name"),
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
    assert "parameters, more than the limit of 100,000,000,000" in done.stdout


def test_numpy_numbers_are_accepted():
    config = vt.ViTConfig(
        **{**GOOD, "width": np.int64(12), "size": [np.int32(8), 8], "dropout": np.float32(0.5)}
    )
    assert config == vt.ViTConfig(**{**GOOD, "dropout": 0.5})
    assert type(config.width) is int
    assert type(config.dropout) is float


def test_errors_can_be_pickled():
    with pytest.raises(vt.ConfigError) as caught:
        vt.create("b/16")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert isinstance(again, ValueError)


IMAGE_ERRORS = [
    (torch.zeros(2, 8, 8), r"shape \(batch, 2, 8, 8\), not \(2, 8, 8\); add a batch axis"),
    (torch.zeros(1, 8, 8, 2), r"not \(1, 8, 8, 2\); .*channels first: images.permute\(0, 3, 1, 2\)"),
    (torch.zeros(1, 3, 8, 8), r"not \(1, 3, 8, 8\); build the model with channels=3"),
    (
        torch.zeros(1, 2, 8, 12),
        r"not \(1, 2, 8, 12\); resize the images, or .*vitrail.surgery.resize\(model, \(8, 12\)\)",
    ),
    (torch.zeros(1, 2, 9, 9), r"not \(1, 2, 9, 9\); resize the images.$"),
    (torch.zeros(1, 64, 64, 2), r"not \(1, 64, 64, 2\); .*images.permute\(0, 3, 1, 2\)"),
    (torch.zeros(9, 9, 2), r"not \(9, 9, 2\); .* add a batch axis: images.permute\(2, 0, 1\)"),
    (torch.zeros(8), r"not \(8,\); stack the images"),
    (torch.zeros(1, 2, 8, 8, dtype=torch.uint8), r"dtype, torch.float32, not torch.uint8; .* normalize"),
    (
        torch.zeros(1, 2, 8, 8, dtype=torch.float64),
        r"not torch.float64; convert them with .to\(torch.float32\).$",
    ),
    (np.zeros((1, 2, 8, 8), np.float32), r"Images must be a torch tensor, not ndarray; convert with"),
    ([torch.zeros(2, 8, 8)], r"not list"),
]


@pytest.mark.parametrize(("images", "message"), IMAGE_ERRORS)
def test_image_errors(images, message):
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with pytest.raises(vt.InputError, match=message):
        model(images)


@pytest.mark.parametrize("layer", [2, -1, "0"])
def test_layer_errors(layer):
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with pytest.raises(vt.InputError, match=rf"block indices from 0 to 1, not {layer!r}"):
        model.encode(torch.zeros(1, 2, 8, 8), layers=[0, layer])


def test_autocast_takes_images_of_another_dtype():
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert model(torch.zeros(1, 2, 8, 8, dtype=torch.float16)).shape == (1, 5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_autocast_does_not_accept_a_dtype_it_cannot_cast(dtype):
    model = vt.ViT(vt.ViTConfig(**GOOD))
    with torch.autocast("cpu", torch.float16), pytest.raises(vt.InputError, match=f"not {dtype}"):
        model(torch.zeros(1, 2, 8, 8, dtype=dtype))


def test_layers_may_be_any_iterable_an_index_or_none():
    model, images = vt.ViT(vt.ViTConfig(**GOOD)), torch.zeros(1, 2, 8, 8)
    assert list(model.encode(images, layers=None).layers) == []
    assert list(model.encode(images, layers=iter([1, 0])).layers) == [0, 1]
    assert list(model.encode(images, layers=1).layers) == [1]


def test_missing_fields_and_missing_configs():
    with pytest.raises(vt.ConfigError, match=r"needs width, depth, heads, patch, but got no depth, patch"):
        vt.ViTConfig(width=4, heads=2)
    with pytest.raises(vt.InputError, match=r"takes a ViTConfig, not 'B/16'; .* vitrail.create"):
        vt.ViT("B/16")


def test_derived_values_follow_the_fields():
    config = vt.ViTConfig(width=12, depth=1, heads=3, patch=4)
    wider = dataclasses.replace(config, width=24)
    assert (config.d, config.F, wider.d, wider.F) == (4, 48, 8, 96)
    assert copy.deepcopy(pickle.loads(pickle.dumps(wider))) == wider
    assert vt.preset("B/16", width=384).F == 1536


def test_an_empty_batch_gives_no_logits():
    assert vt.ViT(vt.ViTConfig(**GOOD))(torch.zeros(0, 2, 8, 8)).shape == (0, 5)
