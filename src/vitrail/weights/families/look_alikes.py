"""Models whose files look like a plain ViT's and are something else: refused by name.

Some of them share every name with a family that is read, and would give wrong logits without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.weights.families.config_json import model_names, split_words


class LookAlike(NamedTuple):
    """A model that is not read, and the names that only its files have together."""

    name: str
    patterns: tuple[str, ...]
    """Each must match a name in the file."""
    reason: str
    """What it is instead."""
    advice: str = "Use timm for it"
    """What to do with such a file."""


_WINDOWS = "it has windows and stages of different widths"

LOOK_ALIKES = (
    LookAlike(
        "EUPE",
        ("*projectors.*", "*patch_embed.proj.weight"),
        "it is an encoder with projectors, distilled from several models",
    ),
    LookAlike("Sapiens2", ("*attn.wq.weight", "*ffn.w12.weight"), "its heads are grouped"),
    LookAlike(
        "Sapiens2", ("*reg_token", "*blocks.0.attn.q_proj.weight", "*gamma_1"), "its heads are grouped"
    ),
    LookAlike("Hiera", ("*blocks.0.attn.qkv.weight", "*blocks.?.proj.weight"), _WINDOWS),
    LookAlike("Hiera", ("*blocks.0.attn.qkv.weight", "*pos_embed_win*"), _WINDOWS),
    LookAlike("Hiera", ("*hiera.embeddings.*",), _WINDOWS),
    LookAlike(
        "timm's NaFlexVit",
        ("*embeds.proj.weight", "*blocks.0.attn.qkv.weight"),
        "its patches are flat and its positions are resized for each image",
        "Use timm for it; SigLIP 2 NaFlex is read from transformers' files",
    ),
    LookAlike("TinyViT", ("*patch_embed.conv1.*", "*.blocks.0.conv1.*"), "its first stages are convolutions"),
    LookAlike("TinyViT", ("*patch_embed.seq.0.*", "*.blocks.0.conv1.*"), "its first stages are convolutions"),
    LookAlike("Swin", ("*layers.0.blocks.0.attn*.relative_position_bias_table*",), _WINDOWS),
    LookAlike(
        "BEiT", ("*blocks.0.attn.q_bias", "*relative_position_bias_table"), "it has relative positions"
    ),
    LookAlike("CaiT", ("*blocks_token_only.*",), "its class token enters after the other blocks"),
    LookAlike(
        "AIMv2 lit",
        ("*.ffn.gate_proj.weight", "*head.k_proj.weight"),
        "its pool has a query without a projection; the AIMv2 models without a pool are read",
        "Use transformers for it",
    ),
    LookAlike("XCiT", ("*blocks.0.attn.temperature",), "it attends over channels, not tokens"),
)


def find_look_alike(names: Collection[str]) -> LookAlike | None:
    """The look-alike that a file with these names holds."""
    for one in LOOK_ALIKES:
        if all(any(fnmatchcase(name, pattern) for name in names) for pattern in one.patterns):
            return one
    return None


# A model whose tensors are exactly those of a family that is read: only a name beside them tells.
_EUPE = LookAlike(
    "EUPE",
    ("eupe",),  # a word of its name
    "its tensors have the names of DINOv3, but it was distilled from several models, and we have not "
    "compared it with its own code",
    "To read its encoder as a DINOv3 all the same, give the family {family}",
)
_LIKE_EUPE = ("dinov3", "timm-dinov3", "hf-dinov3")


def find_by_name(path: Path, settings: Mapping[str, Any], family: str) -> LookAlike | None:
    """The look-alike that a file of this family says to be, by its own name or in its config.json."""
    words = {word for _, name in model_names(path, settings) for word in split_words(name)}
    if family in _LIKE_EUPE and not words.isdisjoint(_EUPE.patterns):
        return _EUPE._replace(advice=_EUPE.advice.format(family=family))
    return None
