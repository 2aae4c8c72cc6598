"""Videos, waveforms and texts. Only the tokenizer differs from that of images.

Each tokenizer is compared with another way to compute the same tokens, and passes the tests of a model for
images.
"""

import io
import math
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

import vitrail as vt
from tests.support.models import add_noise
from tests.support.shared_data import shared

SMALL = dict(width=32, depth=2, heads=2, classes=5)
VIDEO = dict(SMALL, input="video", size=(4, 16, 24), patch=(2, 8, 8))
AUDIO = dict(SMALL, input="audio", channels=1, size=(32, 24), patch=(16, 8))
TEXT = dict(SMALL, input="text", size=12, patch=1, vocabulary=50)
KINDS = {"video": VIDEO, "audio": AUDIO, "text": TEXT}


def batch(config, count=2):
    if config.input == "text":
        return torch.randint(config.vocabulary, (count, *config.input_shape))
    return torch.randn(count, *config.input_shape)


@pytest.fixture(params=KINDS)
def model(request):
    return add_noise(vt.ViT(vt.ViTConfig(**KINDS[request.param])))


def test_grids_of_one_two_and_three_axes(model):
    config = model.config
    assert config.grid == {"video": (2, 2, 3), "audio": (2, 3), "text": (12,)}[config.input]
    enc = model.encode(batch(config), layers=[0])
    assert enc.patches.shape == (2, *config.grid, 32)
    assert enc.layers[0].patches.shape == (2, *config.grid, 32)
    assert model(batch(config)).shape == (2, 5)


def test_every_parameter_has_a_gradient(model):
    model.train()(batch(model.config)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_save_and_load_are_bit_equal(model, tmp_path):
    x = batch(model.config)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    again = vt.ViT(model.config).eval()
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(again(x), model(x))


def test_export_with_a_dynamic_batch(model):
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(model, (batch(model.config),), dynamic_shapes=dynamic)
    x = batch(model.config, 5)
    assert (program.module()(x) - model(x)).abs().max() < 1e-5


def test_attention_can_be_recorded(model):
    x = batch(model.config)
    with torch.no_grad(), vt.record(model, "blocks.*.attention.weights") as tape:
        logits = model(x)
    assert (logits - model(x)).abs().max() < 1e-5
    T = model.config.tokens
    assert tape["blocks.1.attention.weights"].shape == (2, 2, T, T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", ["sincos1d", "pairwise", "none"])
@pytest.mark.parametrize("pool", ["mean", "attention", "flatten"])
def test_positions_and_pools_for_any_grid(kind, position, pool):
    config = vt.ViTConfig(**KINDS[kind], position=position, pool=pool, registers=2)
    assert vt.ViT(config)(batch(config)).shape == (2, 5)


@pytest.mark.parametrize("position", ["learned2d", "sincos2d", "rotary", "relative"])
def test_a_spectrogram_has_rows_and_columns(position):
    config = vt.ViTConfig(**AUDIO, position=position)
    assert vt.ViT(config)(batch(config)).shape == (2, 5)


def test_tubelets_are_a_convolution_in_three_dimensions():
    tokens = add_noise(
        vt.ViT(vt.ViTConfig(**VIDEO))
    ).tokens.double()  # how far fp32 is off depends on the CPU
    videos = torch.randn(2, 3, 4, 16, 24).double()
    maps = F.conv3d(videos, tokens.proj.weight, tokens.proj.bias, stride=(2, 8, 8))  # (B, D, 2, 2, 3)
    assert (tokens(videos) - maps.flatten(2).transpose(1, 2)).abs().max() < 1e-12


def test_a_video_of_one_frame_is_an_image():
    video = add_noise(vt.ViT(vt.ViTConfig(**{**VIDEO, "size": (1, 16, 24), "patch": (1, 8, 8)})))
    image = vt.ViT(vt.ViTConfig(**SMALL, size=(16, 24), patch=8)).eval()
    state = video.state_dict()
    state["tokens.proj.weight"] = state["tokens.proj.weight"][:, :, 0]
    image.load_state_dict(state)
    images = torch.randn(2, 3, 16, 24)
    assert torch.equal(video(images[:, :, None]), image(images))


def test_text_tokens_are_one_hot_vectors_times_E():
    tokens = add_noise(vt.ViT(vt.ViTConfig(**TEXT))).tokens
    ids = torch.randint(50, (2, 12))
    product = F.one_hot(ids, 50).float() @ tokens.proj.weight
    assert torch.equal(tokens(ids), product)


@pytest.mark.parametrize("bin", [0, 5, 31])
def test_a_tone_is_in_its_bin(bin):
    config = vt.ViTConfig(**AUDIO)
    time = torch.arange(config.input_shape[0]) / 64  # in frames of 2 x 32 samples
    tone = torch.sin(2 * math.pi * (bin + 1) * time + 0.5)
    spectrogram = vt.ViT(config).tokens.spectrogram(tone[None])[0, 0]  # (bins, frames)
    assert spectrogram.shape == (32, 24)
    assert (spectrogram.argmax(dim=0) == bin).all()
    assert abs(spectrogram.mean()) < 1e-5
    assert abs(spectrogram.var(correction=0) - 1) < 1e-3


def test_the_spectrogram_equals_torch_stft():
    config = vt.ViTConfig(**AUDIO)
    tokens, waveforms = vt.ViT(config).tokens, torch.randn(2, *config.input_shape)
    stft = torch.stft(
        waveforms, 64, hop_length=32, window=tokens.window, center=False, return_complex=True
    )  # (B, 33, frames)
    expected = (stft[:, 1:].abs().square() / 64 + 1e-6).log()
    expected = (expected - expected.mean((1, 2), keepdim=True)) / expected.std(
        (1, 2), correction=0, keepdim=True
    )
    assert (tokens.spectrogram(waveforms)[:, 0] - expected).abs().max() < 1e-3


def test_training_on_spoken_digits():
    """Zeros against sixes: 60 recordings for training and 60 for testing."""
    config = vt.ViTConfig(
        width=48,
        depth=2,
        heads=4,
        classes=2,
        **{k: AUDIO[k] for k in ("input", "channels")},
        size=(64, 64),
        patch=(16, 8),
    )
    waveforms, labels, test = [], [], []
    with zipfile.ZipFile(shared("data/fsdd_idx0-14.zip")) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".wav") or Path(name).name[0] not in "06":
                continue
            with wave.open(io.BytesIO(archive.read(name))) as sound:
                samples = np.frombuffer(sound.readframes(-1), dtype="<i2") / 32768
            padded = np.zeros(config.input_shape[0], dtype="float32")
            padded[: len(samples)] = samples[: len(padded)]
            waveforms.append(torch.from_numpy(padded))
            labels.append(int(Path(name).name[0] == "6"))
            test.append(int(Path(name).stem.split("_")[2]) % 2 == 0)
    x, y, test = torch.stack(waveforms), torch.tensor(labels), torch.tensor(test)
    torch.manual_seed(0)
    model = vt.ViT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x[~test]), y[~test]).backward()
        optimizer.step()
    accuracy = (model.eval()(x[test]).argmax(1) == y[test]).float().mean()
    assert accuracy > 0.85


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(VIDEO, size=(16, 24)), r"size must be one integer or \(frames, height, width\), not \(16, 24\)"),
        (dict(VIDEO, size=(5, 16, 24)), r"video size 5x16x24 .* patch size 2x8x8; use 4x16x24 or 6x16x24"),
        (dict(VIDEO, embedding="conv"), r"input='video' needs a linear or mlp embedding, but embedding='conv'"),
        (dict(VIDEO, position="sincos2d"), r"position='sincos2d' needs rows and columns, but input='video'"),
        (dict(AUDIO, channels=2), r"input='audio' needs channels=1, but channels=2"),
        (dict(AUDIO, embedding="mlp"), r"input='audio' needs a linear embedding"),
        (dict(TEXT, vocabulary=None), r"input='text' needs a vocabulary, but vocabulary=None"),
        (dict(TEXT, patch=2), r"input='text' needs patch=1, but patch=\(2,\)"),
        (dict(TEXT, embedding_norm="before"), r"input='text' needs after or none, but embedding_norm="),
        (dict(TEXT, position="rotary"), r"position='rotary' needs rows and columns, but input='text'"),
        (dict(SMALL, patch=8, vocabulary=9), r"vocabulary=9 needs input=\"text\", but input='image'"),
        (dict(TEXT, vocabulary=10**11), r"most of them are in the vocabulary"),
    ],
)  # fmt: skip
def test_invalid_configs(fields, message):
    with pytest.raises(vt.ConfigError, match=message):
        vt.ViTConfig(**fields)


