"""The stems of hybrids: the ResNet compared with timm, and its key table with Google's names."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.models import add_noise
from vitrail.model.stem import ConvStem, ResNetStem, initialize_stem

# Our names for timm's modules; {i} is the stage, {j} the unit.
TIMM = {
    "root.conv": "stem.conv",
    "root.norm": "stem.norm",
    "stages.{i}.{j}.conv1": "stages.{i}.blocks.{j}.conv1",
    "stages.{i}.{j}.norm1": "stages.{i}.blocks.{j}.norm1",
    "stages.{i}.{j}.conv2": "stages.{i}.blocks.{j}.conv2",
    "stages.{i}.{j}.norm2": "stages.{i}.blocks.{j}.norm2",
    "stages.{i}.{j}.conv3": "stages.{i}.blocks.{j}.conv3",
    "stages.{i}.{j}.norm3": "stages.{i}.blocks.{j}.norm3",
    "stages.{i}.{j}.proj": "stages.{i}.blocks.{j}.downsample.conv",
    "stages.{i}.{j}.proj_norm": "stages.{i}.blocks.{j}.downsample.norm",
}


def table(docstring):
    """The rows of the table in a docstring, without its head."""
    lines = [line.strip() for line in docstring.splitlines() if line.strip().startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


def renamed(key, names):
    """Their name for the module of our key, and the kind of parameter: weight or bias."""
    module, _, kind = key.rpartition(".")
    indices = dict(zip("ij", re.findall(r"\.(\d+)(?=\.)", key), strict=False))
    template = re.sub(r"\.\d+\.\d+\.", ".{i}.{j}.", module)
    theirs = names[template].replace("+1", "_next")
    return theirs.format(**indices, **{f"{x}_next": int(n) + 1 for x, n in indices.items()}), kind


def timm_backbone(layers, **options):
    """The backbone of timm's hybrids, with their eps and padding."""
    from timm.models.vision_transformer_hybrid import _resnetv2

    return _resnetv2(layers, **options)


def copied(theirs, ours):
    """Our stem with timm's weights; every tensor of theirs must have been used."""
    theirs = theirs.state_dict()
    state = {key: theirs.pop(".".join(renamed(key, TIMM))) for key in ours.state_dict()}
    assert not theirs
    ours.load_state_dict(state)
    return ours.eval()


def close(actual, expected, tolerance=1e-5):
    """Within the tolerance relative to the largest value, about 6 in a stem.

    Relative, because in float32 timm is 1.4e-5 away from its own result in float64.
    """
    return (actual - expected).abs().max() < tolerance * expected.abs().max()


@pytest.fixture(scope="module")
def pair():
    """timm's backbone and ours with the same weights; one unit without a projection, two channels."""
    torch.manual_seed(0)
    theirs = add_noise(timm_backbone((1, 2, 1), in_chans=2))
    return theirs, copied(theirs, ResNetStem(2, (1, 2, 1)))


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (37, 51), (30, 17)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
def test_resnet_stem_equals_timm(pair, size, dtype, tolerance):
    theirs, ours = (stem.to(dtype) for stem in pair)
    images = torch.randn(2, 2, *size, dtype=dtype)
    with torch.no_grad():
        expected = theirs(images)
        features = ours(images)
    assert expected.abs().mean() > 0.1
    assert features.shape == expected.shape == (2, 1024, math.ceil(size[0] / 16), math.ceil(size[1] / 16))
    assert close(features, expected, tolerance)


def test_gradients_of_the_resnet_stem_equal_timm(pair):
    theirs, ours = (stem.double() for stem in pair)
    images = torch.randn(2, 2, 32, 48, dtype=torch.float64)
    probe = torch.randn(2, 1024, 2, 3, dtype=torch.float64)
    gradients = []
    for stem in (theirs, ours):
        parameters = dict(stem.named_parameters())
        tensors = torch.autograd.grad((stem(images) * probe).sum(), list(parameters.values()))
        gradients.append(dict(zip(parameters, tensors, strict=True)))
    for key, gradient in gradients[1].items():
        expected = gradients[0][".".join(renamed(key, TIMM))]
        assert expected.abs().max() > 0
        assert close(gradient, expected, 1e-10), key


def test_the_root_equals_timm():
    theirs = add_noise(timm_backbone((), in_chans=3))
    ours = ResNetStem(layers=()).eval()
    ours.root.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 21, 24)
    assert ours.out_channels == 64
    assert close(ours(images), theirs(images))


@pytest.mark.parametrize("layers", [(3, 4, 9), (2, 2, 2, 2)], ids=["R50", "R26"])
def test_the_published_stems_have_the_parameters_of_timm(layers):
    with torch.device("meta"):
        theirs, ours = timm_backbone(layers), ResNetStem(layers=layers)
    shapes = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert {".".join(renamed(key, TIMM)): tensor.shape for key, tensor in ours.state_dict().items()} == shapes
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    assert ours.out_channels == 128 * 2 ** len(layers)


