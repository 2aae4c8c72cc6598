"""Models whose files look like a plain ViT's and are something else: refused by name.

Some of them share every name with a family that is read, and would give wrong logits without a word.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import NamedTuple


class LookAlike(NamedTuple):
    """A model that is not read, and the names that only its files have together."""

    name: str
    patterns: tuple[str, ...]
    """Each must match a name in the file."""
    reason: str
    """What it is instead."""


_WINDOWS = "it has windows and stages of different widths"

LOOK_ALIKES = (
    LookAlike("EUPE", ("*projectors.*", "*patch_embed.proj.weight"), "it is an encoder with projectors"),
    LookAlike("Sapiens2", ("*attn.wq.weight", "*ffn.w12.weight"), "its heads are grouped"),
    LookAlike(
        "Sapiens2", ("*reg_token", "*blocks.0.attn.q_proj.weight", "*gamma_1"), "its heads are grouped"
    ),
    LookAlike("Hiera", ("*blocks.0.attn.qkv.weight", "*blocks.?.proj.weight"), _WINDOWS),
    LookAlike("Hiera", ("*hiera.embeddings.*",), _WINDOWS),
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
    ),
    LookAlike("XCiT", ("*blocks.0.attn.temperature",), "it attends over channels, not tokens"),
)


def find_look_alike(names: Collection[str]) -> LookAlike | None:
    """The look-alike that a file with these names holds."""
    for one in LOOK_ALIKES:
        if all(any(fnmatchcase(name, pattern) for name in names) for pattern in one.patterns):
            return one
    return None
