"""Images of different sizes in one sequence: each gets the vector that it has alone."""

import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.model.packing import Segments

BASE = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=5)
MODELS = {
    "paper": {},
    "registers, rows of the class": dict(registers=2, rows="class", layer_scale=0.1),
    "rotary, mean": dict(position="rotary-dinov3", registers=1, pool="mean", qk_norm=True),
    "EVA-02": dict(position="rotary-eva02", mlp="gated", mlp_norm=True, pool="mean", pool_norm="after"),
    "Perception Encoder": dict(
        position="rotary-pe", norm_pre=True, pool="attention", pool_tokens="all", pool_heads=4
    ),
    "NaFlex": dict(class_token=False, pool="attention"),
    "sines at every block": dict(position="sincos2d", position_at="every", block="parallel"),
    "conv stem, learned2d": dict(embedding="conv", position="learned2d", pool="class-mean"),
}
SIZES = [(32, 32), (16, 40), (48, 8), (32, 32), (8, 64), (16, 40)]


def build(name="paper", **resize):
    return add_noise(vt.ViT(vt.ViTConfig(**BASE, **MODELS[name]))).accept_any_size(**resize)


def images_of(sizes=SIZES):
    return [torch.randn(3, *size) for size in sizes]


@pytest.mark.parametrize("name", MODELS)
def test_neighbors_do_not_change_a_vector(name):
    model, images = build(name), images_of()
    with torch.no_grad():
        packed = model.encode_packed(images)
        for image, vector in zip(images, packed, strict=True):
            alone = model.encode(image[None]).pooled[0]  # without packing
            assert (vector - alone).abs().max() < 1e-5
            assert (model.encode_packed([image])[0] - alone).abs().max() < 1e-5
    assert packed.abs().max() > 0.1


def test_what_others_show_does_not_matter():
    model, images = build("NaFlex"), images_of()
    with torch.no_grad():
        before = model.encode_packed(images)
        after = model.encode_packed([images[0], *(1e3 * image for image in images[1:])])
    assert (before[0] - after[0]).abs().max() < 1e-5
    assert (before[1:] - after[1:]).abs().max() > 1e-3


def test_positions_are_resized_as_the_family_does():
    model = build(method="bilinear", antialias=False)
    image = torch.randn(3, 16, 40)
    with torch.no_grad():
        resized = vt.surgery.resize(model, (16, 40), method="bilinear", antialias=False)
        expected = resized.encode(image[None]).pooled
        assert (model.encode_packed([image]) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("way", ["attend_by_length", "attend_nested"])
def test_every_way_to_attend_is_the_masked_one(way):
    lengths = [3, 3, 5, 1, 4]
    segments = Segments(lengths)
    q, k, v = (torch.randn(1, 2, sum(lengths), 8) for _ in range(3))
    mask = segments.dense(q.device)
    assert mask.sum() == sum(length**2 for length in lengths)
    expected = vt.model.attend(q, k, v, scale=0.3, mask=mask)
    got = getattr(segments, way)(q, k, v, scale=0.3)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("scale", [8**-0.5, 0.3])
def test_what_the_flash_kernel_is_given(scale, monkeypatch):
    """The kernel needs a GPU; this one does the same, as its documentation says."""
    import torch.nn.attention.varlen as varlen

    def kernel(q, k, v, starts_q, starts_k, most_q, most_k):
        assert starts_q.dtype == torch.int32
        assert most_q == most_k == 5
        lengths = starts_q.diff().tolist()
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        heads = [vt.model.attend(*(x.transpose(0, 1) for x in one), scale=8**-0.5) for one in parts]
        return torch.cat([one.transpose(0, 1) for one in heads])

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    segments = Segments([3, 3, 5, 1, 4])
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    expected = vt.model.attend(q, k, v, scale=scale, mask=segments.dense(q.device))
    assert (segments.attend_flash(q, k, v, scale=scale) - expected).abs().max() < 1e-5


def test_positions_are_resized_once_for_each_grid_and_stay_trainable():
    model, image = build(), torch.randn(3, 16, 40)
    with torch.inference_mode():
        expected = model.encode_packed([image])
    vector = model.train().encode_packed([image, image])
    assert (vector - expected).abs().max() < 1e-5
    vector.sum().backward()
    assert model.position.table.grad.abs().max() > 0


def test_attention_of_a_pack_can_be_recorded():
    model, images = build(), images_of([(32, 32), (16, 40)])
    with torch.no_grad():
        plain = model.encode_packed(images)
        with vt.record(model, "blocks.0.attention.weights") as tape:
            assert (model.encode_packed(images) - plain).abs().max() < 1e-5
    weights = tape["blocks.0.attention.weights"][0, 0]
    assert weights.shape == (17 + 11, 17 + 11)
    assert weights[:11, 11:].abs().max() == 0  # the smaller grid comes first


@pytest.mark.parametrize(
    ("change", "images", "message"),
    [
        (lambda m: setattr(m, "any_size", False), [torch.zeros(3, 32, 32)], "accept_any_size"),
        (lambda m: None, [], "at least one image"),
        (lambda m: None, [torch.zeros(1, 3, 32, 32)], r"not \(1, 3, 32, 32\); unbind the batch"),
        (lambda m: None, [torch.zeros(3, 30, 32)], r"shape \(batch, 3, 24, 32\)"),
    ],
)
def test_what_cannot_be_packed(change, images, message):
    model = build()
    change(model)
    with pytest.raises(vt.InputError, match=message):
        model.encode_packed(images)


def test_patches_are_not_dropped_from_a_pack():
    model = vt.ViT(vt.ViTConfig(**BASE, patch_dropout=0.5)).accept_any_size().train()
    with pytest.raises(vt.InputError, match=r"patch_dropout=0, or call model.eval\(\) first"):
        model.encode_packed(images_of())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_images_one_by_one(name):
    model, images = build(name).train(), images_of()
    logits = model(images)  # a list may hold different sizes
    logits.square().sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for image in images:
        model(image[None]).square().sum().backward()
    alone = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert packed.keys() == alone.keys()
    for parameter, gradient in alone.items():
        assert (packed[parameter] - gradient).abs().max() < 1e-4 * max(1, gradient.abs().max())


def test_drop_path_skips_each_image_by_itself():
    path, segments = vt.model.layers.DropPath(0.5).train(), Segments([3, 1, 4, 2] * 50)
    torch.manual_seed(0)
    out = path(torch.ones(1, 500, 2), segments)
    images = out[0].split(segments.lengths)
    assert all(len(image.unique()) == 1 for image in images)  # all tokens of an image, or none
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert 70 < sum(bool(image.any()) for image in images) < 130