@pytest.mark.parametrize(
    ("kind", "x", "message"),
    [
        ("video", torch.zeros(1, 4, 3, 16, 24), r"Videos must have the shape \(batch, 3, 4, 16, 24\).*transpose\(1, 2\)"),
        ("video", torch.zeros(1, 3, 8, 16, 24), r"take 4 frames"),
        ("audio", torch.zeros(1, 100), r"Waveforms must have the shape \(batch, 800\), not \(1, 100\); crop or pad"),
        ("audio", torch.zeros(1, 800, dtype=torch.int16), r"Waveforms must have the model's dtype"),
        ("text", torch.zeros(1, 12), r"Token ids must be torch.int64 or torch.int32, not torch.float32"),
        ("text", torch.zeros(1, 9, dtype=torch.long), r"Token ids must have the shape \(batch, 12\).* crop or pad"),
        ("text", torch.full((1, 12), 50), r"Token ids must be from 0 to 49, .*not 50"),
        ("text", [1, 2], r"Token ids must be a torch tensor, not list"),
        ("audio", None, r"Waveforms must be a torch tensor, not NoneType"),
    ],
)  # fmt: skip
def test_invalid_inputs(kind, x, message):
    with pytest.raises(vt.InputError, match=message):
        vt.ViT(vt.ViTConfig(**KINDS[kind]))(x)


def test_surgery_of_other_inputs():
    text, video, audio = (vt.ViT(vt.ViTConfig(**KINDS[kind])) for kind in ("text", "video", "audio"))
    for model in (text, video):
        with pytest.raises(vt.InputError, match=f"resize .* not for input='{model.config.input}'"):
            vt.surgery.resize(model, 32)
        with pytest.raises(vt.InputError, match="repatch needs patches"):
            vt.surgery.repatch(model, 4)
    for model in (text, video, audio):
        with pytest.raises(vt.InputError, match="rechannel needs patches"):
            vt.surgery.rechannel(model, 4)
        assert vt.surgery.reclass(model, 7)(batch(model.config)).shape == (2, 7)
        assert vt.surgery.add_registers(model, 2).config.registers == 2
    longer = vt.surgery.resize(audio, (32, 48))
    assert longer(batch(longer.config)).shape == (2, 5)
