"""Spoken digits: WAV files read by the standard library, and drawn as pictures that a ViT takes.

A recording's name says what it is, as in the Free Spoken Digit Dataset: 7_jackson_3.wav is the digit 7,
spoken by jackson, the recording number 3.
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

from vitrail.data.decode import open_regular
from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATE = 8_000  # samples in a second
WINDOW, HOP = 256, 96  # samples in a frame, 32 ms; and from one frame to the next, 12 ms
BANDS, FRAMES = 32, 64  # of the picture: frequencies down, time across
SAMPLES = WINDOW + HOP * (FRAMES - 1)  # that a picture shows, 0.79 s
LOWEST = 60.0  # Hz: below it a small microphone hears only hum
FLOOR = -60.0  # dB below the loudest; fainter is black

MOST_BYTES = 4 << 20  # of one file; a digit has about 10 kB
MOST_FILES = 100_000
NAME = re.compile(r"(?P<digit>[0-9])_(?P<speaker>[^_]+)_(?P<index>[0-9]{1,6})\.wav", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Recording:
    """One spoken digit."""

    digit: int
    speaker: str
    index: int
    samples: NDArray[np.float64]
    """From -1 to 1, RATE in a second."""

    @property
    def name(self) -> str:
        return f"{self.digit}_{self.speaker}_{self.index}"


# ---- files ----------------------------------------------------------------------------------


def is_spoken(place: Path) -> bool:
    """Whether recordings lie there, and not pictures."""
    return place.suffix.lower() == ".zip" or (place.is_dir() and any(place.glob("*.[wW][aA][vV]")))


def read_recordings(place: str | Path) -> list[Recording]:
    """Every WAV file of a folder or of a .zip, in the order of digits, speakers and numbers."""
    found = [read_recording(name, stored) for name, stored in stored_files(Path(place))]
    if not found:
        raise InputError(
            "DATA must be a folder of WAV files, or a .zip of them.",
            f"{printable(place)} without any",
            "Name the folder that they lie in.",
        )
    return sorted(found, key=lambda one: (one.digit, one.speaker, one.index))


def stored_files(place: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each."""
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix.lower() == ".wav")
        check_count(len(files), place)
        for file in files:
            with open_regular(file) as opened:
                yield file.name, opened.read(MOST_BYTES + 1)
        return
    try:
        with open_regular(place) as opened, zipfile.ZipFile(opened) as archive:
            names = sorted(name for name in archive.namelist() if name.lower().endswith(".wav"))
            check_count(len(names), place)
            for name in names:
                with archive.open(name) as member:  # never more than a little, whatever it says it holds
                    yield Path(name).name, member.read(MOST_BYTES + 1)
    # What zipfile raises for damaged, encrypted and strange archives.
    except (OSError, EOFError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise InputError(
            "DATA must be a folder of WAV files, or a .zip of them.",
            f"{printable(place)}: {printable(error)}",
            "Check the path; unpack the file if it is another kind of archive.",
        ) from error


def check_count(count: int, place: Path) -> None:
    if count > MOST_FILES:
        raise InputError(
            f"DATA may hold at most {MOST_FILES:,} recordings.",
            f"{printable(place)} with {count:,}",
            "Use fewer.",
        )


def read_recording(name: str, stored: bytes) -> Recording:
    said = NAME.fullmatch(name)
    if said is None:
        raise InputError(
            "A recording must be named DIGIT_SPEAKER_NUMBER.wav, such as 7_jackson_3.wav.",
            printable(name),
            "Rename it or take it out of the folder.",
        )
    return Recording(int(said["digit"]), said["speaker"], int(said["index"]), read_wave(name, stored))


def read_wave(name: str, stored: bytes) -> NDArray[np.float64]:
    """The samples of a WAV file, from -1 to 1; anything but plain speech of one channel is refused."""

    def refuse(got: str, do: str) -> InputError:
        must = f"A recording must be a WAV file of one channel, 16 bits and {RATE:,} samples in a second."
        return InputError(must, f"{printable(name)}, {got}", do)

    convert = "Convert it, for instance with sox or ffmpeg."
    if len(stored) > MOST_BYTES:
        raise refuse(f"which has more than {MOST_BYTES >> 20} MB", "Cut it to one spoken digit.")
    try:
        with wave.open(io.BytesIO(stored)) as opened:
            channels, width, rate, count = opened.getparams()[:4]
            data = opened.readframes(count)
    # What wave raises for files that are damaged or no WAV at all, which differs from Python to Python.
    except (wave.Error, EOFError, struct.error, ValueError, ZeroDivisionError, RuntimeError) as error:
        reason = printable(error) or "it ends too early"
        raise refuse(f"which cannot be read as one: {reason}", "Save it again, as plain PCM.") from error
    if (channels, width, rate) != (1, 2, RATE):
        raise refuse(f"which has {channels} channel(s), {8 * width} bits and {rate:,} a second", convert)
    if len(data) != 2 * count:
        raise refuse(f"which holds {len(data) // 2:,} samples where it says {count:,}", "Get it again.")
    samples = np.frombuffer(data, dtype="<i2") / 32_768
    if not samples.any():
        raise refuse("which is silent", "Record it again, or take it out of the folder.")
    return samples


# ---- pictures -------------------------------------------------------------------------------


def middle(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """As many samples as a picture shows: short recordings get silence at both ends, long ones are cut."""
    spare = SAMPLES - len(samples)
    if spare < 0:
        return samples[-spare // 2 :][:SAMPLES]
    return np.pad(samples, (spare // 2, spare - spare // 2))


def spectrogram(samples: NDArray[np.float64]) -> NDArray[np.uint8]:
    """How loud each frequency is at each time, (BANDS, FRAMES): 255 is the loudest, low notes are below.

    Frames overlap and fade in and out (Hann), and their powers are gathered into bands that are as
    wide as the ear's (mel). Decibels are measured from the loudest of the same recording, so that it does
    not matter how near the microphone was.
    """
    frames = np.lib.stride_tricks.sliding_window_view(middle(samples), WINDOW)[::HOP]  # (FRAMES, WINDOW)
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW))) ** 2  # (FRAMES, WINDOW / 2 + 1)
    bands = power @ mel_bands().T
    decibels = 10 * np.log10(np.maximum(bands / bands.max(), 10 ** (FLOOR / 10)))
    return np.rint(255 * (1 - decibels / FLOOR)).astype(np.uint8).T[::-1]


def mel_bands() -> NDArray[np.float64]:
    """(BANDS, WINDOW / 2 + 1): each a triangle whose feet are the peaks of its neighbours."""

    def mel(hertz: float) -> float:
        return 1127 * float(np.log1p(hertz / 700))

    peaks = 700 * np.expm1(np.linspace(mel(LOWEST), mel(RATE / 2), BANDS + 2) / 1127)
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)
    rising = (bins - peaks[:-2, None]) / (peaks[1:-1] - peaks[:-2])[:, None]
    falling = (peaks[2:, None] - bins) / (peaks[2:] - peaks[1:-1])[:, None]
    return np.maximum(0, np.minimum(rising, falling))


def waveform(samples: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The samples themselves as a picture of one row, (1, SAMPLES); 128 is silence.

    Of 256 levels, most are spent on faint sounds, as telephones do (mu-law).
    """
    loud = middle(samples)
    loud = loud / max(float(np.abs(loud).max()), 1e-9)
    bent = np.sign(loud) * np.log1p(255 * np.abs(loud)) / np.log(256)
    return np.rint(128 + 127 * bent).astype(np.uint8)[None]


# ---- data sets ------------------------------------------------------------------------------


def as_data(name: str, train: Sequence[Recording], val: Sequence[Recording], *, raw: bool = False) -> Dataset:
    """Recordings as pictures with labels, which every part of this package can train on."""
    draw = waveform if raw else spectrogram

    def split(some: Sequence[Recording]) -> Split:
        images = np.stack([draw(one.samples) for one in some])[..., None]  # (N, H, W, 1)
        labels = np.array([one.digit for one in some], dtype=np.int64)
        return Split(labels, [one.name for one in some], None, np.ascontiguousarray(images))

    return Dataset(name, [str(digit) for digit in range(10)], split(train), val=split(val))


def by_number(recordings: Sequence[Recording]) -> tuple[list[Recording], list[Recording]]:
    """Two thirds to learn from, and of every digit and speaker the third with the lowest numbers held out."""
    numbers = sorted({one.index for one in recordings})
    held = set(numbers[: len(numbers) // 3])
    parts = [[one for one in recordings if (one.index in held) == wanted] for wanted in (False, True)]
    if not all(parts):
        raise InputError(
            "DATA must have at least three recordings of each digit by each speaker.",
            f"recordings numbered {', '.join(map(str, numbers[:9]))}",
            "The lowest numbers are held out: use more of them.",
        )
    return parts[0], parts[1]


def by_speaker(recordings: Sequence[Recording], speaker: str) -> tuple[list[Recording], list[Recording]]:
    """All other speakers to learn from, this one held out."""
    parts = [[one for one in recordings if (one.speaker == speaker) == wanted] for wanted in (False, True)]
    return parts[0], parts[1]
