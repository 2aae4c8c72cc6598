"""Every family there is, in the order in which a file is held against them."""

from __future__ import annotations

from vitrail.weights.families import big_vision, google, timm
from vitrail.weights.table import Family

FAMILIES: tuple[Family, ...] = (*google.FAMILIES, *big_vision.FAMILIES, *timm.FAMILIES)
