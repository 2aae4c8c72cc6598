"""A vitrail file describes itself: one JSON object in its header, read without torch and checked.

The tensors of the model have our names; beside them are `extras/...`, `golden/...` and others (bundle.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, FileError, printable
from vitrail.base.fields import as_tuples, short_repr
from vitrail.base.safe_files import parse_json
from vitrail.images.fingerprint import Fingerprint, read_fingerprint
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.bundle import FORMAT, Card, Source, check_labels, check_preprocess
from vitrail.weights.bundle.feature_statistics import PREFIX, FeatureStatistics
from vitrail.weights.bundle.scores import Scores, parse_scores
from vitrail.weights.readers.folder import HEADER_KEY, TEXT_PREFIX, ModelFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vitrail.weights.families.match import FamilyMatch

OWN_NAMES = "A vitrail file has our own names and needs no key table; leave it out."
_EXTRAS = "extras/"
_OTHERS = ("golden/", "fingerprint/", TEXT_PREFIX, PREFIX)

_PARTS = (
    *("format", "config", "preprocess", "labels", "scores", "card", "source", "notes", "fingerprint"),
    "native",
)


@dataclass(frozen=True, kw_only=True)
class FileDescription:
    """What is in a weight file, of our own or of another library, from its headers alone."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's tensors, by our names."""
    extras: Mapping[str, str]
    """Tensors kept beside the model: their name in a bundle, and in the file."""
    match: FamilyMatch | None = None
    """How another library's names become ours; None for a vitrail file."""
    config: ViTConfig
    preprocess: Preprocess | None
    preprocess_from: str = ""
    """Where the preprocessing comes from, in words."""
    guess: str = ""
    """As in Bundle."""
    labels: list[str] | None = None
    scores: Scores = field(default_factory=Scores)
    card: Card
    notes: list[str]
    source: Source | None = None
    native: Mapping[str, Any] | None = None
    """As in Bundle."""

    @property
    def family(self) -> str:
        return "vitrail" if self.match is None else self.match.family.name

    @property
    def title(self) -> str:
        """The family in words."""
        return "a vitrail file" if self.match is None else self.match.family.title


def split_own(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The names of the model's tensors, and of those kept beside it: in a bundle, and in the file."""
    own, extras = list[str](), dict[str, str]()
    for name in names:
        if name.startswith(_EXTRAS):
            extras[name.removeprefix(_EXTRAS)] = name
        elif not name.startswith(_OTHERS):
            own.append(name)
    return own, extras


def describe_own(file: ModelFiles, overrides: Mapping[str, Any]) -> FileDescription:
    """Describe a vitrail file. Config fields given by the user take precedence, with a note."""
    parts = parse_header(file, read_header(file) or {})
    fields = {name: value for name, value in overrides.items() if name not in ("size", "channels", "patch")}
    for name, value in fields.items():
        if (stored := getattr(parts["config"], name, None)) != value:
            parts["notes"].append(
                f"{name} is {short_repr(value)} as given; the file has {short_repr(stored)}."
            )
    parts["config"] = replace(parts["config"], **fields)
    names, extras = split_own(file.entries)
    return FileDescription(
        shapes={name: file.entries[name].shape for name in names},
        extras=extras,
        preprocess_from="the file itself",
        **parts,
    )


def read_header(file: ModelFiles) -> dict[str, Any] | None:
    """The JSON object of a vitrail file, checked; None for other files."""
    if HEADER_KEY not in file.metadata:
        return None
    header = parse_json(file.metadata[HEADER_KEY], f"the description in {file.path}", allow_nan=True)
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise _damaged(file, "it has no format version")
    if header["format"] > FORMAT:
        raise FileError(
            f"{printable(file.path)} has format {header['format']}, but this vitrail reads formats up to "
            f"{FORMAT}; install a newer vitrail."
        )
    unknown = [key for key in header if key not in _PARTS]
    if unknown or not isinstance(header.get("config"), dict):
        raise _damaged(file, f"it has unknown keys {unknown}" if unknown else "it has no config")
    return header


def stored_statistics(file: ModelFiles, width: int) -> FeatureStatistics | None:
    """The feature statistics of a vitrail file, for features of this width; None if it has none."""
    names = [name for name in file.entries if name.startswith(PREFIX)]
    if not names:
        return None
    try:
        arrays = {name.removeprefix(PREFIX): file.tensor(name).numpy() for name in names}
        statistics = FeatureStatistics(**arrays)
        statistics.check_width(width)
    except (TypeError, ConfigError) as error:
        raise FileError(f"{printable(file.path)} is damaged: {printable(error)}. Save it again.") from error
    return statistics


def stored_fingerprint(file: ModelFiles) -> Fingerprint | None:
    """Which images the model of a vitrail file was trained on; None if it does not say so. No torch."""
    import numpy as np

    header = read_header(file)
    if header is None:
        return None
    entries = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}

    def read(name: str) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype=entries[name][0]), *file.chunks(name)])

    try:
        return read_fingerprint(header.get("fingerprint"), entries, read)
    except ValueError as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: ModelFiles, reason: str) -> FileError:
    return FileError(
        f"The description of the model in {printable(file.path)} is damaged: {printable(reason)}. "
        "Save it again."
    )


def parse_header(file: ModelFiles, header: Mapping[str, Any]) -> dict[str, Any]:
    """Config, preprocessing, labels, scores, card, source and notes of a vitrail file, each checked."""
    try:
        config = ViTConfig(**as_tuples(header["config"]))
        spec = header.get("preprocess")
        preprocess = None if spec is None else Preprocess(**as_tuples(spec))
        labels = header.get("labels")
        source = header.get("source")
        if source is not None:
            tensors = source["tensors"].items()
            source = {**source, "tensors": {str(n): (str(d), tuple(map(int, s))) for n, (d, s) in tensors}}
        card = dict(header.get("card", {}))
        if "licence" in card:  # as version 0.1 wrote it
            card["license"] = card.pop("licence")
        parts = {
            "config": config,
            "preprocess": preprocess,
            "labels": None if labels is None else check_labels(labels, config.classes),
            "scores": parse_scores(header.get("scores"), config.classes),
            "card": Card(**card),
            "source": None if source is None else Source(**source),
            "notes": [str(note) for note in header.get("notes", [])],
            "native": None if header.get("native") is None else dict(header["native"]),
        }
        check_preprocess(preprocess, config)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _damaged(file, str(error).removesuffix(".")) from error
    return parts
