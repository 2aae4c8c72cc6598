"""Lab `speech`: what it reads, what it refuses, and that a verdict follows from the numbers."""

import contextlib
import io
import math
import struct
import wave
import zipfile

import numpy as np
import pytest
import torch

from vitrail.errors import InputError
from vitrail.labs import sounds, speech
from vitrail.labs.lab import Verdict
from vitrail.labs.sounds import RATE, SAMPLES, Recording, as_data, by_number, by_speaker, read_recordings
from vitrail.labs.trial import one_thread


def tone(hertz, seconds=0.4, loud=0.5):
    return loud * np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)


def wav(samples, *, rate=RATE, channels=1, width=2):
    """A WAV file's bytes."""
    levels = np.rint(np.asarray(samples) * 32_767).astype("<i2").tobytes()
    if width == 3:
        levels = b"".join(b"\0" + levels[n : n + 2] for n in range(0, len(levels), 2))
    stored = io.BytesIO()
    with wave.open(stored, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(levels)
    return stored.getvalue()


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


def test_without_data_pictures_are_cut_in_every_way(tmp_path):
    with one_thread():
        found = speech.run(tmp_path, "small")
    assert list(found.numbers["kinds"]) == ["patches", "columns", "rows", "pixels"]
    assert found.number == found.numbers["kinds"]["patches"]["mean"]
    assert found.n == len(found.numbers["kinds"]["rows"]["scores"]) == 2
    assert "No sound was tried" in found.sentence
    assert "16 patches, 8 columns, 8 rows, 64 pixels" in found.sentence
    assert found.figure.axes
    assert not list(tmp_path.iterdir()), "runs are taken away"


def test_with_recordings_tokens_are_of_sound(tmp_path, spoken):
    with one_thread():
        found = speech.run(tmp_path, "small", spoken)
    assert list(found.numbers["kinds"]) == ["patches", "columns", "rows", "pieces"]
    assert list(found.numbers["strangers"]) == ["ann"]
    assert "40 spoken digits" in found.sentence
    assert "20 other recordings" in found.sentence
    assert found.numbers["nearest neighbour"] == 1.0, "tones are far apart"
    assert "held-out recordings" in found.unit


def test_kinds_of_tokens_are_as_many_and_as_large():
    sizes = {math.prod(patch) for patch in speech.OF_SPEECH.values()}
    assert sizes == {64}
    assert {speech.count(patch, (32, 64)) for patch in speech.OF_SPEECH.values()} == {32}
    assert speech.count(speech.OF_SAMPLES["pieces"], (1, SAMPLES)) == 32
    assert SAMPLES % 32 == 0, "no sample is left over"


def test_the_verdict_follows_from_the_numbers():
    good = {"patches": 0.95, "rows": 0.93}
    assert speech.judge(good, None, 9) == Verdict("holds")
    assert speech.judge(good, 0.95, 9) == Verdict("holds")
    assert (
        speech.judge({**good, "rows": 0.6}, None, 9).condition
        == "tokens are not rows (60.0%), after 9 epochs"
    )
    assert (
        speech.judge(good, 0.5, 9).condition
        == "the speaker has been heard before (50% of a stranger's digits)"
    )
    assert speech.judge({"patches": 0.5, "rows": 0.3}, 0.5, 9) == Verdict(
        "does not hold", ": at best 50% are right"
    )


def test_a_sure_difference_is_named_and_an_unsure_one_is_not():
    def arm(name, scores):
        return speech.Arm(name, {}, 1e-3, scores, [], 1, 1.0)

    patches, rows = arm("patches", [0.90, 0.91, 0.92]), arm("rows", [0.80, 0.811, 0.82])
    unsure = arm("columns", [0.95, 0.86, 0.95])
    found = speech.Found({"patches": patches, "rows": rows, "columns": unsure}, None, 0.9, 9)
    assert speech.order_in_words(found) == "Over 3 seeds rows are worse than patches by 10.0 points."


# ---- pictures of sounds ---------------------------------------------------------------------


@pytest.mark.parametrize("hertz", [150, 700, 2500])
def test_a_tone_lights_its_band(hertz):
    shown = sounds.spectrogram(tone(hertz, 0.8))
    assert shown.shape == (32, 64)
    assert shown.max() == 255
    peak = sounds.mel_bands()[:, round(hertz * sounds.WINDOW / RATE)].argmax()
    low_first = shown[::-1]  # low notes are at the bottom
    assert (abs(low_first[:, 20:40].argmax(axis=0) - peak) <= 1).all()


def test_the_spectrogram_is_torchs_stft():
    samples = np.random.default_rng(0).normal(size=SAMPLES) / 8
    window = torch.hann_window(sounds.WINDOW, periodic=False, dtype=torch.float64)
    stft = torch.stft(
        torch.from_numpy(samples), sounds.WINDOW, sounds.HOP, window=window, center=False, return_complex=True
    )
    bands = sounds.mel_bands() @ stft.abs().square().numpy()  # (BANDS, FRAMES)
    decibels = np.maximum(10 * np.log10(bands / bands.max()), -60)
    assert np.array_equal(
        sounds.spectrogram(samples), np.rint(255 * (1 + decibels / 60)).astype(np.uint8)[::-1]
    )


def test_loudness_makes_no_difference_and_silence_is_black():
    samples = tone(440, 0.2)
    assert np.array_equal(sounds.spectrogram(samples), sounds.spectrogram(samples / 10))
    shown = sounds.spectrogram(samples)
    assert (shown[:, :10] == 0).all()
    assert (shown[:, -10:] == 0).all()


def test_short_recordings_stand_in_the_middle_and_long_ones_are_cut_there():
    short, long = sounds.middle(np.ones(100)), sounds.middle(np.arange(SAMPLES + 11.0))
    assert len(short) == len(long) == SAMPLES
    assert short.nonzero()[0].tolist() == list(range((SAMPLES - 100) // 2, (SAMPLES + 100) // 2))
    assert long[0] in (5, 6)
    assert len(sounds.middle(np.ones(SAMPLES))) == SAMPLES


def test_samples_as_levels_can_be_turned_back():
    samples = tone(300, SAMPLES / RATE, loud=1.0)
    levels = sounds.waveform(samples)
    assert levels.shape == (1, SAMPLES)
    assert levels[0, 0] == 128, "silence"
    bent = (levels[0] - 128.0) / 127
    assert abs(np.sign(bent) * np.expm1(abs(bent) * np.log(256)) / 255 - samples).max() < 0.03


# ---- splits ---------------------------------------------------------------------------------


def test_no_recording_is_on_both_sides(spoken):
    recordings = read_recordings(spoken)
    train, val = by_number(recordings)
    assert {one.index for one in val} == {0}
    assert {one.index for one in train} == {1, 2}
    train, val = by_speaker(recordings, "bob")
    assert {one.speaker for one in train} == {"ann"}
    assert {one.speaker for one in val} == {"bob"}
    data = as_data("x", train, val)
    assert data.train.images.shape == (30, 32, 64, 1)
    assert data.val.labels.tolist() == sorted([*range(10)] * 3)
    assert data.val.names[0] == "0_bob_0"
    with pytest.raises(InputError, match="at least three recordings"):
        by_number([one for one in recordings if one.index == 0])


def test_a_zip_is_read_as_a_folder_is(spoken, tmp_path):
    file = tmp_path / "spoken.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for one in sorted(spoken.iterdir(), reverse=True):
            archive.write(one, f"recordings/{one.name}")
    for one, other in zip(read_recordings(spoken), read_recordings(file), strict=True):
        assert isinstance(one, Recording)
        assert one.name == other.name
        assert np.array_equal(one.samples, other.samples)


# ---- what is refused ------------------------------------------------------------------------

GOOD = wav(tone(440))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (wav(tone(440), rate=44_100), r"7_ann_0.wav, which has 1 channel\(s\), 16 bits and 44,100 a second. Convert it"),
        (wav(tone(440), channels=2), r"2 channel\(s\), 16 bits and 8,000"),
        (wav(tone(440), width=3), r"1 channel\(s\), 24 bits"),
        (GOOD[:-1000], r"holds 2,700 samples where it says 3,200. Get it again"),
        (GOOD[:20], r"cannot be read as one"),
        (b"", r"cannot be read as one: it ends too early"),
        (b"OggS" + GOOD[4:], r"cannot be read as one"),
        (GOOD[:20] + struct.pack("<H", 0x55) + GOOD[22:], r"cannot be read as one: unknown format: 85"),
        (wav(np.zeros(900)), r"which is silent"),
        (wav([]), r"which is silent"),
        (GOOD + bytes(sounds.MOST_BYTES), r"more than 4 MB. Cut it"),
    ],
    ids=["rate", "stereo", "24 bit", "truncated", "header", "empty", "ogg", "mp3", "zeros", "none", "long"],
)  # fmt: skip
def test_hostile_recordings_are_refused_with_a_reason(tmp_path, stored, message):
    (tmp_path / "7_ann_0.wav").write_bytes(stored)
    with pytest.raises(InputError, match=message):
        read_recordings(tmp_path)


def test_names_that_say_nothing_are_refused(tmp_path):
    (tmp_path / "seven\x1b[31m.wav").write_bytes(GOOD)
    with pytest.raises(InputError, match=r"must be named DIGIT_SPEAKER_NUMBER.wav.* Got seven\\x1b"):
        read_recordings(tmp_path)


def test_places_without_recordings_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"must be a folder of WAV files.*without any"):
        read_recordings(tmp_path)
    with pytest.raises(InputError, match="must be a folder of WAV files"):
        read_recordings(tmp_path / "nowhere")
    (tmp_path / "no.zip").write_bytes(b"PK\3\4 no zip")
    with pytest.raises(InputError, match=r"no\.zip: File is not a zip file"):
        read_recordings(tmp_path / "no.zip")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("7_ann_0.wav", GOOD)
    stored = bytearray((tmp_path / "bad.zip").read_bytes())
    stored[200] ^= 255  # inside the samples: the sum no longer fits
    (tmp_path / "bad.zip").write_bytes(stored)
    with pytest.raises(InputError, match=r"bad\.zip: Bad CRC"):
        read_recordings(tmp_path / "bad.zip")


def test_bytes_changed_at_random_never_end_in_another_error():
    chance = np.random.default_rng(0)
    for _ in range(300):
        stored = bytearray(GOOD[:400])
        for place in chance.integers(0, 60, 3):
            stored[place] = chance.integers(256)
        with contextlib.suppress(InputError):
            sounds.read_wave("7_ann_0.wav", bytes(stored))
