"""Lab `speech`: reading recordings, spectrograms, and the verdict for every outcome."""

import contextlib
import io
import math
import struct
import wave
import zipfile

import numpy as np
import pytest
import torch

from vitrail.base.errors import InputError
from vitrail.experiment.trial import one_thread
from vitrail_course.labs import speech, spoken_digits
from vitrail_course.labs.spoken_digits import (
    SAMPLE_RATE,
    SAMPLES,
    Recording,
    build_dataset,
    read_recordings,
    split_by_index,
    split_by_speaker,
)


def tone(hertz, seconds=0.4, volume=0.5):
    return volume * np.sin(2 * np.pi * hertz * np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE)


def wav(samples, *, rate=SAMPLE_RATE, channels=1, width=2):
    """A WAV file's bytes."""
    pixels = np.rint(np.asarray(samples) * 32_767).astype("<i2").tobytes()
    if width == 3:
        pixels = b"".join(b"\0" + pixels[n : n + 2] for n in range(0, len(pixels), 2))
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(pixels)
    return content.getvalue()


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Ten 'digits' by two 'speakers', three recordings each: tones, higher for each digit."""
    folder = tmp_path_factory.mktemp("spoken")
    for digit in range(10):
        for speaker, factor in (("ann", 1.0), ("bob", 1.07)):
            for index in range(3):
                samples = tone(200 * 1.3**digit * factor, 0.3 + 0.05 * index)
                (folder / f"{digit}_{speaker}_{index}.wav").write_bytes(wav(samples))
    return folder


# ---- the lab --------------------------------------------------------------------------------


def test_small_run_without_data(tmp_path):
    with one_thread():
        result = speech.run(tmp_path, "small")
    assert list(result.numbers["tokens"]) == ["patches", "columns", "rows", "pixels"]
    assert result.number == result.numbers["tokens"]["patches"]["scores"][1], "the first chose the rate"
    assert result.n == len(result.numbers["tokens"]["rows"]["scores"]) - 1 == 1
    assert "Sounds were not tested" in result.sentence
    assert "16 patches, 8 columns, 8 rows, 64 pixels" in result.sentence
    assert result.figure.axes
    assert not list(tmp_path.iterdir()), "runs are removed"


def test_small_run_with_recordings(tmp_path, spoken):
    with one_thread():
        result = speech.run(tmp_path, "small", spoken)
    assert list(result.numbers["tokens"]) == ["patches", "columns", "rows", "segments"]
    assert len(result.numbers[speech.PIXELS_OF_IMAGES]["scores"]) == 2, "pixels are always tested"
    assert "With the pixels of scikit-learn's digits as tokens, 64 of them" in result.sentence
    assert list(result.numbers["unseen speakers"]) == ["ann"]
    assert "40 spoken digits" in result.sentence
    assert "20 held-out recordings" in result.sentence
    assert result.numbers["nearest neighbor"] == 1.0, "tones are far apart"
    assert "held-out recordings" in result.unit


def test_kinds_of_tokens_have_equal_number_and_size():
    sizes = {math.prod(patch) for patch in speech.SPECTROGRAM_TOKENS.values()}
    assert sizes == {64}
    assert {speech.token_count(patch, (32, 64)) for patch in speech.SPECTROGRAM_TOKENS.values()} == {32}
    assert speech.token_count(speech.SAMPLE_TOKENS["segments"], (1, SAMPLES)) == 32
    assert SAMPLES % 32 == 0, "no sample is left over"


def test_verdict_for_every_outcome():
    def verdict(others=None, of_images=None, **tokens):
        """The first of four seeds chose the learning rate."""
        tokens = (dict.fromkeys(speech.TOKEN_KINDS, others) if others else {}) | tokens
        arms = {name: {"scores": [0.7, *scores]} for name, scores in tokens.items()}
        pixels = of_images and {"scores": [0.7, *of_images], "held out": 360}
        return speech.decide_verdict({"tokens": arms, "held out": 3_000, speech.PIXELS_OF_IMAGES: pixels})

    good, poor, near = [0.95, 0.96, 0.97], [0.4, 0.42, 0.41], [0.497, 0.48, 0.513]
    assert verdict(good, patches=good, rows=good).word == "holds"
    untested = verdict(patches=good, rows=good)
    assert untested.word == "partly", "the claim is about all kinds"
    assert "pixels can be tokens (not tested in this run)" in untested.condition.partition("Not clear: ")[2]
    on_digits = verdict(of_images=good, patches=good).condition
    assert "True: patches can be tokens" in on_digits
    assert "; pixels can be tokens, those of scikit-learn's digits (96.0 [" in on_digits.partition("Not")[0]
    rows = verdict(good, patches=good, rows=poor)
    assert rows.word == "partly"
    assert "Not true: rows can be tokens (41.0 [" in rows.condition
    assert "threshold 50 %" in rows.condition
    assert verdict(patches=near).word == "not clear here", "an interval that contains the threshold"
    assert verdict(poor, patches=poor, rows=poor).word == "does not hold"


def test_only_clear_differences_are_reported():
    def arm(name, scores):
        return speech.Arm(name, {}, 1e-3, scores, [], 1, 1.0, 300)

    patches, rows = arm("patches", [0.5, 0.90, 0.91, 0.92]), arm("rows", [0.9, 0.80, 0.811, 0.82])
    noisy = arm("columns", [0.5, 0.95, 0.86, 0.95])
    result = speech.SpeechResults({"patches": patches, "rows": rows, "columns": noisy}, None, 0.9, 9)
    expected = "Over 3 seeds, without that of the sweep, rows are worse than patches by 10.0 points."
    assert speech.format_order(result) == expected


# ---- spectrograms ---------------------------------------------------------------------------


@pytest.mark.parametrize("hertz", [150, 700, 2500])
def test_a_tone_is_in_its_frequency_band(hertz):
    image = spoken_digits.spectrogram(tone(hertz, 0.8))
    assert image.shape == (32, 64)
    assert image.max() == 255
    peak = spoken_digits.mel_bands()[:, round(hertz * spoken_digits.WINDOW / SAMPLE_RATE)].argmax()
    low_first = image[::-1]  # low frequencies are at the bottom
    assert (abs(low_first[:, 20:40].argmax(axis=0) - peak) <= 1).all()


def test_spectrogram_equals_torch_stft():
    samples = np.random.default_rng(0).normal(size=SAMPLES) / 8
    window = torch.hann_window(spoken_digits.WINDOW, periodic=False, dtype=torch.float64)
    stft = torch.stft(
        torch.from_numpy(samples),
        spoken_digits.WINDOW,
        spoken_digits.HOP,
        window=window,
        center=False,
        return_complex=True,
    )
    bands = spoken_digits.mel_bands() @ stft.abs().square().numpy()  # (BANDS, FRAMES)
    decibels = np.maximum(10 * np.log10(bands / bands.max()), -60)
    assert np.array_equal(
        spoken_digits.spectrogram(samples), np.rint(255 * (1 + decibels / 60)).astype(np.uint8)[::-1]
    )


def test_volume_makes_no_difference_and_silence_is_black():
    samples = tone(440, 0.2)
    assert np.array_equal(spoken_digits.spectrogram(samples), spoken_digits.spectrogram(samples / 10))
    image = spoken_digits.spectrogram(samples)
    assert (image[:, :10] == 0).all()
    assert (image[:, -10:] == 0).all()


def test_short_recordings_are_padded_and_long_ones_cropped_at_the_center():
    short, long = (
        spoken_digits.center_crop(np.ones(100)),
        spoken_digits.center_crop(np.arange(SAMPLES + 11.0)),
    )
    assert len(short) == len(long) == SAMPLES
    assert short.nonzero()[0].tolist() == list(range((SAMPLES - 100) // 2, (SAMPLES + 100) // 2))
    assert long[0] in (5, 6)
    assert len(spoken_digits.center_crop(np.ones(SAMPLES))) == SAMPLES


def test_waveform_can_be_decoded():
    samples = tone(300, SAMPLES / SAMPLE_RATE, volume=1.0)
    pixels = spoken_digits.waveform(samples)
    assert pixels.shape == (1, SAMPLES)
    assert pixels[0, 0] == 128, "silence"
    compressed = (pixels[0] - 128.0) / 127
    assert abs(np.sign(compressed) * np.expm1(abs(compressed) * np.log(256)) / 255 - samples).max() < 0.03


# ---- splits ---------------------------------------------------------------------------------


def test_splits_are_disjoint(spoken):
    recordings = read_recordings(spoken)
    train, val = split_by_index(recordings)
    assert {one.index for one in val} == {0}
    assert {one.index for one in train} == {1, 2}
    train, val = split_by_speaker(recordings, "bob")
    assert {one.speaker for one in train} == {"ann"}
    assert {one.speaker for one in val} == {"bob"}
    data = build_dataset("x", train, val)
    assert data.train.images.shape == (30, 32, 64, 1)
    assert data.val.labels.tolist() == sorted([*range(10)] * 3)
    assert data.val.names[0] == "0_bob_0"
    with pytest.raises(InputError, match="at least three recordings"):
        split_by_index([one for one in recordings if one.index == 0])


def test_a_zip_is_read_like_a_folder(spoken, tmp_path):
    file = tmp_path / "spoken.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for one in sorted(spoken.iterdir(), reverse=True):
            archive.write(one, f"recordings/{one.name}")
    for one, other in zip(read_recordings(spoken), read_recordings(file), strict=True):
        assert isinstance(one, Recording)
        assert one.name == other.name
        assert np.array_equal(one.samples, other.samples)


# ---- invalid input --------------------------------------------------------------------------

GOOD = wav(tone(440))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (wav(tone(440), rate=44_100), r"7_ann_0.wav has 1 channel\(s\), 16 bits and 44,100 samples per second; convert it"),
        (wav(tone(440), channels=2), r"2 channel\(s\), 16 bits and 8,000"),
        (wav(tone(440), width=3), r"1 channel\(s\), 24 bits"),
        (GOOD[:-1000], r"has 2,700 of its 3,200 samples; get a complete copy"),
        (GOOD[:20], r"cannot be read"),
        (b"", r"cannot be read \(it ends too early\)"),
        (b"OggS" + GOOD[4:], r"cannot be read"),
        (GOOD[:20] + struct.pack("<H", 0x55) + GOOD[22:], r"cannot be read \(unknown format: 85\)"),
        (wav(np.zeros(900)), r"is silent"),
        (wav([]), r"is silent"),
        (GOOD + bytes(spoken_digits.MAX_BYTES), r"more than 4 MB; cut it"),
    ],
    ids=["rate", "stereo", "24 bit", "truncated", "header", "empty", "ogg", "mp3", "zeros", "none", "long"],
)  # fmt: skip
def test_invalid_recordings_are_rejected_with_a_reason(tmp_path, content, message):
    (tmp_path / "7_ann_0.wav").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_recordings(tmp_path)


def test_invalid_names_are_rejected(tmp_path):
    (tmp_path / "seven\x1b[31m.wav").write_bytes(GOOD)
    with pytest.raises(InputError, match=r"must be named DIGIT_SPEAKER_NUMBER.wav.*seven\\x1b"):
        read_recordings(tmp_path)


def test_paths_without_recordings_are_rejected(tmp_path):
    with pytest.raises(InputError, match="has no WAV files"):
        read_recordings(tmp_path)
    with pytest.raises(InputError, match=r"not a folder or a \.zip of WAV files"):
        read_recordings(tmp_path / "nowhere")
    (tmp_path / "no.zip").write_bytes(b"PK\3\4 no zip")
    with pytest.raises(InputError, match=r"no\.zip .*File is not a zip file"):
        read_recordings(tmp_path / "no.zip")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("7_ann_0.wav", GOOD)
    content = bytearray((tmp_path / "bad.zip").read_bytes())
    content[200] ^= 255  # inside the samples, so that the checksum is wrong
    (tmp_path / "bad.zip").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.zip .*Bad CRC"):
        read_recordings(tmp_path / "bad.zip")


def test_random_corruption_raises_only_input_errors():
    rng = np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(GOOD[:400])
        for out in rng.integers(0, 60, 3):
            content[out] = rng.integers(256)
        with contextlib.suppress(InputError):
            spoken_digits.read_wave("7_ann_0.wav", bytes(content))
