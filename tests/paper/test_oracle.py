"""Our model computes Eq. 1-4: held against the NumPy oracle, and against what the equations imply."""

from pathlib import Path

import numpy as np
import pytest
import torch

import oracle
import vitrail as vt
from conftest import shake

CONFIGS = {
    "paper-like": dict(width=24, depth=3, heads=4, patch=4, size=16, channels=3, classes=7),
    "oblong": dict(width=12, depth=2, heads=3, patch=(4, 6), size=(12, 12), channels=2, classes=5),
    "one patch": dict(width=8, depth=1, heads=1, patch=8, size=8, channels=1, classes=2),
    "wide heads": dict(
        width=10, depth=2, heads=3, head_width=8, mlp_width=7, patch=3, size=(6, 9), channels=4, classes=3
    ),
    "hf eps": dict(width=16, depth=2, heads=2, patch=4, size=8, channels=3, classes=4, eps=1e-12),
}


def numpy_logits(model, images):
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    c = model.config
    return np.stack(
        [
            oracle.vit(
                image.double().numpy(), weights, patch=c.patch, depth=c.depth, heads=c.heads, eps=c.eps
            )
            for image in images
        ]
    )


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_logits_are_those_of_the_oracle(fields, dtype, tolerance):
    model = shake(vt.ViT(vt.ViTConfig(**fields))).to(dtype)
    images = torch.randn(3, model.config.channels, *model.config.pixels, dtype=dtype)
    expected = numpy_logits(model, images)
    assert np.abs(expected).max() > 0.1  # the comparison is about something
    with torch.no_grad():
        ours = model(images).double().numpy()
    assert np.abs(ours - expected).max() < tolerance


def test_the_oracle_is_short_and_free_of_torch():
    source = Path(oracle.__file__).read_text()
    assert len(source.splitlines()) <= 80
    assert "import torch" not in source


def test_gradients_are_those_of_finite_differences(tiny, pictures):
    tiny.double()
    names, values = zip(*tiny.named_parameters(), strict=True)

    def logits(images, *parameters):
        return torch.func.functional_call(tiny, dict(zip(names, parameters, strict=True)), (images,))

    images = pictures[:1].double().requires_grad_()
    assert torch.autograd.gradcheck(logits, (images, *values), eps=1e-6, atol=1e-5, fast_mode=True)


def shuffled(model, images):
    """The pictures with their patches dealt out anew, the same way for each."""
    c = model.config
    (h, w), (P, Q) = c.grid, c.patch
    order = torch.randperm(c.patches, generator=torch.Generator().manual_seed(1))
    cut = images.reshape(-1, c.channels, h, P, w, Q).permute(2, 4, 0, 1, 3, 5).flatten(0, 1)
    dealt = cut[order].unflatten(0, (h, w)).permute(2, 3, 0, 4, 1, 5)
    return dealt.reshape(images.shape), order


def test_without_positions_patches_have_no_order_and_with_them_they_do(tiny, pictures):
    dealt, order = shuffled(tiny, pictures)
    assert not torch.equal(dealt, pictures)
    with torch.no_grad():
        moved = (tiny(dealt) - tiny(pictures)).abs().max()
        assert moved > 1e-2  # with positions the order matters

        tiny.position.table.zero_()
        before, after = tiny.encode(pictures), tiny.encode(dealt)
    assert (after.pooled - before.pooled).abs().max() < 1e-5
    patches_before, patches_after = before.patches.flatten(1, 2), after.patches.flatten(1, 2)
    assert (patches_after - patches_before[:, order]).abs().max() < 1e-5  # the tokens move along
    assert (patches_after - patches_before).abs().max() > 1e-2


def test_a_picture_alone_and_in_a_batch_gives_the_same_logits(tiny, pictures):
    with torch.no_grad():
        together = tiny(pictures)
        alone = torch.cat([tiny(picture[None]) for picture in pictures])
    assert (together - alone).abs().max() < 1e-5


def test_a_neighbour_full_of_nan_never_leaks(tiny, pictures):
    with torch.no_grad():
        clean = tiny(pictures)
        poisoned = pictures.clone()
        poisoned[1] = float("nan")
        logits = tiny(poisoned)
    assert logits[1].isnan().all()
    others = [0, 2, 3]
    assert (logits[others] - clean[others]).abs().max() < 1e-5


def test_convolution_and_matrix_product_are_the_same_numbers(tiny, pictures):
    """Notes 001 and 002: cutting with a convolution is multiplying flat patches by E."""
    tiny.double()
    pictures = pictures.double()
    proj = tiny.tokens.proj
    by_convolution = torch.nn.functional.conv2d(pictures, proj.weight, proj.bias, stride=tiny.config.patch)
    by_convolution = by_convolution.flatten(2).transpose(1, 2)  # as 002 does it
    E = proj.weight.flatten(1).T  # (C P P, D), a column for each filter
    x_p = np.stack([oracle.patches(picture.numpy(), *tiny.config.patch) for picture in pictures])
    by_product = torch.from_numpy(x_p) @ E + proj.bias
    assert (tiny.tokens(pictures) - by_convolution).abs().max() < 1e-12
    assert (tiny.tokens(pictures) - by_product).abs().max() < 1e-12
