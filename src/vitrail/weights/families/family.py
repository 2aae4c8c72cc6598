"""A family: one library's weight files, how to recognize, read, complete and write them.

A new family is one file in families/ and one entry in families/__init__.py. Four small parts describe it:
`Detection` (6 fields), `KeyMap` (6), `Profile` (10) and `Writer` (6); most families set about half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families.key_rows import Row, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess
    from vitrail.weights.families.match import FamilyMatch

ANY_PREFIX = "*"


@dataclass(frozen=True, kw_only=True)
class Detection:
    """How the files of a family are recognized."""

    anchors: tuple[str, ...] = ()
    """Names that must all be present; the first determines {w} and {p}. Without anchors both are empty."""
    without: tuple[str, ...] = ()
    """Patterns of names that mark a file of a related family instead."""
    prefixes: tuple[str, ...] = ("",)
    """Possible values of {p}; `ANY_PREFIX` is whatever matches the most names of the table."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """The number of axes of a tensor, where only that tells two families apart."""
    wrapper: str = ""
    """The key of a torch.save file that holds the tensors, where that distinguishes the family."""
    model_types: tuple[str, ...] = ()
    """Values of model_type in transformers' config.json; with such settings, the family is tried first."""


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """The key table: their tensors and ours."""

    rows: tuple[Row, ...] = ()
    extras: tuple[str, ...] = ()
    """Patterns of tensors that the model does not use. They are kept and written back."""
    respell: tuple[tuple[str, str], ...] = ()
    """Regular expressions in alternative spellings, and what replaces each to give the table's spelling."""
    stacked: str = ""
    """A pattern of names whose tensors hold all blocks along the first axis."""
    own: bool = False
    """Whether the names are ours, as in a plain state dict."""
    zeros: Mapping[str, Callable[[ViTConfig], Shape]] = field(default_factory=dict)
    """Tensors that the library's loader requires and no image needs: written as zeros if we have none."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the shapes of a family's files do not show."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Config fields that hold for every model of the family."""
    choose: Callable[[FamilyMatch], Mapping[str, Any]] | None = None
    """Config fields that depend on which tensors are present."""
    head_width: int | None = None
    """Head width if the number of heads is unknown; None is the one of published models of that width."""
    head_widths: Mapping[int, int] = field(default_factory=dict)
    """The same for models of some widths, which differ from the others of the family."""
    resize: Mapping[str, Any] = field(default_factory=dict)
    """How positions are resized: keywords of `resample.resize_grid`."""
    native: bool = False
    """Whether its models were trained on images in their own shape."""
    preprocess: str = "imagenet"
    """Name of the published preprocessing in `vitrail.images.published_preprocess`."""
    computed: Callable[[ViTConfig], dict[str, Tensor]] | None = None
    """Tensors that the library computes, for a file that does not hold them."""
    check_extras: Callable[[Mapping[str, Tensor]], list[str]] | None = None
    """Notes on the values of tensors beside the model; an error if they ask for another model."""
    follows: str = ""
    """Whose implementation the profile follows, where libraries disagree on the same weights."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How a model is written as a file of the family, and checked against the library itself."""

    expresses: Mapping[str, Any] | None = None
    """For each config field a tuple of the values that the library supports, or `...` for any; other
    fields must have their default. None: only files that came from the family are written back."""
    unsupported: Callable[[ViTConfig], list[str]] | None = None
    """Further reasons why the library cannot express a model."""
    suffix: str = ".safetensors"
    """The kind of file the family's models come in."""
    settings: Callable[[ViTConfig, Preprocess, list[str] | None], dict[str, Any]] | None = None
    """The JSON files of a folder, by name."""
    read_settings: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Config fields from a folder's config.json."""
    peer: Callable[[ViTConfig, dict[str, Tensor]], Callable[[Tensor], Tensor]] | None = None
    """The library's own model, strictly loaded with these tensors: images to logits."""


@dataclass(frozen=True)
class Family:
    """One spelling of one library's model."""

    name: str
    """Such as "hf-dinov2"."""
    group: str
    """What users call it: "hf"."""
    title: str
    """A short description for people."""
    detect: Detection = Detection()
    keys: KeyMap = KeyMap()
    profile: Profile = Profile()
    writer: Writer = Writer()
