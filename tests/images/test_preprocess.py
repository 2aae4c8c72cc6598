"""The same pixels as timm, torchvision and transformers, on photographs; and every mode of image."""

import dataclasses
import io
import json
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import timm.data
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from tests.support.shared_data import SHARED, shared
from vitrail.base.errors import ConfigError, InputError
from vitrail.images.preprocess import INTERPOLATIONS, Preprocess
from vitrail.images.published_preprocess import (
    PUBLISHED,
    from_hf,
    from_timm,
    published_preprocess,
    to_hf,
    to_timm,
)

INSECTS = SHARED / "data" / "hymenoptera_s160.tar"
# torchvision resizes uint8 pixels bilinearly only where that is fast, and floats elsewhere.
NATIVE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or "arm" in platform.machine()


def photographs():
    """Landscape, portrait and sides that leave half a pixel over at every crop below."""
    wide, flower = (Image.fromarray(image) for image in load_sample_images().images)
    yield "china", wide
    yield "flower on its side", flower.transpose(Image.Transpose.ROTATE_90)
    yield "china cut to 379x611", wide.crop((0, 0, 611, 379))
    yield "flower cut to 401x255", flower.crop((0, 0, 255, 401))
    yield "a small square", wide.resize((80, 80))
    if INSECTS.exists():
        with tarfile.open(INSECTS) as tar:
            for name in [name for name in tar.getnames() if name.endswith(".jpg")][::80]:
                image = Image.open(io.BytesIO(tar.extractfile(name).read()))
                yield Path(name).name, ImageOps.exif_transpose(image).convert("RGB")


PHOTOS = dict(photographs())


@pytest.fixture
def china():
    return PHOTOS["china"]


def test_there_are_photographs_of_insects_too():
    shared("data/hymenoptera_s160.tar")
    assert len(PHOTOS) >= 9
    assert {image.width > image.height for image in PHOTOS.values()} == {True, False}


def pixels_of(x, spec):
    """The pixels that a model input was made from."""
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (spec.mean, spec.std))
    exact = (x.double() * std + mean) / spec.scale
    assert (exact - exact.round()).abs().max() < 1e-3
    return exact.round().int()


# ---- parity -------------------------------------------------------------------------------------

TIMM = [
    dict(input_size=(3, 224, 224), crop_pct=0.9, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3),
    dict(input_size=(3, 224, 224), crop_pct=0.875, interpolation="bilinear"),
    dict(input_size=(3, 224, 224), crop_pct=1.0, interpolation="bicubic"),
    dict(input_size=(3, 96, 96), crop_pct=0.875, interpolation="lanczos"),
    dict(input_size=(3, 96, 96), crop_pct=0.95, interpolation="bicubic", crop_mode="center"),
    dict(input_size=(3, 96, 96), crop_pct=1.0, interpolation="nearest"),
    dict(input_size=(3, 96, 96), crop_pct=0.9, interpolation="bilinear", crop_mode="squash"),
    dict(input_size=(3, 96, 160), crop_pct=0.9, interpolation="bicubic", crop_mode="squash"),
    dict(input_size=(3, 224, 224), crop_pct=1.0, interpolation="box", crop_mode="squash"),
    dict(input_size=(3, 97, 97), crop_pct=0.96, interpolation="hamming"),
]


@pytest.mark.parametrize("config", TIMM, ids=str)
def test_timm_gives_the_same_bits(config):
    config = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), **config}
    peer, spec = timm.data.create_transform(**config, is_training=False), from_timm(config)
    for name, image in PHOTOS.items():
        assert torch.equal(spec(image), peer(image)), name


