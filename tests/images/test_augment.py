"""Augmentation: independent of the batch split, and each operation against torchvision on photographs."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torchvision.transforms.v2 import functional as tv

from vitrail.base.errors import ConfigError
from vitrail.images.augment.color import HUE_QUARTER, TO_GRAY, adjust_colors
from vitrail.images.augment.pipeline import (
    _NAMES,
    Augment,
    affine_matrices,
    augment_batch,
    crop_numbers,
    draw_parameters,
    resample,
)
from vitrail.images.augment.randaugment import (
    MAX_MAGNITUDE,
    OPERATIONS,
    Operation,
    apply_pixel_operations,
    sample_operations,
    sharpen,
)
from vitrail.images.crop import place_crop, propose_crops
from vitrail.images.rng import random_uniform

OFF = Augment()
EVERYTHING = dict(
    crop=0.3, flip=0.5, rotate=10, translate=0.1, zoom=1.1, shear=5, erase=0.5,
    brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, gray=0.2, policy="randaugment",
)  # fmt: skip


@pytest.fixture(scope="module")
def photos():
    """Two photographs, (2, 3, 120, 120), uint8."""
    large = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    return large.movedim(-1, 1)[:, :, 40:400:3, 140:500:3].contiguous()


def make_images(count, channels=3, side=16):
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8)


def run(images, settings, *, seed=0, epoch=0, size=None, first=0):
    indices = torch.arange(first, first + len(images))
    return augment_batch(
        images, indices, settings, seed=seed, epoch=epoch, size=size or tuple(images.shape[-2:])
    )


def make_numbers(count, **values):
    """Random numbers in the middle of their range, which change nothing, except for `values`."""
    middle = {name: torch.full((count,), 0.5, dtype=torch.float64) for name in _NAMES}
    return middle | {name: torch.as_tensor(value).double().expand(count) for name, value in values.items()}


def make_operation(name, magnitude, sign=1.0, count=2, policy="randaugment", size=(120, 120)):
    """The same operation for all samples."""
    max_amounts = sample_operations(torch.zeros(1, 3), Augment(policy=policy), size)[0].max_amounts
    values = OPERATIONS.index(name), magnitude, sign
    index, magnitude, sign = (torch.full((count,), float(x)) for x in values)
    return Operation(index.long(), magnitude.double(), sign.double(), max_amounts)


def warp(x, settings=OFF, size=None, operations=(), finer=1, **values):
    size = size or tuple(x.shape[-2:])
    numbers = make_numbers(len(x), **values)
    matrix = affine_matrices(numbers, list(operations), settings, tuple(x.shape[-2:]), size)
    return resample(x, matrix, size, finer)


# ---- independence of the batch split ------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4, 13])
@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_a_sample_is_the_same_in_any_batch(channels, policy):
    settings = Augment(**EVERYTHING | dict(policy=policy))
    images, indices = make_images(23, channels, 17), torch.randperm(10**6)[:23]
    keys = dict(seed=5, epoch=3, size=(13, 19))
    batch = augment_batch(images, indices, settings, **keys)
    assert batch.shape == (23, channels, 13, 19)
    assert batch.dtype == torch.float32
    assert batch.min() >= 0
    assert batch.max() <= 1
    orders = [torch.randperm(23), torch.tensor([7]), *torch.arange(23).split(5), *torch.arange(23).split(16)]
    for order in orders:
        assert torch.equal(augment_batch(images[order], indices[order], settings, **keys), batch[order])
    assert torch.equal(augment_batch(images.float() / 255, indices, settings, **keys), batch)


def test_a_large_image_is_the_same_alone():
    """For a single image, torch would split the sum over the pixels among threads."""
    images, settings = torch.rand(12, 1, 301, 299), Augment(contrast=1.0)
    batch = run(images, settings)
    for i in range(12):
        assert torch.equal(run(images[i : i + 1], settings, first=i), batch[i : i + 1])


def test_seed_epoch_and_index_change_the_result():
    images, settings = make_images(1).expand(8, -1, -1, -1), Augment(crop=0.3)
    one = run(images, settings)
    others = [run(images, settings, seed=1), run(images, settings, epoch=1), run(images, settings, first=8)]
    for other in [*others, one.roll(1, 0)]:
        assert (one != other).flatten(1).any(1).all()


def test_numbers_are_independent_of_the_shuffling():
    """Otherwise the first samples of an epoch would be those that are flipped."""
    indices = torch.arange(400)
    images = torch.zeros(400, 1, 1, 2)
    images[..., 1] = 1
    flipped = run(images, Augment(flip=0.5))[:, 0, 0, 0]
    for stream in (random_uniform([0, 0, indices], 8), random_uniform([0, 0, 2, indices], 8)):
        for column in stream.unbind(1):
            assert abs(torch.corrcoef(torch.stack([column, flipped]))[0, 1]) < 0.25


# ---- no changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4, 13])
def test_no_augmentation_keeps_every_bit(channels):
    images = make_images(5, channels)
    assert torch.equal(run(images, Augment()), images / 255)
    assert torch.equal(run(images / 255, Augment()), images / 255)
    assert torch.equal(run((images / 255).double(), Augment()), images / 255)


def test_an_empty_batch():
    assert run(make_images(0), Augment(**EVERYTHING), size=(8, 9)).shape == (0, 3, 8, 9)


def test_a_policy_keeps_the_bits_of_samples_without_geometric_changes():
    """Sampling rounds, so identity and a flip must not go through it."""
    images, settings = make_images(300, side=11), Augment(policy="randaugment", policy_ops=1, flip=0.5)
    out, plain = run(images, settings), images / 255
    numbers, operations = draw_parameters(torch.arange(300), settings, 0, 0, (11, 11))
    idle = operations[0].selected("identity")
    flipped = numbers["flip"] < 0.5
    assert torch.equal(out[idle & flipped], plain.flip(-1)[idle & flipped])
    assert torch.equal(out[idle & ~flipped], plain[idle & ~flipped])
    assert (idle & flipped).sum() > 3
    assert (idle & ~flipped).sum() > 3


def test_magnitude_0_of_randaugment_changes_nothing_but_the_contrast(photos):
    photos = photos[..., ::4, ::4]
    for name in OPERATIONS[:-2]:
        steps = [make_operation(name, 0, size=(30, 30))]
        x = photos / 255
        assert torch.allclose(warp(x, operations=steps), x, atol=2e-5)
        x = sharpen(apply_pixel_operations(x, steps), 1 + steps[0].amount("sharpness"))
        assert torch.equal(adjust_colors(x, make_numbers(2), steps, Augment()), photos / 255), name


# ---- geometry -----------------------------------------------------------------------------------


def test_flip_is_torch_flip_with_its_probability():
    images = make_images(4000, 1, 4)
    out, plain = run(images, Augment(flip=0.3)), images / 255
    flipped = (out == plain.flip(-1)).flatten(1).all(1)
    assert (flipped | (out == plain).flatten(1).all(1)).all()
    assert abs(flipped.double().mean() - 0.3) < 5 * math.sqrt(0.21 / 4000)
    assert torch.equal(run(images, Augment(flip=1)), plain.flip(-1))


def test_rotation_by_90_degrees_is_rot90(photos):
    x = photos / 255
    for turns, draw, most in ((1, 1, 90), (3, 0, 90), (2, 1, 180)):
        assert torch.allclose(warp(x, Augment(rotate=most), rotate=draw), x.rot90(turns, (-2, -1)), atol=1e-4)


def test_translation_by_whole_pixels_repeats_the_border(photos):
    x = photos / 255
    out = warp(x, Augment(translate=0.25), translate_x=1, translate_y=0.5 - 0.5 * 12 / 30)  # 30 right, 12 up
    assert torch.allclose(out, F.pad(x, (30, 0, 0, 12), mode="replicate")[..., 12:, :120], atol=1e-4)


def test_zoom_is_about_the_center(photos):
    x = photos / 255
    double = F.interpolate(x[..., 30:90, 30:90], size=(120, 120), mode="bilinear")
    assert torch.allclose(
        warp(x, Augment(zoom=2), zoom=1)[..., 2:-2, 2:-2], double[..., 2:-2, 2:-2], atol=1e-4
    )


def test_a_crop_is_its_box_resized(photos):
    settings = Augment(crop=0.25)
    out = run(photos, settings, size=(90, 90))
    proposals = propose_crops(crop_numbers(0, 0, torch.arange(2)), 0.25, settings.crop_ratio)
    for image, result, box in zip(photos, out, place_crop(proposals, 120, 120, 4 / 3).tolist(), strict=True):
        top, left, h, w = box
        part = image[None, :, top : top + h, left : left + w] / 255
        expected = F.interpolate(part, size=(90, 90), mode="bilinear")[0]
        border = slice(2, -2)  # there, ours sees the pixels beyond the box
        assert torch.allclose(result[:, border, border], expected[:, border, border], atol=1e-4)


def test_without_a_crop_the_image_is_resized(photos):
    resized = F.interpolate(photos / 255, size=(90, 150), mode="bilinear")
    assert torch.allclose(run(photos, Augment(), size=(90, 150)), resized, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "name", "most"),
    [(Augment(rotate=20), "turn", 20.0), (Augment(translate=0.2), "across", 0.2), (Augment(zoom=1.3), "zoom", math.log(1.3))],
)  # fmt: skip
def test_geometric_parameters_are_uniform_in_their_ranges(settings, name, most):
    numbers, _ = draw_parameters(torch.arange(20_000), settings, 0, 0, (50, 50))
    m = affine_matrices(numbers, [], settings, (50, 50), (50, 50))
    found = {
        "turn": torch.atan2(m[:, 1, 0], m[:, 0, 0]).rad2deg(),
        "across": -m[:, 0, 2] / 50,
        "zoom": -(m[:, 0, 0] ** 2 + m[:, 0, 1] ** 2).sqrt().log(),
    }[name]
    assert found.abs().max() <= most + 1e-9
    shares = torch.histc(found / most, bins=10, min=-1, max=1) / 20_000
    assert (shares - 0.1).abs().max() < 5 * math.sqrt(0.09 / 20_000)


def test_shrinking_does_not_alias():
    """Stripes too fine for the output must become gray, not other stripes."""
    stripes = (torch.arange(120) % 5 < 2).float().expand(1, 1, 120, 120)
    out = run(stripes, Augment(), size=(30, 30))
    assert torch.allclose(out, F.avg_pool2d(stripes, 4), atol=1e-4)
    assert warp(stripes, size=(30, 30)).std() > 2.5 * out.std()  # what one point for each pixel does
    smooth = F.interpolate(stripes, size=(60, 60), mode="bilinear")
    assert torch.allclose(run(stripes, Augment(), size=(60, 60)), smooth, atol=1e-4)  # a half is a mean


def inside(image, function):
    """Where the border does not matter: torchvision fills with a constant, ours repeats the border."""
    return function(torch.ones_like(image)) > 0.999


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["rotate", "shear-x", "shear-y", "translate-x", "translate-y"])
def test_geometric_operations_of_the_policies_match_torchvision(photos, name, sign, policy):
    magnitude = 20
    wide = policy == "trivialaugment"
    part = sign * magnitude / MAX_MAGNITUDE
    turn = part * (135 if wide else 30)
    skew = math.degrees(math.atan(part * (0.99 if wide else 0.3)))
    shift = int(part * (32 if wide else 150 / 331 * 120))
    kinds = dict(interpolation=tv.InterpolationMode.BILINEAR, fill=[0.0])
    still = dict(angle=0.0, scale=1.0, **kinds)
    theirs = {
        "rotate": lambda x: tv.rotate(x, turn, **kinds),
        "shear-x": lambda x: tv.affine(x, translate=[0, 0], shear=[skew, 0.0], center=[0, 0], **still),
        "shear-y": lambda x: tv.affine(x, translate=[0, 0], shear=[0.0, skew], center=[0, 0], **still),
        "translate-x": lambda x: tv.affine(x, translate=[shift, 0], shear=[0.0, 0.0], **still),
        "translate-y": lambda x: tv.affine(x, translate=[0, shift], shear=[0.0, 0.0], **still),
    }[name]
    x = photos / 255
    known = inside(x, theirs)
    assert known.double().mean() > 0.3
    ours = warp(x, operations=[make_operation(name, magnitude, sign, policy=policy)])
    assert (ours - theirs(x))[known].abs().max() < 1e-3


def test_affine_matches_torchvision(photos):
    """Shear, rotation, zoom, translation, in this order (their angle has the other sign)."""
    x = photos / 255
    settings = Augment(rotate=20, zoom=1.2, shear=10, translate=0.1)
    ours = warp(x, settings, rotate=1, zoom=1, shear_x=1, shear_y=0, translate_x=1, translate_y=0)

    def theirs(x):
        kinds = dict(interpolation=tv.InterpolationMode.BILINEAR, fill=[0.0])
        return tv.affine(x, angle=-20.0, translate=[12, -12], scale=1.2, shear=[10.0, -10.0], **kinds)

    known = inside(x, theirs)
    assert (ours - theirs(x))[known].abs().max() < 1e-3


# ---- pixels and color --------------------------------------------------------------------------


@pytest.mark.parametrize("up", [0, 1])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colors_match_torchvision(photos, name, up):
    factor = 1.4 if up else 0.6
    theirs = getattr(tv, f"adjust_{name}")(photos / 255, factor)
    ours = adjust_colors(photos / 255, make_numbers(2, **{name: up}), [], Augment(**{name: 0.4}))
    assert (ours - theirs).abs().max() < 3e-4  # their weights of gray add up to 0.9999
    policy = adjust_colors(
        photos / 255,
        make_numbers(2),
        [make_operation(name, MAX_MAGNITUDE * 0.4 / 0.9, 1.0 if up else -1.0)],
        Augment(),
    )
    assert torch.allclose(policy, ours, atol=1e-5)


def test_grayscale_matches_torchvision(photos):
    ours = adjust_colors(photos / 255, make_numbers(2), [], Augment(gray=1, hue=0.3, saturation=0.3))
    assert (ours - tv.rgb_to_grayscale(photos / 255, num_output_channels=3)).abs().max() < 3e-4
    images = make_images(3000, side=2)
    gone = run(images, Augment(gray=0.2)).std(1).amax((1, 2)) < 1e-6
    assert abs(gone.double().mean() - 0.2) < 5 * math.sqrt(0.16 / 3000)


def colors_of(x):
    return x - torch.einsum("ij,bjhw->bihw", TO_GRAY.float(), x)


def test_hue_rotates_like_torchvision_but_keeps_the_gray_value(photos):
    """torchvision rotates on a hexagon and changes the gray value; ours rotates on a circle and keeps it.

    For 0.1 of a turn the colors are 0.03 apart on average (of 0.09), and complete pixels 0.07.
    """
    x = photos / 255
    for up in (0, 1):
        ours = adjust_colors(x, make_numbers(2, hue=up), [], Augment(hue=0.1))
        right, wrong = (tv.adjust_hue(x, sign * (0.1 if up else -0.1)) for sign in (1, -1))
        assert (ours - right).abs().mean() < 0.07
        apart, opposite = ((colors_of(ours) - colors_of(other)).abs().mean() for other in (right, wrong))
        assert apart < 0.03
        assert apart < 0.4 * opposite
    soft = 0.4 + 0.2 * x  # far enough from 0 and 1 that nothing is cut off
    turned = adjust_colors(soft, make_numbers(2, hue=1), [], Augment(hue=0.25))
    assert torch.allclose(tv.rgb_to_grayscale(turned), tv.rgb_to_grayscale(soft), atol=1e-4)
    assert torch.allclose(
        adjust_colors(turned, make_numbers(2, hue=0), [], Augment(hue=0.25)), soft, atol=1e-5
    )
    assert torch.allclose(HUE_QUARTER @ HUE_QUARTER, TO_GRAY - torch.eye(3), atol=1e-9)


def test_color_operations_compose(photos):
    """One matrix gives the same as one operation after the other, unless values are clamped in between."""
    x = 0.4 + 0.2 * photos / 255
    steps = [
        make_operation("contrast", 12),
        make_operation("saturation", 20, -1.0),
        make_operation("brightness", 5),
    ]
    given, settings = (
        dict(brightness=0.7, contrast=0.1, saturation=0.9),
        Augment(brightness=0.2, contrast=0.3, saturation=0.4),
    )
    ours = adjust_colors(x, make_numbers(2, **given), steps, settings)
    x = tv.adjust_contrast(x, 1 + 12 / 30 * 0.9)
    x = tv.adjust_saturation(x, 1 - 20 / 30 * 0.9)
    x = tv.adjust_brightness(x, 1 + 5 / 30 * 0.9)
    x = tv.adjust_saturation(tv.adjust_contrast(tv.adjust_brightness(x, 1.08), 0.76), 1.32)
    assert (ours - x).abs().max() < 5e-4


@pytest.mark.parametrize("channels", [1, 4, 13])
def test_only_brightness_and_contrast_without_three_channels(channels):
    x = make_images(2, channels) / 255
    assert torch.equal(
        adjust_colors(x, make_numbers(2, saturation=1, hue=1), [], Augment(saturation=1, hue=0.5, gray=1)), x
    )
    assert torch.equal(adjust_colors(x, make_numbers(2), [make_operation("saturation", 20)], Augment()), x)
    bright = adjust_colors(x, make_numbers(2, brightness=1), [], Augment(brightness=0.5))
    assert torch.allclose(bright, (x * 1.5).clamp(max=1))
    mean = x.mean((1, 2, 3), keepdim=True)
    flat = adjust_colors(x, make_numbers(2, contrast=0), [], Augment(contrast=0.5))
    assert torch.allclose(flat, (x + mean) / 2, atol=1e-5)


def map_pixels(images, *steps):
    return (apply_pixel_operations(images / 255, list(steps)) * 255).round().byte()


def test_pixel_operations_match_torchvision(photos):
    flat = torch.full_like(photos, 77)
    few = photos.clamp(100, 104)
    for images in (photos, photos // 2 + 30, flat, few):
        assert torch.equal(map_pixels(images, make_operation("equalize", 9)), tv.equalize(images))
        stretched = (
            map_pixels(images, make_operation("autocontrast", 9)).int() - tv.autocontrast(images).int()
        )
        assert stretched.abs().max() <= 1  # theirs rounds 254.9999 down
        images = images[..., ::4, ::4]
        for magnitude in range(1, MAX_MAGNITUDE + 1):
            solar = map_pixels(images, make_operation("solarize", magnitude))
            assert torch.equal(solar, tv.solarize(images, 255 * (MAX_MAGNITUDE - magnitude) / MAX_MAGNITUDE))
        for policy, most in (("randaugment", 4), ("trivialaugment", 6)):
            for magnitude in range(0, MAX_MAGNITUDE + 1, 3):
                bits = 8 - round(magnitude * most / MAX_MAGNITUDE)
                ours = map_pixels(images, make_operation("posterize", magnitude, -1.0, policy=policy))
                assert torch.equal(ours, tv.posterize(images, bits))


def test_pixel_operations_compose(photos):
    ours = map_pixels(
        photos, make_operation("solarize", 12), make_operation("equalize", 0), make_operation("posterize", 20)
    )
    theirs = tv.posterize(tv.equalize(tv.solarize(photos, 255 * 18 / 30)), 8 - round(20 * 4 / 30))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.9])
def test_sharpness_matches_torchvision(photos, factor):
    ours = sharpen(photos / 255, torch.full((2,), factor))
    assert torch.allclose(ours, tv.adjust_sharpness(photos / 255, factor), atol=1e-6)
    assert torch.equal(sharpen(photos[..., :2] / 255, torch.full((2,), factor)), photos[..., :2] / 255)


# ---- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_operations_are_uniform(policy):
    settings, count = Augment(policy=policy, policy_ops=2, policy_magnitude=7), 28_000
    steps = sample_operations(
        random_uniform([0, 0, torch.arange(count)], 3 * settings.operations).double(), settings, (32, 32)
    )
    assert len(steps) == (2 if policy == "randaugment" else 1)
    for one in steps:
        shares = torch.bincount(one.index, minlength=14) / count
        assert len(shares) == 14
        assert (shares - 1 / 14).abs().max() < 5 * math.sqrt(1 / 14 / count)
        assert abs(one.sign.mean()) < 5 / math.sqrt(count)
        assert set(one.sign.tolist()) == {-1.0, 1.0}
        magnitudes = torch.bincount(one.magnitude.long(), minlength=MAX_MAGNITUDE + 1) / count
        if policy == "randaugment":
            assert magnitudes[7] == 1
        else:
            assert len(magnitudes) == MAX_MAGNITUDE + 1
            assert (magnitudes - 1 / 31).abs().max() < 5 * math.sqrt(1 / 31 / count)
    if policy == "randaugment":
        assert abs(torch.corrcoef(torch.stack([steps[0].index, steps[1].index]).double())[0, 1]) < 0.03


def test_translations_of_randaugment_scale_with_the_output():
    assert make_operation("translate-x", MAX_MAGNITUDE, size=(40, 331)).amount("translate-x")[
        0
    ].item() == pytest.approx(150)
    assert make_operation("translate-y", MAX_MAGNITUDE, size=(331, 40)).amount("translate-y")[
        0
    ].item() == pytest.approx(150)
    assert (
        make_operation("translate-y", MAX_MAGNITUDE, size=(331, 40), policy="trivialaugment")
        .amount("translate-y")[0]
        .item()
        == 32
    )


def test_every_operation_of_a_policy_reaches_the_image(photos):
    """In a batch, each sample is what its own operation gives."""
    count = 60
    images = photos[:1, :, ::4, ::4].repeat(count, 1, 1, 1)
    out = run(images, Augment(policy="trivialaugment"))
    _, (one,) = draw_parameters(torch.arange(count), Augment(policy="trivialaugment"), 0, 0, (30, 30))
    theirs = {
        "identity": lambda x, a: x,
        "brightness": lambda x, a: tv.adjust_brightness(x, 1 + a),
        "saturation": lambda x, a: tv.adjust_saturation(x, 1 + a),
        "contrast": lambda x, a: tv.adjust_contrast(x, 1 + a),
        "sharpness": lambda x, a: tv.adjust_sharpness(x, 1 + a),
        "equalize": lambda x, a: tv.equalize(x),
    }
    seen = set()
    for i in range(count):
        name = OPERATIONS[one.index[i]]
        seen.add(name)
        if name in theirs:
            amount = one.amount(name)[i].item() if name in one.max_amounts else 0.0
            assert (out[i] - theirs[name](images[i] / 255, amount)).abs().max() < 1e-3, name
        elif one.magnitude[i] > 5 or name == "autocontrast":
            assert not torch.equal(out[i], images[i] / 255), name
    assert seen == set(OPERATIONS)


# ---- erasing ------------------------------------------------------------------------------------


def test_erased_boxes_have_the_configured_probability_and_areas():
    count, H, W = 3000, 40, 60
    out = run(torch.zeros(count, 1, H, W), Augment(erase=0.4, erase_area=0.5))[:, 0]
    assert set(out.unique().tolist()) == {0.0, 0.5}
    gone = out > 0
    hit = gone.flatten(1).any(1)
    assert abs(hit.double().mean() - 0.4) < 5 * math.sqrt(0.24 / count)
    rows, columns = gone.any(2).sum(1)[hit], gone.any(1).sum(1)[hit]
    area = gone.flatten(1).sum(1)[hit]
    assert torch.equal(rows * columns, area)  # a box
    share = area / (H * W)
    assert 0.015 < share.min() < 0.04
    assert 0.45 < share.max() < 0.52
    assert abs(share.mean() - 0.26) < 0.02
    assert (rows / H / (columns / W)).log().abs().max() < math.log(3.3) + 0.3
    everywhere = gone.double().mean(0)
    assert min(everywhere[0].max(), everywhere[-1].max(), everywhere[:, 0].max(), everywhere[:, -1].max()) > 0
    assert abs(everywhere[:, :30].mean() / everywhere[:, 30:].mean() - 1) < 0.1


def test_the_complete_image_can_be_erased():
    assert (run(torch.zeros(50, 2, 1, 1), Augment(erase=1, erase_area=1)) == 0.5).all()


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(crop=0), "crop must be above 0 and at most 1, not 0"),
        (dict(crop=1.1), "crop must be above 0 and at most 1, not 1.1"),
        (dict(crop_ratio=0.5), "crop_ratio must be from 1 to 10"),
        (dict(flip=-0.1), "flip must be from 0 to 1, not -0.1"),
        (dict(rotate=181), "rotate must be from 0 to 180"),
        (dict(translate=2), "translate must be from 0 to 1"),
        (dict(zoom=0.9), "zoom must be from 1 to 10"),
        (dict(shear=90), "shear must be from 0 to 80"),
        (dict(brightness=1.5), "brightness must be from 0 to 1"),
        (dict(contrast="no"), "contrast must be from 0 to 1, not 'no'"),
        (dict(saturation=-1), "saturation must be from 0 to 1"),
        (dict(hue=0.6), "hue must be from 0 to 0.5"),
        (dict(gray=True), "gray must be from 0 to 1, not True"),
        (
            dict(policy="randaug"),
            "unknown policy 'randaug'.*'randaugment'.*none, randaugment, trivialaugment",
        ),
        (dict(policy_ops=15), "policy_ops must be an integer from 1 to 14, not 15"),
        (dict(policy_ops=0), "policy_ops must be an integer from 1 to 14, not 0"),
        (dict(policy_magnitude=31), "policy_magnitude must be an integer from 0 to 30, not 31"),
        (dict(erase=2), "erase must be from 0 to 1"),
        (dict(erase_area=0.01), "erase_area must be from 0.02 to 1"),
    ],
)
def test_invalid_settings(fields, message):
    with pytest.raises(ConfigError, match=message):
        Augment(**fields)


def test_the_fields_are_documented():
    assert "translate (default 0.0): The largest translation" in Augment.__doc__
    assert Augment(policy="trivialaugment").policy == "trivialaugment"
