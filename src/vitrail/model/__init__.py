"""The Vision Transformer. Start with vit.py, which names the file of each part."""

from vitrail.model import surgery
from vitrail.model.attention import Attention, attend, attend_explicitly
from vitrail.model.block import Block
from vitrail.model.decoder import Decoder, DecoderConfig, generate
from vitrail.model.tap import edit, record
from vitrail.model.text_tower import TextConfig, TextTower
from vitrail.model.vit import Encoded, ViT

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "DecoderConfig",
    "Encoded",
    "TextConfig",
    "TextTower",
    "ViT",
    "attend",
    "attend_explicitly",
    "edit",
    "generate",
    "record",
    "surgery",
]
