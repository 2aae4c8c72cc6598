"""Models of images in their own shape: how their images are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from vitrail.base.errors import InputError
from vitrail.images.any_size import NativePreprocess, native_preprocess

if TYPE_CHECKING:
    from vitrail.images.preprocess import Preprocess
    from vitrail.model import ViT
    from vitrail.weights.bundle.bundle import Bundle

_DEFAULT: Mapping[str, Any] = {}


def use_native(model: ViT, preprocess: Preprocess, resize: Mapping[str, Any] = _DEFAULT) -> NativePreprocess:
    """Have the model accept any size; return the preprocessing that gives images their own.

    Args:
        resize: how positions are resized, see `ViT.accept_any_size`.
    """
    model.accept_any_size(**resize)
    patch = cast("tuple[int, int]", model.config.patch_pixels)
    return native_preprocess(preprocess, patch, model.config.patches)


def reading_preprocess(bundle: Bundle, model: ViT | None = None, *, native: bool | None = None) -> Preprocess:
    """How a model's images are read: in their own shape, if it was trained on such images.

    Args:
        model: what reads them instead of the bundle's own model, such as a copy of it without a head.
        native: whether images shall keep their shape, whatever the model was trained on.
    """
    if bundle.preprocess is None:
        raise InputError(f"The model takes {bundle.model.config.input}, not images.")
    if not (bundle.native is not None if native is None else native):
        return bundle.preprocess
    from vitrail.weights.families.recognize import position_resize_options

    resize = position_resize_options(bundle.source) if bundle.native is None else bundle.native
    return use_native(model or bundle.model, bundle.preprocess, resize)


def check_native(bundle: Bundle | None) -> None:
    """Refuse a model that was not trained on images in their own shape."""
    if bundle is None or bundle.native is None:
        raise InputError(
            "This model was trained on images of one shape, so native is not for it; remove native, or train "
            "a model with native=true. vitrail predict --native tries any model."
        )
