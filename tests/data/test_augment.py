"""Augmentation: the same picture whoever asks, and each change against torchvision's on photographs."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torchvision.transforms.v2 import functional as tv

from vitrail.data.augment import NAMES, TO_GREY, TWIST, Augment, augment, places, recolour, resample
from vitrail.data.chance import uniform
from vitrail.data.policy import LAST, OPS, Step, draw_steps, map_levels, sharpen
from vitrail.errors import ConfigError, InputError

OFF = Augment()
EVERYTHING = dict(
    crop=0.3, flip=0.5, turn=10, shift=0.1, zoom=1.1, shear=5, erase=0.5,
    brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.2, policy="randaugment",
)  # fmt: skip


@pytest.fixture(scope="module")
def photos():
    """Two photographs, (2, 3, 120, 120), uint8."""
    whole = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    return whole.movedim(-1, 1)[:, :, 40:400:3, 140:500:3].contiguous()


def pictures(count, channels=3, side=16):
    return torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8)


def run(images, settings, *, seed=0, epoch=0, size=None, first=0):
    indices = torch.arange(first, first + len(images))
    return augment(images, indices, settings, seed=seed, epoch=epoch, size=size or tuple(images.shape[-2:]))


def drawn(count, **given):
    """Numbers that change nothing, but for those given."""
    middle = {name: torch.full((count,), 0.5, dtype=torch.float64) for name in NAMES}
    return middle | {name: torch.as_tensor(value).double().expand(count) for name, value in given.items()}


def step(name, strength, sign=1.0, count=2, policy="randaugment", size=(120, 120)):
    """The same operation for all samples."""
    most = draw_steps(torch.zeros(1, 3), Augment(policy=policy), size)[0].most
    op, strength, sign = (torch.full((count,), float(x)) for x in (OPS.index(name), strength, sign))
    return Step(op.long(), strength.double(), sign.double(), most)


def moved(x, settings=OFF, size=None, steps=(), finer=1, **given):
    size = size or tuple(x.shape[-2:])
    matrix = places(drawn(len(x), **given), list(steps), settings, tuple(x.shape[-2:]), size)
    return resample(x, matrix, size, finer)


# ---- whoever asks -------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4, 13])
@pytest.mark.parametrize("policy", ["randaugment", "trivial"])
def test_a_sample_is_the_same_in_any_batch(channels, policy):
    settings = Augment(**EVERYTHING | dict(policy=policy))
    images, indices = pictures(23, channels, 17), torch.randperm(10**6)[:23]
    keys = dict(seed=5, epoch=3, size=(13, 19))
    whole = augment(images, indices, settings, **keys)
    assert whole.shape == (23, channels, 13, 19)
    assert whole.dtype == torch.float32
    assert whole.min() >= 0
    assert whole.max() <= 1
    orders = [torch.randperm(23), torch.tensor([7]), *torch.arange(23).split(5), *torch.arange(23).split(16)]
    for order in orders:
        assert torch.equal(augment(images[order], indices[order], settings, **keys), whole[order])
    assert torch.equal(augment(images.float() / 255, indices, settings, **keys), whole)


def test_a_large_picture_alone_is_the_same_too():
    """Alone, torch would share out the sum over its pixels among threads."""
    images, settings = torch.rand(12, 1, 301, 299), Augment(contrast=1.0)
    whole = run(images, settings)
    for i in range(12):
        assert torch.equal(run(images[i : i + 1], settings, first=i), whole[i : i + 1])


def test_another_seed_epoch_or_sample_differs():
    images, settings = pictures(1).expand(8, -1, -1, -1), Augment(crop=0.3)
    one = run(images, settings)
    others = [run(images, settings, seed=1), run(images, settings, epoch=1), run(images, settings, first=8)]
    for other in [*others, one.roll(1, 0)]:
        assert (one != other).flatten(1).any(1).all()


def test_numbers_are_not_those_that_shuffle_the_dataset():
    """Or the samples that come first in an epoch would be those that are mirrored."""
    indices = torch.arange(400)
    images = torch.zeros(400, 1, 1, 2)
    images[..., 1] = 1
    flipped = run(images, Augment(flip=0.5))[:, 0, 0, 0]
    for stream in (uniform([0, 0, indices], 8), uniform([0, 0, 2, indices], 8)):
        for column in stream.unbind(1):
            assert abs(torch.corrcoef(torch.stack([column, flipped]))[0, 1]) < 0.25


# ---- nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4, 13])
def test_off_keeps_every_bit(channels):
    images = pictures(5, channels)
    assert torch.equal(run(images, Augment()), images / 255)
    assert torch.equal(run(images / 255, Augment()), images / 255)
    assert torch.equal(run((images / 255).double(), Augment()), images / 255)


def test_an_empty_batch():
    assert run(pictures(0), Augment(**EVERYTHING), size=(8, 9)).shape == (0, 3, 8, 9)


def test_a_policy_leaves_alone_what_it_does_not_move():
    """Sampling rounds; identity, and a flip with it, must not go through it."""
    images, settings = pictures(300, side=11), Augment(policy="randaugment", policy_count=1, flip=0.5)
    out, plain = run(images, settings), images / 255
    chance = uniform([0, 0, 1, torch.arange(300)], len(NAMES) + 3).double()
    idle = draw_steps(chance[:, len(NAMES) :], settings, (11, 11))[0].drew("identity")
    flipped = chance[:, NAMES.index("flip")] < 0.5
    assert torch.equal(out[idle & flipped], plain.flip(-1)[idle & flipped])
    assert torch.equal(out[idle & ~flipped], plain[idle & ~flipped])
    assert (idle & flipped).sum() > 3
    assert (idle & ~flipped).sum() > 3


def test_strength_0_of_randaugment_does_nothing_but_stretch_levels(photos):
    photos = photos[..., ::4, ::4]
    for name in OPS[:-2]:
        steps = [step(name, 0, size=(30, 30))]
        x = photos / 255
        assert torch.allclose(moved(x, steps=steps), x, atol=2e-5)
        x = sharpen(map_levels(x, steps), 1 + steps[0].amount("sharpness"))
        assert torch.equal(recolour(x, drawn(2), steps, Augment()), photos / 255), name


# ---- place --------------------------------------------------------------------------------------


def test_flip_is_torch_flip_at_its_rate():
    images = pictures(4000, 1, 4)
    out, plain = run(images, Augment(flip=0.3)), images / 255
    flipped = (out == plain.flip(-1)).flatten(1).all(1)
    assert (flipped | (out == plain).flatten(1).all(1)).all()
    assert abs(flipped.double().mean() - 0.3) < 5 * math.sqrt(0.21 / 4000)
    assert torch.equal(run(images, Augment(flip=1)), plain.flip(-1))


def test_turn_by_quarters_is_rot90(photos):
    x = photos / 255
    for turns, draw, most in ((1, 1, 90), (3, 0, 90), (2, 1, 180)):
        assert torch.allclose(moved(x, Augment(turn=most), turn=draw), x.rot90(turns, (-2, -1)), atol=1e-4)


def test_shift_by_whole_pixels_repeats_the_border(photos):
    x = photos / 255
    out = moved(x, Augment(shift=0.25), across=1, down=0.5 - 0.5 * 12 / 30)  # 30 right, 12 up
    assert torch.allclose(out, F.pad(x, (30, 0, 0, 12), mode="replicate")[..., 12:, :120], atol=1e-4)


def test_zoom_about_the_centre(photos):
    x = photos / 255
    double = F.interpolate(x[..., 30:90, 30:90], size=(120, 120), mode="bilinear")
    assert torch.allclose(
        moved(x, Augment(zoom=2), zoom=1)[..., 2:-2, 2:-2], double[..., 2:-2, 2:-2], atol=1e-4
    )


def test_crop_is_its_box_resized(photos):
    x = photos / 255
    given = dict(area=0.0, ratio=0.5, left=0.25, top=0.75)
    out = moved(x, Augment(crop=0.25), size=(90, 90), **given)  # a box of 60 x 60, at 15, 45
    box = F.interpolate(x[..., 45:105, 15:75], size=(90, 90), mode="bilinear")
    assert torch.allclose(out[..., 2:-2, 2:-2], box[..., 2:-2, 2:-2], atol=1e-4)  # it sees beyond the box
    whole = F.interpolate(x, size=(90, 150), mode="bilinear")
    assert torch.allclose(run(photos, Augment(), size=(90, 150)), whole, atol=1e-4)


def test_crops_have_the_areas_and_shapes_asked_for():
    settings = Augment(crop=0.2, crop_ratio=1.5)
    draws = dict(zip(NAMES, uniform([0, 0, 1, torch.arange(20_000)], len(NAMES)).double().T, strict=True))
    matrix = places(draws, [], settings, (40, 60), (30, 20))
    width, height = matrix[:, 0, 0] * 20, matrix[:, 1, 1] * 30
    area, stretch = width * height / (40 * 60), (width / height) / (20 / 30)
    assert area.min() > 0.2 - 1e-9
    assert area.max() <= 1
    assert stretch.min() > 1 / 1.5 - 1e-9
    assert stretch.max() < 1.5 + 1e-9
    assert stretch.log().abs().max() > 0.99 * math.log(1.5)
    assert abs(stretch.log().mean()) < 0.01
    for centre, side, length in ((matrix[:, 0, 2], width, 60), (matrix[:, 1, 2], height, 40)):
        assert (centre.abs() + side / 2).max() <= length / 2 + 1e-9  # never outside
        free = centre / ((length - side) / 2)
        assert abs(free.mean()) < 0.03
        assert abs(free.var() - 1 / 3) < 0.02  # even from -1 to 1
    least = places(draws, [], Augment(crop=1.0, crop_ratio=1.0), (40, 60), (30, 20))
    assert torch.allclose(least[:, 1, 1], torch.tensor(40 / 30).double())  # what fits, where crop does not


@pytest.mark.parametrize(
    ("settings", "name", "most"),
    [(Augment(turn=20), "turn", 20.0), (Augment(shift=0.2), "across", 0.2), (Augment(zoom=1.3), "zoom", math.log(1.3))],
)  # fmt: skip
def test_places_are_even_in_their_ranges(settings, name, most):
    draws = dict(zip(NAMES, uniform([0, 0, 1, torch.arange(20_000)], len(NAMES)).double().T, strict=True))
    m = places(draws, [], settings, (50, 50), (50, 50))
    found = {
        "turn": torch.atan2(m[:, 1, 0], m[:, 0, 0]).rad2deg(),
        "across": -m[:, 0, 2] / 50,
        "zoom": -(m[:, 0, 0] ** 2 + m[:, 0, 1] ** 2).sqrt().log(),
    }[name]
    assert found.abs().max() <= most + 1e-9
    shares = torch.histc(found / most, bins=10, min=-1, max=1) / 20_000
    assert (shares - 0.1).abs().max() < 5 * math.sqrt(0.09 / 20_000)


def test_shrinking_does_not_alias():
    """Stripes too fine for the output must become grey, not other stripes."""
    stripes = (torch.arange(120) % 5 < 2).float().expand(1, 1, 120, 120)
    out = run(stripes, Augment(), size=(30, 30))
    assert torch.allclose(out, F.avg_pool2d(stripes, 4), atol=1e-4)
    assert moved(stripes, size=(30, 30)).std() > 2.5 * out.std()  # what one point for each pixel does
    smooth = F.interpolate(stripes, size=(60, 60), mode="bilinear")
    assert torch.allclose(run(stripes, Augment(), size=(60, 60)), smooth, atol=1e-4)  # a half is a mean


def inside(image, function):
    """Where the bordering does not matter: torchvision fills with a level, we repeat the border."""
    return function(torch.ones_like(image)) > 0.999


@pytest.mark.parametrize("policy", ["randaugment", "trivial"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["turn", "shear-x", "shear-y", "shift-x", "shift-y"])
def test_policy_places_are_those_of_torchvision(photos, name, sign, policy):
    strength = 20
    wide = policy == "trivial"
    part = sign * strength / LAST
    turn = part * (135 if wide else 30)
    skew = math.degrees(math.atan(part * (0.99 if wide else 0.3)))
    shift = int(part * (32 if wide else 150 / 331 * 120))
    kinds = dict(interpolation=tv.InterpolationMode.BILINEAR, fill=[0.0])
    still = dict(angle=0.0, scale=1.0, **kinds)
    theirs = {
        "turn": lambda x: tv.rotate(x, turn, **kinds),
        "shear-x": lambda x: tv.affine(x, translate=[0, 0], shear=[skew, 0.0], center=[0, 0], **still),
        "shear-y": lambda x: tv.affine(x, translate=[0, 0], shear=[0.0, skew], center=[0, 0], **still),
        "shift-x": lambda x: tv.affine(x, translate=[shift, 0], shear=[0.0, 0.0], **still),
        "shift-y": lambda x: tv.affine(x, translate=[0, shift], shear=[0.0, 0.0], **still),
    }[name]
    x = photos / 255
    known = inside(x, theirs)
    assert known.double().mean() > 0.3
    ours = moved(x, steps=[step(name, strength, sign, policy=policy)])
    assert (ours - theirs(x))[known].abs().max() < 1e-3


def test_jitter_is_an_affine_of_torchvision(photos):
    """Sheared, turned, zoomed, shifted, in this order (their angle runs the other way round)."""
    x = photos / 255
    settings = Augment(turn=20, zoom=1.2, shear=10, shift=0.1)
    ours = moved(x, settings, turn=1, zoom=1, shear_x=1, shear_y=0, across=1, down=0)

    def theirs(x):
        kinds = dict(interpolation=tv.InterpolationMode.BILINEAR, fill=[0.0])
        return tv.affine(x, angle=-20.0, translate=[12, -12], scale=1.2, shear=[10.0, -10.0], **kinds)

    known = inside(x, theirs)
    assert (ours - theirs(x))[known].abs().max() < 1e-3


# ---- level and colour ---------------------------------------------------------------------------


@pytest.mark.parametrize("up", [0, 1])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_are_those_of_torchvision(photos, name, up):
    factor = 1.4 if up else 0.6
    theirs = getattr(tv, f"adjust_{name}")(photos / 255, factor)
    ours = recolour(photos / 255, drawn(2, **{name: up}), [], Augment(**{name: 0.4}))
    assert (ours - theirs).abs().max() < 3e-4  # their weights of grey add up to 0.9999
    policy = recolour(photos / 255, drawn(2), [step(name, LAST * 0.4 / 0.9, 1.0 if up else -1.0)], Augment())
    assert torch.allclose(policy, ours, atol=1e-5)


def test_grey_is_that_of_torchvision(photos):
    ours = recolour(photos / 255, drawn(2), [], Augment(grey=1, hue=0.3, saturation=0.3))
    assert (ours - tv.rgb_to_grayscale(photos / 255, num_output_channels=3)).abs().max() < 3e-4
    images = pictures(3000, side=2)
    gone = run(images, Augment(grey=0.2)).std(1).amax((1, 2)) < 1e-6
    assert abs(gone.double().mean() - 0.2) < 5 * math.sqrt(0.16 / 3000)


def colours_of(x):
    return x - torch.einsum("ij,bjhw->bihw", TO_GREY.float(), x)


def test_hue_turns_as_torchvision_does_but_keeps_the_grey(photos):
    """Theirs turns round a hexagon and changes the grey; ours turns round a circle and keeps it.

    For 0.1 of a turn the colours are 0.03 apart on average (of 0.09), and whole pixels 0.07.
    """
    x = photos / 255
    for up in (0, 1):
        ours = recolour(x, drawn(2, hue=up), [], Augment(hue=0.1))
        right, wrong = (tv.adjust_hue(x, sign * (0.1 if up else -0.1)) for sign in (1, -1))
        assert (ours - right).abs().mean() < 0.07
        apart, opposite = ((colours_of(ours) - colours_of(other)).abs().mean() for other in (right, wrong))
        assert apart < 0.03
        assert apart < 0.4 * opposite
    soft = 0.4 + 0.2 * x  # far enough from 0 and 1 that nothing is cut off
    turned = recolour(soft, drawn(2, hue=1), [], Augment(hue=0.25))
    assert torch.allclose(tv.rgb_to_grayscale(turned), tv.rgb_to_grayscale(soft), atol=1e-4)
    assert torch.allclose(recolour(turned, drawn(2, hue=0), [], Augment(hue=0.25)), soft, atol=1e-5)
    assert torch.allclose(TWIST @ TWIST, TO_GREY - torch.eye(3), atol=1e-9)


def test_colours_follow_each_other(photos):
    """One matrix is what one after the other gives, as long as nothing is cut off on the way."""
    x = 0.4 + 0.2 * photos / 255
    steps = [step("contrast", 12), step("saturation", 20, -1.0), step("brightness", 5)]
    given, settings = (
        dict(brightness=0.7, contrast=0.1, saturation=0.9),
        Augment(brightness=0.2, contrast=0.3, saturation=0.4),
    )
    ours = recolour(x, drawn(2, **given), steps, settings)
    x = tv.adjust_contrast(x, 1 + 12 / 30 * 0.9)
    x = tv.adjust_saturation(x, 1 - 20 / 30 * 0.9)
    x = tv.adjust_brightness(x, 1 + 5 / 30 * 0.9)
    x = tv.adjust_saturation(tv.adjust_contrast(tv.adjust_brightness(x, 1.08), 0.76), 1.32)
    assert (ours - x).abs().max() < 5e-4


@pytest.mark.parametrize("channels", [1, 4, 13])
def test_other_channels_have_brightness_and_contrast_only(channels):
    x = pictures(2, channels) / 255
    assert torch.equal(
        recolour(x, drawn(2, saturation=1, hue=1), [], Augment(saturation=1, hue=0.5, grey=1)), x
    )
    assert torch.equal(recolour(x, drawn(2), [step("saturation", 20)], Augment()), x)
    bright = recolour(x, drawn(2, brightness=1), [], Augment(brightness=0.5))
    assert torch.allclose(bright, (x * 1.5).clamp(max=1))
    mean = x.mean((1, 2, 3), keepdim=True)
    flat = recolour(x, drawn(2, contrast=0), [], Augment(contrast=0.5))
    assert torch.allclose(flat, (x + mean) / 2, atol=1e-5)


def levels(images, *steps):
    return (map_levels(images / 255, list(steps)) * 255).round().byte()


def test_levels_are_those_of_torchvision(photos):
    flat = torch.full_like(photos, 77)
    few = photos.clamp(100, 104)
    for images in (photos, photos // 2 + 30, flat, few):
        assert torch.equal(levels(images, step("equalize", 9)), tv.equalize(images))
        stretched = levels(images, step("autocontrast", 9)).int() - tv.autocontrast(images).int()
        assert stretched.abs().max() <= 1  # theirs rounds 254.9999 down
        images = images[..., ::4, ::4]
        for strength in range(1, LAST + 1):
            solar = levels(images, step("solarize", strength))
            assert torch.equal(solar, tv.solarize(images, 255 * (LAST - strength) / LAST))
        for policy, most in (("randaugment", 4), ("trivial", 6)):
            for strength in range(0, LAST + 1, 3):
                bits = 8 - round(strength * most / LAST)
                ours = levels(images, step("posterize", strength, -1.0, policy=policy))
                assert torch.equal(ours, tv.posterize(images, bits))


def test_levels_follow_each_other(photos):
    ours = levels(photos, step("solarize", 12), step("equalize", 0), step("posterize", 20))
    theirs = tv.posterize(tv.equalize(tv.solarize(photos, 255 * 18 / 30)), 8 - round(20 * 4 / 30))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.9])
def test_sharpness_is_that_of_torchvision(photos, factor):
    ours = sharpen(photos / 255, torch.full((2,), factor))
    assert torch.allclose(ours, tv.adjust_sharpness(photos / 255, factor), atol=1e-6)
    assert torch.equal(sharpen(photos[..., :2] / 255, torch.full((2,), factor)), photos[..., :2] / 255)


# ---- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["randaugment", "trivial"])
def test_operations_are_drawn_evenly(policy):
    settings, count = Augment(policy=policy, policy_count=2, policy_strength=7), 28_000
    steps = draw_steps(uniform([0, 0, torch.arange(count)], 3 * settings.steps).double(), settings, (32, 32))
    assert len(steps) == (2 if policy == "randaugment" else 1)
    for one in steps:
        shares = torch.bincount(one.op, minlength=14) / count
        assert len(shares) == 14
        assert (shares - 1 / 14).abs().max() < 5 * math.sqrt(1 / 14 / count)
        assert abs(one.sign.mean()) < 5 / math.sqrt(count)
        assert set(one.sign.tolist()) == {-1.0, 1.0}
        strengths = torch.bincount(one.strength.long(), minlength=LAST + 1) / count
        if policy == "randaugment":
            assert strengths[7] == 1
        else:
            assert len(strengths) == LAST + 1
            assert (strengths - 1 / 31).abs().max() < 5 * math.sqrt(1 / 31 / count)
    if policy == "randaugment":
        assert abs(torch.corrcoef(torch.stack([steps[0].op, steps[1].op]).double())[0, 1]) < 0.03


def test_shifts_of_randaugment_grow_with_the_output():
    assert step("shift-x", LAST, size=(40, 331)).amount("shift-x")[0].item() == pytest.approx(150)
    assert step("shift-y", LAST, size=(331, 40)).amount("shift-y")[0].item() == pytest.approx(150)
    assert step("shift-y", LAST, size=(331, 40), policy="trivial").amount("shift-y")[0].item() == 32


def test_every_operation_of_a_policy_reaches_the_picture(photos):
    """Run as a whole, each sample is what its own operation gives."""
    count = 60
    images = photos[:1, :, ::4, ::4].repeat(count, 1, 1, 1)
    out = run(images, Augment(policy="trivial"))
    chance = uniform([0, 0, 1, torch.arange(count)], len(NAMES) + 3).double()
    one = draw_steps(chance[:, len(NAMES) :], Augment(policy="trivial"), (30, 30))[0]
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
        name = OPS[one.op[i]]
        seen.add(name)
        if name in theirs:
            amount = one.amount(name)[i].item() if name in one.most else 0.0
            assert (out[i] - theirs[name](images[i] / 255, amount)).abs().max() < 1e-3, name
        elif one.strength[i] > 5 or name == "autocontrast":
            assert not torch.equal(out[i], images[i] / 255), name
    assert seen == set(OPS)


# ---- erasing ------------------------------------------------------------------------------------


def test_erased_boxes_have_the_rate_and_areas_asked_for():
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


def test_all_may_be_erased():
    assert (run(torch.zeros(50, 2, 1, 1), Augment(erase=1, erase_area=1)) == 0.5).all()


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(crop=0), "crop must be above 0 and at most 1. Got crop=0. Set crop to such a number."),
        (dict(crop=1.1), "crop must be above 0 and at most 1. Got crop=1.1. Set crop to such a number."),
        (dict(crop_ratio=0.5), "crop_ratio must be from 1 to 10. Got crop_ratio=0.5. Set crop_ratio to such a number."),
        (dict(flip=-0.1), "flip must be from 0 to 1. Got flip=-0.1. Set flip to such a number."),
        (dict(turn=181), "turn must be from 0 to 180. Got turn=181. Set turn to such a number."),
        (dict(shift=2), "shift must be from 0 to 1. Got shift=2. Set shift to such a number."),
        (dict(zoom=0.9), "zoom must be from 1 to 10. Got zoom=0.9. Set zoom to such a number."),
        (dict(shear=90), "shear must be from 0 to 80. Got shear=90. Set shear to such a number."),
        (dict(brightness=1.5), "brightness must be from 0 to 1. Got brightness=1.5. Set brightness to such a number."),
        (dict(contrast="no"), "contrast must be from 0 to 1. Got contrast='no'. Set contrast to such a number."),
        (dict(saturation=-1), "saturation must be from 0 to 1. Got saturation=-1. Set saturation to such a number."),
        (dict(hue=0.6), "hue must be from 0 to 0.5. Got hue=0.6. Set hue to such a number."),
        (dict(grey=True), "grey must be from 0 to 1. Got grey=True. Set grey to such a number."),
        (dict(policy="randaug"), "policy must be one of its words. Got policy='randaug'. Did you mean 'randaugment'? There is: none, randaugment, trivial."),
        (dict(policy_count=15), "policy_count must be at most 14. Got policy_count=15. Set policy_count to 14 or less."),
        (dict(policy_count=0), "policy_count must be a whole number from 1 to 1,000,000,000,000. Got policy_count=0. Set policy_count to a whole number."),
        (dict(policy_strength=31), "policy_strength must be at most 30. Got policy_strength=31. Set policy_strength to 30 or less."),
        (dict(erase=2), "erase must be from 0 to 1. Got erase=2. Set erase to such a number."),
        (dict(erase_area=0.01), "erase_area must be from 0.02 to 1. Got erase_area=0.01. Set erase_area to such a number."),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(given, message):
    with pytest.raises(ConfigError) as caught:
        Augment(**given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("images", "indices", "size", "message"),
    [
        (torch.zeros(3, 4, 4), torch.arange(3), (4, 4), "Pictures must be (B, C, H, W), uint8 or floats. Got torch.float32 (3, 4, 4). Stack them, with levels from 0 to 255 or from 0 to 1."),
        (torch.zeros(1, 3, 4, 4).int(), torch.arange(1), (4, 4), "Pictures must be (B, C, H, W), uint8 or floats. Got torch.int32 (1, 3, 4, 4). Stack them, with levels from 0 to 255 or from 0 to 1."),
        (torch.zeros(2, 3, 4, 4), torch.arange(3), (4, 4), "Indices must be 2 whole numbers (int64), one for each picture. Got torch.int64 (3,). Give each sample's place in the dataset."),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2), (4, 4), "Indices must be 2 whole numbers (int64), one for each picture. Got torch.float32 (2,). Give each sample's place in the dataset."),
        (torch.zeros(2, 3, 4, 4), torch.arange(2), (4, 0), "Pictures must have pixels, before and after. Got (2, 3, 4, 4) to (4, 0). Give size as (height, width), both at least 1."),
        (torch.zeros(2, 3, 0, 4), torch.arange(2), (4, 4), "Pictures must have pixels, before and after. Got (2, 3, 0, 4) to (4, 4). Give size as (height, width), both at least 1."),
    ],
)  # fmt: skip
def test_pictures_that_do_not_fit(images, indices, size, message):
    with pytest.raises(InputError) as caught:
        augment(images, indices, Augment(), seed=0, epoch=0, size=size)
    assert str(caught.value) == message