@pytest.mark.parametrize(
    ("name", "size", "before", "how"),
    [("torchvision", 224, 256, "bilinear"), ("dinov2", 224, 256, "bicubic"), ("clip", 96, 96, "bicubic")],
)
def test_torchvision_gives_the_same_bits(name, size, before, how):
    spec = published_preprocess(name, size)
    how = InterpolationMode(how)
    peer = ImageClassification(
        crop_size=size, resize_size=before, interpolation=how, mean=spec.mean, std=spec.std
    )
    for name, image in PHOTOS.items():
        assert torch.equal(spec(image), peer(image)), name


HF = [
    ("ViTImageProcessor", {}),
    ("ViTImageProcessor", dict(size={"height": 96, "width": 160}, resample=3)),
    ("DeiTImageProcessor", {}),
    ("DeiTImageProcessor", dict(size={"height": 108, "width": 107}, crop_size={"height": 96, "width": 96})),
    ("CLIPImageProcessor", {}),
    (
        "CLIPImageProcessor",
        dict(size={"shortest_edge": 101}, crop_size={"height": 96, "width": 64}, resample=2),
    ),
    ("SiglipImageProcessor", {}),
    ("BitImageProcessor", dict(size={"shortest_edge": 256}, image_mean=[0.485, 0.456, 0.406])),
    ("BitImageProcessor", dict(do_normalize=False, do_rescale=False)),
    ("BeitImageProcessor", dict(size={"height": 99, "width": 99}, do_normalize=False, do_center_crop=False)),
]


@pytest.mark.parametrize(("kind", "options"), HF, ids=str)
def test_transformers_gives_the_same_bits_with_pillow(kind, options):
    peer = getattr(transformers, kind + "Pil")(**options)
    spec = from_hf(json.loads(peer.to_json_string()))
    for name, image in PHOTOS.items():
        found = torch.as_tensor(peer(image, return_tensors="pt")["pixel_values"][0])
        assert torch.equal(spec(image), found.float()), name


@pytest.mark.parametrize(("kind", "options"), HF[:-2], ids=str)
def test_transformers_gives_the_same_pixels_with_torch(kind, options):
    """Its fast processors combine scale, mean and std: pixels are equal, and floats up to rounding."""
    peer = getattr(transformers, kind)(**options)
    spec = dataclasses.replace(from_hf(json.loads(peer.to_json_string())), backend="torch")
    for name, image in PHOTOS.items():
        found = peer(image, return_tensors="pt")["pixel_values"][0]
        ours, theirs = torch.from_numpy(spec.pixels(image)).movedim(-1, 0), pixels_of(found, spec)
        apart = (ours.int() - theirs).abs().max()
        assert apart == 0 if NATIVE or spec.interpolation == "bicubic" else apart <= 1, name
        torch.testing.assert_close(spec(image), found, atol=1e-5, rtol=0)


def test_dinov3_differs_by_at_most_one_pixel_value():
    """Its processor resizes floats; ours rounds to uint8 after each of the two axes."""
    peer = transformers.DINOv3ViTImageProcessor(do_normalize=False)
    spec = dataclasses.replace(from_hf(json.loads(peer.to_json_string())), backend="torch")
    for name, image in PHOTOS.items():
        found = peer(image, return_tensors="pt")["pixel_values"][0]
        assert (spec(image) - found).abs().max() <= 1.01 / 255, name


@pytest.mark.parametrize("name", ["google", "torchvision", "clip"])
def test_the_two_backends_are_near_but_not_the_same(name):
    """The reason why weights name their backend: the two round to 8 bits differently, and some pixels differ."""
    pillow = published_preprocess(name)
    spec = dataclasses.replace(pillow, backend="torch")
    apart = [np.abs(pillow.pixels(image) - spec.pixels(image).astype(int)) for image in PHOTOS.values()]
    assert 0 < max(one.max() for one in apart) <= 8
    assert max(one.mean() for one in apart) < 0.5


