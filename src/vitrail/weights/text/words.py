"""The text half of CLIP and SigLIP: texts in, unit vectors out, in the space of the image embeddings.

    bundle = vt.load("clip-vit-base-patch32")
    bundle.text(["a photo of a cat", "a photo of a dog"])     # (2, E), each of length 1

The tensors are those that the image model does not use, so they are written back unchanged whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.base.errors import FileError, InputError, VitrailError, printable
from vitrail.base.fields import short_repr
from vitrail.base.safe_files import parse_json
from vitrail.model.config import ViTConfig
from vitrail.weights.families.key_rows import Sizes
from vitrail.weights.families.match import FamilyMatch, match_family, read_state
from vitrail.weights.families.text_towers import TEXT_FAMILIES, TextFamily
from vitrail.weights.readers.folder import open_model
from vitrail.weights.readers.tensor_entries import Entry
from vitrail.weights.text.tokenizer import (
    CLIP_FILE,
    CLIP_VOCABULARY,
    TOKENIZER_FILES,
    ClipTokenizer,
    JsonTokenizer,
    installed_clip_file,
    open_tokenizer,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.model.text_tower import TextConfig, TextTower

_BATCH = 64
_MAX_TEXT = 10_000  # characters of a text; towers take some dozen tokens
_SETTINGS = ("config.json", "open_clip_config.json")


@dataclass(eq=False)
class TextEncoder:
    """A text tower with its tokenizer, and how the cosine of a text and an image becomes a score."""

    tower: TextTower
    files: Mapping[str, bytes]
    """The files of the tokenizer, by name."""
    family: str
    style: str
    scale: float
    """The factor of the cosine, exp(logit_scale)."""
    bias: float
    activation: Literal["softmax", "sigmoid"]
    """CLIP compares texts with each other (softmax); SigLIP judges each by itself (sigmoid)."""

    @cached_property
    def tokenizer(self) -> ClipTokenizer | JsonTokenizer:
        return open_tokenizer(self.files, self.style)  # type: ignore[arg-type]

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Token ids (B, length)."""
        import torch

        for text in texts:
            # Half of a character comes from a file name or an argument that is not UTF-8.
            valid = isinstance(text, str) and text.strip() and len(text) <= _MAX_TEXT
            if not valid or any("\ud800" <= character <= "\udfff" for character in text):
                raise InputError(
                    f"A text must be a string of 1 to {_MAX_TEXT:,} characters, not {short_repr(text)}; "
                    "check labels and prompts."
                )
        ids = torch.from_numpy(self.tokenizer(list(texts), self.tower.config.length))
        return ids.to(self.tower.tokens.weight.device)

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """Unit vectors (B, E), one per text."""
        import torch
        from torch.nn import functional as F

        from vitrail.model.device import eval_mode

        texts = [texts] if isinstance(texts, str) else list(texts)
        parts = []
        with eval_mode(self.tower):
            for at in range(0, len(texts), _BATCH):
                vectors = self.tower(self._crop(self.tokens(texts[at : at + _BATCH])))
                parts.append(F.normalize(vectors.float(), dim=-1))
        return torch.cat(parts) if parts else torch.zeros(0, self.width)

    def _crop(self, tokens: Tensor) -> Tensor:
        """Without the padding after the last end token, where no token that matters can see it."""
        config = self.tower.config
        if not config.causal or config.pool != "end":
            return tokens
        return tokens[:, : int(self.tower.end_positions(tokens).max()) + 1]

    @property
    def width(self) -> int:
        """E, the length of a vector."""
        return self.tower.config.projection or self.tower.config.width


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Dtype and shape of tensors, as a file's header has them."""
    return {name: Entry(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}


def has_text(entries: Mapping[str, Any]) -> bool:
    """Whether tensors of these names and shapes hold a text tower."""
    return _match(entries) is not None


def describe_text(entries: Mapping[str, Any], files: Collection[str]) -> str | None:
    """One phrase on the text tower among these tensors, from headers alone; None without one."""
    found = _match(entries)
    if found is None or "position.table" not in found[1].shapes:
        return None
    text, match = found
    vocabulary, width = match.shapes["tokens.weight"]
    length = match.shapes["position.table"][0]
    tokenizer = "with its tokenizer" if {*TOKENIZER_FILES} & {*files} else "without a tokenizer"
    size = f"width {width}, depth {match.depth}, {length} of {vocabulary:,} tokens"
    return f"{text.family.name}: {size}, {tokenizer}"


def build_text(
    extras: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    image: ViTConfig | None = None,
    **overrides: Any,
) -> TextEncoder:
    """The text tower in these tensors.

    Args:
        extras: tensors by the names in their file.
        files: settings and tokenizer, by file name.
        image: the config of the image tower.
        overrides: fields of TextConfig that shapes do not show: heads, activation, eps, causal...
    """
    import torch

    from vitrail.model.text_tower import TextTower
    from vitrail.weights.load import describe_mismatch

    found = _match(entries_of(extras))
    if found is None:
        raise InputError(
            "This model has no text tower, so it knows no words; use a CLIP or SigLIP file with both towers."
        )
    text, match = found
    config = _config(text, match, _settings(files), image, overrides)
    state = read_state(match, extras.__getitem__, config.as_vit_config)
    numbers = {name: state.pop(name) for name in ("logit_scale", "logit_bias") if name in state}
    with torch.device("meta"):
        tower = TextTower(config)
    if wrong := describe_mismatch(tower, {name: tuple(tensor.shape) for name, tensor in state.items()}):
        raise FileError(
            f"The text tower is not one that is known: it {wrong}. Download the file again, or use another "
            "model."
        )
    tower.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    scale, bias = (
        float(numbers[n].float().mean()) if n in numbers else None for n in ("logit_scale", "logit_bias")
    )
    return TextEncoder(
        tower=tower.eval().requires_grad_(False),
        files={name: data for name, data in files.items() if name not in _SETTINGS},
        family=text.family.name,
        style=text.style(match),
        scale=math.exp(min(scale, 20.0)) if scale is not None else 1.0,
        bias=bias or 0.0,
        activation="softmax" if bias is None else "sigmoid",
    )


def load_text(path: str | Path, **overrides: Any) -> TextEncoder:
    """The text tower of a file or folder, whatever image tower is beside it.

    Args:
        overrides: fields of TextConfig that shapes do not show.
    """
    with open_model(path) as files:
        tensors = {name: files.tensor(name) for name in files.entries if not _is_image_name(name)}
        return build_text(tensors, add_clip_file(files.entries, files.text_files), **overrides)


def _is_image_name(name: str) -> bool:
    return any(part in f".{name}" for part in (".visual.", ".vision_model.", ".image_encoder."))


def add_clip_file(entries: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a text tower; CLIP's vocabulary from an installed package if there is no tokenizer."""
    has_tokenizer = (
        "tokenizer.json" in files or {"vocab.json", "merges.txt"} <= set(files) or CLIP_FILE in files
    )
    found = None if has_tokenizer else _match(entries)
    if found is None or found[1].shapes["tokens.weight"][0] != CLIP_VOCABULARY:
        return dict(files)
    data = installed_clip_file()
    return {**files, **({CLIP_FILE: data} if data else {})}


# ---- recognizing ----------------------------------------------------------------------------


def _match(entries: Mapping[str, Any]) -> tuple[TextFamily, FamilyMatch] | None:
    for text in TEXT_FAMILIES:
        if match := match_family(text.family, entries, Sizes()):
            return text, match
    return None


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    settings = {name: parse_json(files[name], name, allow_nan=True) for name in _SETTINGS if name in files}
    return {name: value for name, value in settings.items() if isinstance(value, dict)}


def _config(
    text: TextFamily,
    match: FamilyMatch,
    settings: Mapping[str, Any],
    image: ViTConfig | None,
    overrides: Mapping[str, Any],
) -> TextConfig:
    """The config, from the shapes, the settings and the family."""
    from vitrail.model.text_tower import TextConfig

    shapes = match.shapes
    try:
        vocabulary, width = shapes["tokens.weight"]
        fields: dict[str, Any] = {
            "vocabulary": vocabulary,
            "width": width,
            "depth": match.depth,
            "length": shapes["position.table"][0],
            "mlp_width": shapes["blocks.0.mlp.fc1.weight"][0],
            "projection": shapes["head.weight"][0] if "head.weight" in shapes else None,
            "projection_bias": "head.bias" in shapes,
            "heads": max(width // 64, 1),
        }
        fields |= {**text.fields(match, settings, image), **overrides}
        end = fields.get("end")
        if isinstance(end, int) and end >= vocabulary:
            fields["end"] = None
        return TextConfig(**fields)
    except VitrailError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FileError(
            f"The text tower ({text.family.name}) is incomplete: {printable(error)} is missing or has an "
            "unexpected shape. Download the file again."
        ) from error