def test_the_key_table_has_the_names_of_google(tmp_path):
    """timm reads a file written with the names of the docstring as one of Google's."""
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import HybridEmbed

    ours, google = add_noise(ResNetStem(layers=(1, 2))), {}
    for key, tensor in ours.state_dict().items():
        name, kind = renamed(key, dict(table(ResNetStem.__doc__)))
        if tensor.ndim == 4:
            google[f"{name}/kernel"] = tensor.permute(2, 3, 1, 0).numpy()
        else:
            google[f"{name}/{'scale' if kind == 'weight' else kind}"] = tensor.reshape(1, 1, 1, -1).numpy()
    rest = {"embedding/kernel": (1, 1, 512, 8), "embedding/bias": (8,), "cls": (1, 1, 8)}
    rest["Transformer/posembed_input/pos_embedding"] = (1, 17, 8)
    rest |= {f"Transformer/encoder_norm/{kind}": (8,) for kind in ("scale", "bias")}
    np.savez(tmp_path / "hybrid.npz", **google, **{name: np.zeros(s, np.float32) for name, s in rest.items()})

    theirs = VisionTransformer(
        img_size=32,
        patch_size=1,
        embed_dim=8,
        depth=0,
        num_heads=1,
        num_classes=0,
        embed_layer=lambda **options: HybridEmbed(timm_backbone((1, 2)), **without(options, "bias")),
    )
    theirs.load_pretrained(str(tmp_path / "hybrid.npz"))
    backbone = theirs.patch_embed.backbone.state_dict()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(backbone[".".join(renamed(key, TIMM))], tensor), key


def without(options, *names):
    return {name: value for name, value in options.items() if name not in names}


@pytest.mark.parametrize("size", [(32, 32), (20, 28), (17, 30)], ids=str)
def test_conv_stem_has_stride_4(size):
    stem = ConvStem(channels=2, width=12)
    assert stem.out_channels == 12
    assert stem(torch.randn(3, 2, *size)).shape == (3, 12, math.ceil(size[0] / 4), math.ceil(size[1] / 4))


def test_keys_of_the_conv_stem():
    shapes = {key: tuple(tensor.shape) for key, tensor in ConvStem(2, 12).state_dict().items()}
    convs = {"conv1.weight": (6, 2, 3, 3), "conv2.weight": (12, 6, 3, 3)}
    norms = {f"norm{n}.{kind}": (6 * n,) for n in (1, 2) for kind in ("weight", "bias")}
    assert shapes == convs | norms


STEMS = {"conv": lambda: ConvStem(2, 12), "resnet": lambda: ResNetStem(2, (1, 2))}


@pytest.fixture(params=STEMS)
def stem(request):
    stem = STEMS[request.param]()
    initialize_stem(stem)
    return stem


def test_every_gradient_is_finite_and_not_zero(stem):
    images = torch.randn(2, 2, 24, 40, requires_grad=True)
    x = stem(images)
    (x * torch.randn_like(x)).sum().backward()
    for name, tensor in [("images", images), *stem.named_parameters()]:
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.abs().max() > 0, name


def test_gradients_are_finite_for_an_image_of_one_color(stem):
    images = torch.zeros(1, 2, 16, 16, requires_grad=True)
    stem(images).sum().backward()
    assert images.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in stem.parameters())


def test_features_do_not_depend_on_the_batch(stem):
    images = torch.randn(3, 2, 24, 40)
    for training in (True, False):
        stem.train(training)
        assert close(stem(images)[1:2], stem(images[1:2]))


@pytest.mark.parametrize("training", [False, True])
def test_compile_without_graph_breaks(stem, training):
    stem.train(training)
    images = torch.randn(2, 2, 22, 40)
    compiled = torch.compile(stem, fullgraph=True, backend="aot_eager")
    assert close(compiled(images), stem(images))


def test_export_with_a_dynamic_batch(stem):
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(stem.eval(), (torch.randn(2, 2, 22, 40),), dynamic_shapes=({0: batch},))
    images = torch.randn(3, 2, 22, 40)
    assert close(program.module()(images), stem(images))


def test_parameters_are_initialized_as_in_the_table(stem):
    rows = dict(table(initialize_stem.__doc__))
    assert rows.keys() == {"weight of a convolution", "weight of a norm", "bias of a norm"}
    assert "variance 1/(C k k), truncated at 2 sigma" in rows["weight of a convolution"]
    add_noise(stem)
    initialize_stem(stem)
    unchecked = set(stem.parameters())
    for layer in stem.modules():
        if isinstance(layer, nn.Conv2d):
            kernel, sigma = layer.weight.detach(), layer.weight[0].numel() ** -0.5
            assert kernel.std().item() == pytest.approx(sigma, rel=4 / math.sqrt(kernel.numel()))
            assert kernel.abs().max() < 2.28 * sigma  # 2 sigma before truncation
            unchecked.remove(layer.weight)
        elif isinstance(layer, nn.GroupNorm):
            assert (layer.weight == float(rows["weight of a norm"])).all()
            assert (layer.bias == float(rows["bias of a norm"])).all()
            unchecked -= {layer.weight, layer.bias}
    assert not unchecked
