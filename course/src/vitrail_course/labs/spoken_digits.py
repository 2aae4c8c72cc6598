"""Spoken digits: WAV files, read with the standard library and converted to images for a ViT.

Files are named as in the Free Spoken Digit Dataset: 7_jackson_3.wav is the digit 7, spoken by jackson,
recording number 3.
"""

from __future__ import annotations

import io
import re
import struct
import wave
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import open_regular
from vitrail.images.formats.sources import Dataset, Split

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE_RATE = 8_000  # samples per second
WINDOW, HOP = 256, 96  # samples per frame, 32 ms, and between frames, 12 ms
BANDS, FRAMES = 32, 64  # height and width of the spectrogram
SAMPLES = WINDOW + HOP * (FRAMES - 1)  # covered by a spectrogram, 0.79 s
_MIN_HERTZ = 60.0  # Hz; below it there is mostly hum
_FLOOR_DECIBELS = -60.0  # relative to the maximum; mapped to black

MAX_BYTES = 4 << 20  # of one file; a spoken digit has about 10 kB
_MAX_FILES = 100_000
_FILE_NAME = re.compile(r"(?P<digit>[0-9])_(?P<speaker>[^_]+)_(?P<index>[0-9]{1,6})\.wav", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Recording:
    """One spoken digit."""

    digit: int
    speaker: str
    index: int
    samples: NDArray[np.float64]
    """From -1 to 1, at SAMPLE_RATE."""

    @property
    def name(self) -> str:
        return f"{self.digit}_{self.speaker}_{self.index}"


# ---- files ----------------------------------------------------------------------------------


def has_recordings(path: Path) -> bool:
    """Whether a path holds recordings rather than images."""
    return path.suffix.lower() == ".zip" or (path.is_dir() and any(path.glob("*.[wW][aA][vV]")))


def read_recordings(path: str | Path) -> list[Recording]:
    """All recordings of a folder or a .zip, sorted by digit, speaker and number."""
    recordings = [_read_recording(name, content) for name, content in _iterate_files(Path(path))]
    if not recordings:
        raise InputError(
            f"{printable(path)} has no WAV files; pass --data a folder or a .zip that holds them."
        )
    return sorted(recordings, key=lambda recording: (recording.digit, recording.speaker, recording.index))


def _iterate_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The name and the content of each WAV file."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".wav")
        _check_count(len(files), path)
        for file in files:
            with open_regular(file) as file_object:
                yield file.name, file_object.read(MAX_BYTES + 1)
        return
    try:
        with open_regular(path) as file_object, zipfile.ZipFile(file_object) as archive:
            names = sorted(name for name in archive.namelist() if name.lower().endswith(".wav"))
            _check_count(len(names), path)
            for name in names:
                with archive.open(name) as member:  # limited, whatever size the archive declares
                    yield Path(name).name, member.read(MAX_BYTES + 1)
    # All that zipfile raises for damaged, encrypted and unsupported archives.
    except (OSError, EOFError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"{printable(path)} is not a folder or a .zip of WAV files ({printable(error)}); check the path, "
            "and unpack other kinds of archives."
        ) from error


def _check_count(count: int, path: Path) -> None:
    if count > _MAX_FILES:
        raise InputError(f"{printable(path)} has {count:,} recordings; use at most {_MAX_FILES:,}.")


def _read_recording(name: str, content: bytes) -> Recording:
    match = _FILE_NAME.fullmatch(name)
    if match is None:
        raise InputError(
            "A recording must be named DIGIT_SPEAKER_NUMBER.wav, such as 7_jackson_3.wav, but "
            f"{printable(name)} is not; rename or remove it."
        )
    return Recording(int(match["digit"]), match["speaker"], int(match["index"]), read_wave(name, content))


def read_wave(name: str, content: bytes) -> NDArray[np.float64]:
    """The samples of a WAV file, from -1 to 1; only 16-bit mono at SAMPLE_RATE is accepted."""

    def recording_error(problem: str, fix: str) -> InputError:
        return InputError(
            f"A recording must be a WAV file with one channel, 16 bits and {SAMPLE_RATE:,} samples per "
            f"second, but {printable(name)} {problem}; {fix}."
        )

    if len(content) > MAX_BYTES:
        raise recording_error(f"has more than {MAX_BYTES >> 20} MB", "cut it to one spoken digit")
    try:
        with wave.open(io.BytesIO(content)) as file_object:
            channels, width, sample_rate, count = file_object.getparams()[:4]
            data = file_object.readframes(count)
    # All that wave raises for damaged and other files, in different versions of Python.
    except (wave.Error, EOFError, struct.error, ValueError, ZeroDivisionError, RuntimeError) as error:
        reason = printable(error) or "it ends too early"
        raise recording_error(f"cannot be read ({reason})", "save it again as PCM") from error
    if (channels, width, sample_rate) != (1, 2, SAMPLE_RATE):
        raise recording_error(
            f"has {channels} channel(s), {8 * width} bits and {sample_rate:,} samples per second",
            "convert it, for instance with sox or ffmpeg",
        )
    if len(data) != 2 * count:
        raise recording_error(f"has {len(data) // 2:,} of its {count:,} samples", "get a complete copy")
    samples = np.frombuffer(data, dtype="<i2") / 32_768
    if not samples.any():
        raise recording_error("is silent", "record it again, or remove it")
    return samples


# ---- images -------------------------------------------------------------------------------


def center_crop(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """SAMPLES samples: short recordings are padded with silence at both ends, long ones are cropped."""
    missing = SAMPLES - len(samples)
    if missing < 0:
        return samples[-missing // 2 :][:SAMPLES]
    return np.pad(samples, (missing // 2, missing - missing // 2))


def spectrogram(samples: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Log-mel spectrogram as an image, (BANDS, FRAMES): 255 is the maximum, low frequencies at the bottom.

    Uses Hann windows. Decibels are relative to the maximum of the recording, so that its volume does not
    matter.
    """
    frames = np.lib.stride_tricks.sliding_window_view(center_crop(samples), WINDOW)[::HOP]  # (FRAMES, WINDOW)
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW))) ** 2  # (FRAMES, WINDOW / 2 + 1)
    bands = power @ mel_bands().T
    decibels = 10 * np.log10(np.maximum(bands / bands.max(), 10 ** (_FLOOR_DECIBELS / 10)))
    return np.rint(255 * (1 - decibels / _FLOOR_DECIBELS)).astype(np.uint8).T[::-1]


def mel_bands() -> NDArray[np.float64]:
    """Triangular mel filters, (BANDS, WINDOW / 2 + 1)."""

    def mel(hertz: float) -> float:
        return 1127 * float(np.log1p(hertz / 700))

    peaks = 700 * np.expm1(np.linspace(mel(_MIN_HERTZ), mel(SAMPLE_RATE / 2), BANDS + 2) / 1127)
    bins = np.fft.rfftfreq(WINDOW, 1 / SAMPLE_RATE)
    rising = (bins - peaks[:-2, None]) / (peaks[1:-1] - peaks[:-2])[:, None]
    falling = (peaks[2:, None] - bins) / (peaks[2:] - peaks[1:-1])[:, None]
    return np.maximum(0, np.minimum(rising, falling))


def waveform(samples: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The samples as an image of one row, (1, SAMPLES), in mu-law encoding; 128 is silence."""
    samples = center_crop(samples)
    samples = samples / max(float(np.abs(samples).max()), 1e-9)
    compressed = np.sign(samples) * np.log1p(255 * np.abs(samples)) / np.log(256)
    return np.rint(128 + 127 * compressed).astype(np.uint8)[None]


# ---- data sets ------------------------------------------------------------------------------


def build_dataset(
    name: str, train: Sequence[Recording], val: Sequence[Recording], *, raw: bool = False
) -> Dataset:
    """A data set of recordings as labeled images: spectrograms, or raw samples."""
    to_image = waveform if raw else spectrogram

    def split(subset: Sequence[Recording]) -> Split:
        images = np.stack([to_image(recording.samples) for recording in subset])[..., None]  # (N, H, W, 1)
        labels = np.array([recording.digit for recording in subset], dtype=np.int64)
        return Split(labels, [recording.name for recording in subset], None, np.ascontiguousarray(images))

    return Dataset(name, [str(digit) for digit in range(10)], split(train), val=split(val))


def split_by_index(recordings: Sequence[Recording]) -> tuple[list[Recording], list[Recording]]:
    """Training and held-out recordings; the third with the lowest numbers is held out."""
    indices = sorted({recording.index for recording in recordings})
    held_out = set(indices[: len(indices) // 3])
    splits = [
        [recording for recording in recordings if (recording.index in held_out) == is_held_out]
        for is_held_out in (False, True)
    ]
    if not all(splits):
        raise InputError(
            "The data must have at least three recordings of each digit by each speaker, as the third with "
            f"the lowest numbers is held out, but has only the numbers {', '.join(map(str, indices[:9]))}; "
            "add more."
        )
    return splits[0], splits[1]


def split_by_speaker(
    recordings: Sequence[Recording], speaker: str
) -> tuple[list[Recording], list[Recording]]:
    """Training recordings of all other speakers, and the held-out ones of this speaker."""
    splits = [
        [recording for recording in recordings if (recording.speaker == speaker) == is_held_out]
        for is_held_out in (False, True)
    ]
    return splits[0], splits[1]
