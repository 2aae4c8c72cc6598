"""The model of the paper. vit.py is where to start; it names the file of every part."""

from vitrail.model import surgery
from vitrail.model.attention import Attention, attend, attend_explicitly
from vitrail.model.block import Block
from vitrail.model.decoder import Decoder, DecoderConfig, generate
from vitrail.model.tap import edit, record
from vitrail.model.vit import Encoded, ViT

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "DecoderConfig",
    "Encoded",
    "ViT",
    "attend",
    "attend_explicitly",
    "edit",
    "generate",
    "record",
    "surgery",
]
