"""The model computes Eq. 1-4: compared with the NumPy oracle, and with what the equations imply."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support import oracle
from tests.support.models import add_noise, oracle_logits

CONFIGS = {
    "paper-like": dict(width=24, depth=3, heads=4, patch=4, size=16, channels=3, classes=7),
    "oblong": dict(width=12, depth=2, heads=3, patch=(4, 6), size=(12, 12), channels=2, classes=5),
    "one patch": dict(width=8, depth=1, heads=1, patch=8, size=8, channels=1, classes=2),
    "wide heads": dict(
        width=10, depth=2, heads=3, head_width=8, mlp_width=7, patch=3, size=(6, 9), channels=4, classes=3
    ),
    "hf eps": dict(width=16, depth=2, heads=2, patch=4, size=8, channels=3, classes=4, eps=1e-12),
}


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_logits_equal_the_oracle(fields, dtype, tolerance):
    model = add_noise(vt.ViT(vt.ViTConfig(**fields))).to(dtype)
    images = torch.randn(3, model.config.channels, *model.config.pixels, dtype=dtype)
    expected = oracle_logits(model, images)
    assert np.abs(expected).max() > 0.1  # not trivially equal
    with torch.no_grad():
        ours = model(images).double().numpy()
    assert np.abs(ours - expected).max() < tolerance


def test_the_oracle_is_short_and_free_of_torch():
    source = Path(oracle.__file__).read_text()
    assert len(source.splitlines()) <= 80
    assert "import torch" not in source


def test_gradients_equal_finite_differences(tiny, images):
    tiny.double()
    names, values = zip(*tiny.named_parameters(), strict=True)

    def logits(images, *parameters):
        return torch.func.functional_call(tiny, dict(zip(names, parameters, strict=True)), (images,))

    images = images[:1].double().requires_grad_()
    assert torch.autograd.gradcheck(logits, (images, *values), eps=1e-6, atol=1e-5, fast_mode=True)


def shuffled(model, images):
    """The images with their patches permuted, the same way for each; and the permutation."""
    c = model.config
    (h, w), (P, Q) = c.grid, c.patch
    order = torch.randperm(c.patches, generator=torch.Generator().manual_seed(1))
    cut = images.reshape(-1, c.channels, h, P, w, Q).permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    permuted = cut[order].unflatten(0, (h, w)).permute(2, 3, 0, 4, 1, 5)
    return permuted.reshape(images.shape), order


def test_the_order_of_patches_matters_only_with_positions(tiny, images):
    permuted, order = shuffled(tiny, images)
    assert not torch.equal(permuted, images)
    with torch.no_grad():
        assert (tiny(permuted) - tiny(images)).abs().max() > 1e-2

        tiny.position.table.zero_()
        before, after = tiny.encode(images), tiny.encode(permuted)
    assert (after.pooled - before.pooled).abs().max() < 1e-5
    patches_before, patches_after = before.patches.flatten(1, 2), after.patches.flatten(1, 2)
    assert (patches_after - patches_before[:, order]).abs().max() < 1e-5  # tokens are permuted alike
    assert (patches_after - patches_before).abs().max() > 1e-2


def test_an_image_gives_the_same_logits_alone_and_in_a_batch(tiny, images):
    with torch.no_grad():
        together = tiny(images)
        alone = torch.cat([tiny(image[None]) for image in images])
    assert (together - alone).abs().max() < 1e-5


def test_nan_in_one_image_does_not_reach_the_others(tiny, images):
    with torch.no_grad():
        clean = tiny(images)
        with_nan = images.clone()
        with_nan[1] = float("nan")
        logits = tiny(with_nan)
    assert logits[1].isnan().all()
    others = [0, 2, 3]
    assert (logits[others] - clean[others]).abs().max() < 1e-5


def test_convolution_and_matrix_product_are_the_same_numbers(tiny, images):
    """Lecture notes 001 and 002: a convolution of stride P multiplies flattened patches by E."""
    tiny.double()
    images = images.double()
    proj = tiny.tokens.proj
    by_convolution = torch.nn.functional.conv2d(images, proj.weight, proj.bias, stride=tiny.config.patch)
    by_convolution = by_convolution.flatten(2).transpose(1, 2)
    E = proj.weight.flatten(1).T  # (C P P, D), one column per filter
    x_p = np.stack([oracle.patches(image.numpy(), *tiny.config.patch) for image in images])
    by_product = torch.from_numpy(x_p) @ E + proj.bias
    assert (tiny.tokens(images) - by_convolution).abs().max() < 1e-12
    assert (tiny.tokens(images) - by_product).abs().max() < 1e-12