def test_the_two_crop_roundings_differ():
    """3 pixels to spare: torchvision skips 2, transformers skips 1. With 1 or 5 to spare they agree."""
    strip = np.arange(10, dtype=np.uint8)[None].repeat(7, 0)
    starts = {}
    for word in ("even", "down"):
        spec = Preprocess(size=7, resize="shortest", mean=(0,), std=(1,), crop_rounding=word)
        starts[word] = spec.pixels(strip)[0, 0, 0]
    assert starts == {"even": 2, "down": 1}


# ---- every kind of image ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["pillow", "torch"])
def test_an_array_gives_the_pixels_of_its_image(china, backend):
    for spec in (
        Preprocess(size=(64, 96), backend=backend),
        Preprocess(size=64, resize="shortest", backend=backend),
    ):
        array = np.asarray(china)
        assert np.array_equal(spec.pixels(china), spec.pixels(array))
        mirrored = np.ascontiguousarray(array[:, ::-1])
        assert np.array_equal(spec.pixels(mirrored), spec.pixels(array[:, ::-1]))  # strides may be negative


def test_a_batch_is_the_stack_of_its_images(china):
    spec = published_preprocess("augreg", 64)
    images = [china, np.asarray(PHOTOS["flower cut to 401x255"]), china.convert("L")]
    batch = spec.batch(images)
    assert batch.shape == (3, 3, 64, 64)
    assert batch.dtype == torch.float32
    assert torch.equal(batch, torch.stack([spec(image) for image in images]))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_eight_orientations_are_the_same_image(china, orientation):
    turns = [None, 0, 3, 1, 5, 2, 6, 4]  # Pillow's numbers for what each is stored by
    image = china.resize((60, 40))
    turn = turns[orientation - 1]
    stored = image if turn is None else image.transpose(Image.Transpose(turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    stored.save(file, "png", exif=exif)
    spec = Preprocess(size=(40, 60), resize="none")
    assert np.array_equal(spec.pixels(Image.open(file)), np.asarray(image))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_8_bits_become_8(mode, channels):
    ramp = np.linspace(0, 65535, 256 * 256).reshape(256, 256)
    array = {
        "I;16": ramp.astype(np.uint16),
        "I": ramp.astype(np.int32),
        "F": (ramp / 65535).astype(np.float32),
    }
    spec = Preprocess(size=256, resize="none", mean=(0,) * channels, std=(1,) * channels)
    image = Image.fromarray(array[mode])
    assert image.mode == mode
    pixels = spec.pixels(image)
    assert abs(pixels.mean() - 127.5) < 0.5
    assert (pixels.min(), pixels.max(), pixels.shape) == (0, 255, (256, 256, channels))


def test_sixteen_bits_in_a_file_and_the_other_byte_order():
    values = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    spec = Preprocess(size=16, resize="none", mean=(0,), std=(1,))
    for kind in ("png", "tiff"):
        file = io.BytesIO()
        Image.fromarray(values).save(file, kind)
        assert np.array_equal(spec.pixels(Image.open(file))[..., 0], values // 257)
    other = Image.frombytes("I;16B", (16, 16), values.astype(">u2").tobytes())
    assert np.array_equal(spec.pixels(other)[..., 0], values // 257)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "RGBX"])
def test_other_modes_are_converted_by_pillow(china, mode):
    image = china.resize((32, 32)).convert(mode)
    for channels, as_ in ((1, "L"), (3, "RGB")):
        spec = Preprocess(size=32, resize="none", mean=(0,) * channels, std=(1,) * channels)
        assert np.array_equal(spec.pixels(image).squeeze(), np.asarray(image.convert(as_)))


def transparent(mode):
    colors = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    colors.paste((200, 100, 0, 255), (0, 0, 2, 4))
    colors.putpixel((3, 3), (0, 0, 0, 128))
    if mode == "P":
        palette = Image.new("P", (4, 4), 1)
        palette.putpalette([200, 100, 0, 10, 20, 30])
        palette.paste(0, (0, 0, 2, 4))
        palette.info["transparency"] = 1
        return palette
    return colors.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_are_composited_over_white_like_transformers(mode):
    image = transparent(mode)
    pixels = Preprocess(size=4, resize="none").pixels(image)
    assert pixels[0, 2].tolist() == [255, 255, 255]
    assert pixels[0, 0].tolist() == ([200, 100, 0] if mode != "LA" else [118, 118, 118])
    assert mode == "P" or pixels[3, 3].tolist() == [127, 127, 127]
    peer = transformers.CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    found = peer(image, return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"][0]
    assert np.array_equal(pixels.transpose(2, 0, 1), found)
    assert Preprocess(size=4, resize="none", mean=(0,), std=(1,)).pixels(image)[0, 2, 0] == 255


@pytest.mark.parametrize("backend", ["pillow", "torch"])
def test_channels_beyond_color_do_not_mix(backend):
    """A fourth channel need not be alpha: it does not change the others. Any number of channels works."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 50, 5), dtype=np.uint8)
    alone = Preprocess(size=16, mean=(0,), std=(1,), backend=backend)
    for channels in (2, 3, 4, 5):
        spec = Preprocess(size=16, mean=(0,) * channels, std=(1,) * channels, backend=backend)
        singles = [alone.pixels(noise[..., c])[..., 0] for c in range(channels)]
        assert np.array_equal(spec.pixels(noise[..., :channels]), np.stack(singles, -1))
    four = Preprocess(size=(30, 50), resize="none", mean=(0,) * 4, std=(1,) * 4, backend=backend)
    assert np.array_equal(four.pixels(Image.fromarray(noise[..., :4])), noise[..., :4])


def test_the_input_is_neither_changed_nor_shared(china):
    array = np.array(china)
    pixels = Preprocess(size=china.size[::-1], resize="none").pixels(array)
    pixels[:] = 0
    assert np.array_equal(array, np.asarray(china))


@settings(max_examples=60, deadline=None)
@given(
    high=st.integers(1, 60),
    wide=st.integers(1, 60),
    size=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    more=st.integers(0, 5),
    resize=st.sampled_from(["squash", "shortest"]),
    backend=st.sampled_from(["pillow", "torch"]),
    rounding=st.sampled_from(["even", "down"]),
)
def test_the_output_has_the_size_for_any_image(high, wide, size, more, resize, backend, rounding):
    spec = Preprocess(
        size=size,
        resize=resize,
        resize_to=max(size) + more,
        backend=backend,
        crop_rounding=rounding,
        mean=(0.5, 0.5),
        std=(1, 1),
    )
    x = spec(np.full((high, wide, 2), 51, np.uint8))
    assert x.shape == (2, *size)
    assert (x - (0.2 - 0.5)).abs().max() < 1e-6  # nothing is padded: a flat image stays flat


# ---- settings ----------------------------------------------------------------------------------

SPECS = [
    *(published_preprocess(name, size) for name in PUBLISHED for size in (96, 224, 384)),
    Preprocess(
        size=(64, 96), resize_to=(70, 110), interpolation="box", scale=1 / 128, mean=(0.1,), std=(0.3,)
    ),
    Preprocess(size=(64, 96), resize="none", interpolation="lanczos", mean=(0, 0, 0, 0), std=(1, 2, 3, 4)),
    Preprocess(size=32, resize="shortest", resize_to=37, backend="torch", interpolation="bicubic"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_json_and_back(spec):
    again = Preprocess(**json.loads(json.dumps(dataclasses.asdict(spec))))
    assert again == spec
    assert hash(again) == hash(spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_transformers_and_back(spec, tmp_path, china):
    if spec.channels == 4:
        return
    spec = dataclasses.replace(spec, crop_rounding="down")
    text = json.dumps(to_hf(spec))
    assert from_hf(json.loads(text)) == spec
    if spec.channels == 3:  # and transformers itself reads it as we do
        (tmp_path / "preprocessor_config.json").write_text(text)
        backend = {"pillow": "pil", "torch": "torchvision"}[spec.backend]
        peer = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend=backend)
        found = peer(china, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(spec(china), found, atol=1e-5 if spec.backend == "torch" else 0, rtol=0)


@pytest.mark.parametrize("spec", SPECS[:-3], ids=str)
def test_timm_and_back(spec, china):
    config = to_timm(spec)
    assert from_timm(config) == spec
    assert torch.equal(timm.data.create_transform(**config, is_training=False)(china), spec(china))


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 1000), more=st.integers(0, 500), squash=st.booleans())
def test_timm_finds_every_side_again(size, more, squash):
    """crop_pct is a float that timm divides by and rounds down: 224 / (224 / 248) could be 247."""
    spec = Preprocess(size=size, resize="squash" if squash else "shortest", resize_to=size + more)
    assert from_timm(to_timm(spec)) == spec


def test_settings_of_timm_models():
    """The settings of every Vision Transformer of timm are read, or refused for a known reason."""
    refused = set()
    for name in timm.list_models(
        ["vit_*", "deit*", "beit*", "eva*"], pretrained=True, exclude_filters="*naflex*"
    ):
        config = timm.get_pretrained_cfg(name).to_dict()
        try:
            spec = from_timm(config)
        except ConfigError as error:
            refused.add(str(error).partition(" cannot")[0])
        else:
            assert spec.target == tuple(config["input_size"][1:])
    assert refused <= {"crop_mode='border'"}


def test_published_settings_match_their_sources():
    assert (
        published_preprocess("google") == Preprocess() == from_hf(transformers.ViTImageProcessor().to_dict())
    )
    assert published_preprocess("siglip") == from_hf(transformers.SiglipImageProcessor().to_dict())
    clip = from_hf(transformers.CLIPImageProcessor().to_dict())
    assert published_preprocess("clip") == dataclasses.replace(clip, crop_rounding="even")
    augreg = timm.get_pretrained_cfg("vit_base_patch16_224.augreg_in21k_ft_in1k").to_dict()
    assert published_preprocess("augreg") == from_timm(augreg)
    assert published_preprocess("augreg").before_crop == (248, 248)
    assert published_preprocess("deit") == from_timm(
        timm.get_pretrained_cfg("deit_small_patch16_224.fb_in1k").to_dict()
    )
    assert published_preprocess("imagenet") == from_timm({"input_size": (3, 224, 224)}) == from_timm({})
    assert published_preprocess("dinov2", 448).before_crop == (512, 512)
    assert published_preprocess("clip", 336).before_crop == (336, 336)


OLD = dict(resample=3, image_mean=[0.5] * 3, image_std=[0.5] * 3)


@pytest.mark.parametrize(
    ("old", "spec"),
    [
        (
            dict(feature_extractor_type="ViTFeatureExtractor", size=224, resample=2),
            Preprocess(),
        ),
        (dict(size=96, do_resize=True), Preprocess(size=96, interpolation="bicubic")),
        (
            dict(feature_extractor_type="CLIPFeatureExtractor", size=224, crop_size=224, do_center_crop=True),
            Preprocess(resize="shortest", interpolation="bicubic", crop_rounding="down"),
        ),
        (
            dict(feature_extractor_type="DeiTFeatureExtractor", size=256, crop_size=224, do_center_crop=True),
            Preprocess(resize_to=256, interpolation="bicubic", crop_rounding="down"),
        ),
        (
            dict(image_processor_type="ViTImageProcessorFast", size={"height": 64, "width": 32}),
            Preprocess(size=(64, 32), interpolation="bicubic", backend="torch"),
        ),
        (
            dict(size={"height": 64, "width": 64}, do_resize=False, do_rescale=False, do_normalize=False),
            Preprocess(size=64, resize="none", interpolation="bicubic", scale=1, mean=(0,) * 3, std=(1,) * 3),
        ),
    ],
    ids=str,
)
def test_old_and_unusual_files_of_transformers(old, spec):
    assert from_hf(OLD | old) == spec


def test_describe():
    assert published_preprocess("augreg").describe() == [
        "upright, 8 bits, RGB",
        "short side to 248 by bicubic (Pillow)",
        "center crop 224x224",
        "pixels / 255",
        "minus (0.5, 0.5, 0.5)",
        "divided by (0.5, 0.5, 0.5)",
    ]
    assert Preprocess(size=(8, 9), backend="torch", scale=0.5).describe()[1:3] == [
        "resized to 8x9 by bilinear (Torch)",
        "pixels times 0.5",
    ]
    two = Preprocess(size=8, resize="none", mean=(0, 0), std=(1, 1)).describe()
    assert two[:2] == ["upright, 8 bits, 2 channels", "not resized: it must be 8x8"]


def test_equivalent_settings_are_equal():
    assert Preprocess(size=224, resize_to=(224, 224), crop_rounding="down") == Preprocess()
    assert Preprocess(resize="shortest", resize_to=224) == Preprocess(resize="shortest")
    assert dataclasses.replace(published_preprocess("clip"), size=96) == published_preprocess("clip", 96)


def test_the_module_imports_neither_torch_nor_pillow_nor_numpy():
    code = "import sys, vitrail.images.preprocess as p; p.Preprocess(); assert not {'torch', 'PIL', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_interpolations_are_in_the_order_of_pillow():
    assert [Image.Resampling[name.upper()].value for name in INTERPOLATIONS] == list(range(6))


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(size=(1, 2, 3)), r"size must be one integer or \(height, width\), not \(1, 2, 3\)"),
        (dict(size=0), "size must be an integer from 1"),
        (dict(resize="crop"), "unknown resize 'crop'"),
        (dict(interpolation="cubic"), "Did you mean 'bicubic'"),
        (dict(scale=0), "scale must be above 0, not 0"),
        (dict(mean=0.5), "mean must be a tuple with a number for each channel of the images, not 0.5"),
        (dict(mean=()), r"mean must be .* for each channel of the images, not \(\)"),
        (dict(mean=("a",)), r"mean must be .* for each channel of the images, not \('a',\)"),
        (dict(std=(1, 0, 1)), r"std must be .* of at least 1e-6 for each channel .*, not \(1, 0, 1\)"),
        (dict(std=(1, float("nan"), 1)), "std must be .* of at least 1e-6 for each channel"),
        (dict(mean=(0,)), r"mean=\(0.0,\) needs as many numbers in std, not std=\(0.5.*change mean or std"),
        (
            dict(resize="none", resize_to=256),
            r"resize='none' needs resize_to=None, not resize_to=\(256, 256\)",
        ),
        (
            dict(resize="shortest", resize_to=(256, 300)),
            r"resize='shortest' needs a single number as resize_to",
        ),
        (dict(resize="shortest", resize_to=200), r"size=\(224, 224\) needs a resize_to .* at least as large"),
        (
            dict(size=(64, 128), resize="shortest", resize_to=64),
            r"size=\(64, 128\) needs .* at least as large",
        ),
        (dict(size=(64, 128), resize_to=(200, 100)), r"size=\(64, 128\) needs .* at least as large"),
        (
            dict(backend="torch", interpolation="lanczos"),
            "backend='torch' needs bilinear or bicubic .*'lanczos'",
        ),
        (dict(color=1), "Preprocess has no field 'color'"),
    ],
    ids=str,
)
def test_invalid_settings(fields, words):
    with pytest.raises(ConfigError, match=words):
        Preprocess(**fields)


def broken():
    file = io.BytesIO()
    PHOTOS["china"].save(file, "jpeg")
    return Image.open(io.BytesIO(file.getvalue()[:5000]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: "cat.jpg",
            "must be a PIL image, .* or a tensor .*, not 'cat.jpg'; open a file with PIL.Image.open",
        ),
        (
            lambda: np.full((8, 8, 3), 255.0),
            "floats from 0 to 1, not float64 from 255 to 255; convert it to uint8",
        ),
        (lambda: np.zeros((8, 8, 3), int), "must be uint8, .*, not int64 from 0 to 0; convert it to uint8"),
        (
            lambda: torch.full((3, 8, 8), -2.0),
            "not float32 from -2 to -2; remove Normalize: the model normalizes",
        ),
        (lambda: np.full((8, 8, 3), np.nan), "not float64 from nan to nan"),
        (lambda: torch.zeros(8, 8, 3, dtype=torch.uint8), r"or \(3, h, w\) as a tensor; .* \(8, 8, 3\)"),
        (lambda: np.zeros((3, 8, 8), np.uint8), r"the shape \(h, w, 3\), .* has the shape \(3, 8, 8\)"),
        (lambda: np.zeros((8, 8), np.uint8), r"has the shape \(8, 8\)"),
        (lambda: np.zeros((8,), np.uint8), r"has the shape \(8,\)"),
        (lambda: np.zeros((2, 8, 8, 3), np.uint8), r"has the shape \(2, 8, 8, 3\)"),
        (lambda: np.zeros((0, 8, 3), np.uint8), r"has the shape \(0, 8, 3\)"),
        (lambda: Image.new("RGB", (0, 5)), r"has the shape \(5, 0, 3\)"),
        (lambda: Image.new("F", (0, 5)), r"has the shape \(5, 0, 3\)"),
        (
            lambda: Image.new("F", (5, 5), 2.0),
            "mode F must lie between 0 and 1, .* from 2 to 2; convert it to 8",
        ),
        (lambda: Image.new("F", (5, 5), float("nan")), "from nan to nan"),
        (
            lambda: Image.new("I", (5, 5), 70000),
            "mode I must lie between 0 and 65535, .* from 70000 to 70000",
        ),
        (lambda: Image.new("I", (5, 5), -1), "from -1 to -1"),
        (lambda: Image.new("La", (5, 5)), "cannot convert an image of mode La to RGB"),
        (broken, "cannot read the image .image file is truncated"),
        (lambda: np.zeros((1, 9000, 3), np.uint8), r"\(height x width\) would become 224 x 2016000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_images(make, words):
    with pytest.raises(InputError, match=words):
        Preprocess(resize="shortest").pixels(make())


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "L", "I;16", "I", "F", "CMYK"])
@pytest.mark.parametrize(
    "fields",
    [{}, dict(backend="torch"), dict(mean=(0,), std=(1,)), dict(mean=(0,) * 4, std=(1,) * 4)],
    ids=str,
)
def test_strips_give_the_same_pixels(mode, fields, monkeypatch):
    """Large images are converted a few rows at a time, to save memory."""
    random = np.random.default_rng(0)
    if mode in ("I;16", "I", "F"):
        kind, most = {"I;16": (np.uint16, 65535), "I": (np.int32, 65535), "F": (np.float32, 1)}[mode]
        image = Image.fromarray((random.random((50, 37)) * most).astype(kind))
    else:
        image = Image.frombytes("RGBA", (37, 50), random.bytes(37 * 50 * 4)).convert(mode)
    if mode in ("P", "L"):
        image.info["transparency"] = 7
    assert image.mode == mode
    settings = Preprocess(size=16, **fields)
    at_once = settings.pixels(image)
    monkeypatch.setattr("vitrail.images.pixels.STRIP", 100)
    assert (settings.pixels(image) == at_once).all()


def test_images_that_do_not_fit_the_settings(china):
    with pytest.raises(InputError, match=r"resize='none' an image must be 8 x 9 .* this one is 427 x 640"):
        Preprocess(size=(8, 9), resize="none").pixels(china)
    with pytest.raises(
        InputError, match=r"1, 3 or 4 channels, and the model takes 2; pass an array \(h, w, 2\)"
    ):
        Preprocess(mean=(0, 0), std=(1, 1)).pixels(china)
    with pytest.raises(InputError, match="must hold at least one image"):
        Preprocess().batch([])


CROP = dict(do_center_crop=True, crop_size=64)


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        (dict(size=64, do_pad=True), "do_pad=True"),
        (dict(size=64, crop_pct=0.9), "crop_pct=0.9"),
        ({}, "size=None"),
        (dict(size={"longest_edge": 64}), "size={'longest_edge': 64}"),
        (dict(size={"shortest_edge": 64, "longest_edge": 99}, **CROP), "size={'shortest_edge': 64,"),
        (dict(size={"shortest_edge": 64}), "size={'shortest_edge': 64}"),  # and no crop
        (dict(size=64, **CROP), "size=64"),  # of what type of processor?
        (dict(size=64, do_resize=False, **CROP, image_processor_type="ViT"), "do_center_crop=True"),
        (dict(size={"shortest_edge": 64}, do_center_crop=True), "crop_size=None"),
        (dict(size=64, resample=9), "resample=9"),
        (dict(size=64, resample=None), "resample=None"),
        (dict(size=64, image_mean=None), "image_mean=None"),
        (dict(size=64, image_mean=[0.5] * 4), "image_mean=[0.5, 0.5, 0.5, 0.5]"),
        (dict(size=64, image_std=None), "image_std=None"),
    ],
    ids=str,
)
def test_settings_of_transformers_without_an_equivalent(settings, got):
    with pytest.raises(ConfigError) as caught:
        from_hf(OLD | settings)
    assert str(caught.value).startswith(got)
    assert "cannot be expressed by Preprocess" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        (dict(crop_mode="border"), "crop_mode='border'"),
        (dict(crop_border_pixels=4), "crop_border_pixels=4"),
        (dict(crop_pct="all"), "crop_pct='all'"),
        (dict(input_size=224), "input_size=224"),
        (dict(input_size=(3, 224, 96)), "input_size=(3, 224, 96)"),
        (dict(input_size=(1, 224, 224)), "mean=(0.485, 0.456, 0.406)"),
    ],
    ids=str,
)
def test_settings_of_timm_without_an_equivalent(settings, got):
    with pytest.raises(ConfigError) as caught:
        from_timm(settings)
    assert str(caught.value).startswith(f"{got} cannot be expressed by Preprocess")


@pytest.mark.parametrize(
    ("write", "fields", "words"),
    [
        (
            to_hf,
            dict(resize="shortest"),
            "transformers cannot express crop_rounding='even', only 'down'",
        ),
        (to_hf, dict(mean=(0, 0), std=(1, 1)), "transformers cannot express channels=2, only 1 or 3"),
        (to_timm, dict(mean=(0,) * 4, std=(1,) * 4), "timm cannot express channels=4, only 1 or 3"),
        (to_timm, dict(resize="none"), "timm cannot express resize='none', only 'squash' or 'shortest'"),
        (to_timm, dict(backend="torch"), "timm cannot express backend='torch', only 'pillow'"),
        (
            to_timm,
            dict(resize_to=256, crop_rounding="down"),
            "timm cannot express crop_rounding='down', only 'even'",
        ),
        (to_timm, dict(scale=1), "timm cannot express scale=1.0, only 0.00392"),
        (
            to_timm,
            dict(size=(64, 96), resize="shortest"),
            "timm cannot express resize='shortest', only 'squash'",
        ),
        (
            to_timm,
            dict(resize_to=(256, 300)),
            "one crop_pct for both sides",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_settings_that_other_libraries_cannot_express(write, fields, words):
    with pytest.raises(ConfigError, match=words):
        write(Preprocess(**fields))


def test_an_unknown_published_name():
    with pytest.raises(ConfigError, match=r"unknown published preprocessing 'clipp'"):
        published_preprocess("clipp")
