"""Published preprocessing, and conversion from and to the settings of timm and transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitrail.base.errors import ConfigError, suggest
from vitrail.base.fields import is_real, short_repr
from vitrail.images.preprocess import HALF, INTERPOLATIONS, Preprocess

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# Resize mode, interpolation, the fraction of each side that the crop keeps, and mean and std.
PUBLISHED: dict[str, tuple[Any, Any, float, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "google": ("squash", "bilinear", 1, (HALF, HALF)),  # google/vit-base-patch16-224 in transformers
    "augreg": ("shortest", "bicubic", 0.9, (HALF, HALF)),  # timm, vision_transformer.py, _cfg
    "imagenet": ("shortest", "bicubic", 0.875, IMAGENET),  # timm, data/config.py, unless a model overrides it
    "deit": ("shortest", "bicubic", 0.9, IMAGENET),  # timm, deit.py, _cfg
    "clip": ("shortest", "bicubic", 1, CLIP),  # openai/CLIP, clip.py, _transform
    "siglip": ("squash", "bicubic", 1, (HALF, HALF)),  # google/siglip-base-patch16-224 in transformers
    "torchvision": ("shortest", "bilinear", 0.875, IMAGENET),  # ViT_B_16_Weights.IMAGENET1K_V1
    "dinov2": ("shortest", "bicubic", 0.875, IMAGENET),  # facebookresearch/dinov2, data/transforms.py
    "mobileclip": ("shortest", "bilinear", 1, ((0.0,) * 3, (1.0,) * 3)),  # apple/ml-mobileclip, __init__.py
    "perception-encoder": ("squash", "bilinear", 1, (HALF, HALF)),  # perception_models, transforms.py
    "siglip2-naflex": ("squash", "bilinear", 1, (HALF, HALF)),  # its processor, for a square
    "dinov3": ("squash", "bilinear", 1, IMAGENET),  # facebookresearch/dinov3, README; LVD-1689M weights
}


def published_preprocess(name: str, size: int = 224) -> Preprocess:
    """The preprocessing that weights were published with, for images of this size."""
    if name not in PUBLISHED:
        raise ConfigError(f"unknown published preprocessing {name!r}. {suggest(str(name), PUBLISHED)}")
    resize, interpolation, fraction, (mean, std) = PUBLISHED[name]
    before = math.floor(size / fraction)
    return Preprocess(
        size=size, resize=resize, resize_to=before, interpolation=interpolation, mean=mean, std=std
    )


# Whether transformers takes a single number as `size` for the short side, by the start of the processor type.
_HF_SHORT = {"CLIP": True, "ChineseCLIP": True, "Bit": True, "ViT": False, "DeiT": False, "Beit": False}
# The keys that are read, then those that do not change pixels. Any other key is refused if it is set.
_HF_KEYS = (
    "do_resize size resample do_center_crop crop_size do_rescale rescale_factor do_normalize image_mean "
    "image_std image_processor_type feature_extractor_type "
    "do_convert_rgb processor_class model_input_names data_format input_data_format return_tensors device "
    "disable_grouping default_to_square do_reduce_labels image_seq_length auto_map"
)


def from_hf(settings: Mapping[str, Any]) -> Preprocess:
    """From a preprocessor_config.json. Types that end in Fast resize in torch, others in Pillow."""
    given = {key: value for key, value in settings.items() if value is not None}
    naflex = str(given.get("image_processor_type", "")).startswith("Siglip2")  # without a size of its own
    for key, value in given.items():
        known = key in _HF_KEYS.split() or (naflex and key in ("max_num_patches", "patch_size"))
        _refuse(key, value, when=bool(value) and not known)
    kind = str(given.get("image_processor_type", given.get("feature_extractor_type", "")))
    resizes, crops = given.get("do_resize", True), given.get("do_center_crop", False)
    size, short = _hf_size(given, "size", kind if crops else "ViT")
    _refuse("size", given["size"], when=short and not (resizes and crops))  # images keep their aspect ratio
    _refuse("do_center_crop", crops, when=crops and not resizes)
    fields: dict[str, Any] = {"size": size, "resize": "none"}
    if resizes:
        fields["resize"] = "shortest" if short else "squash"
    if resizes or "resample" in given:
        _refuse(
            "resample", given.get("resample"), when=given.get("resample") not in range(len(INTERPOLATIONS))
        )
        fields["interpolation"] = INTERPOLATIONS[given["resample"]]
    if crops:
        fields |= {"size": _hf_size(given, "crop_size", "ViT")[0], "resize_to": size, "crop_rounding": "down"}
    if given.get("do_normalize", True):
        mean, std = given.get("image_mean"), given.get("image_std")
        _refuse("image_mean", mean, when=not isinstance(mean, (tuple, list)) or len(mean) not in (1, 3))
        _refuse("image_std", std, when=std is None)
    else:
        mean, std = (0, 0, 0), (1, 1, 1)
    scale = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1
    backend = "torch" if kind.endswith("Fast") else "pillow"
    return Preprocess(backend=backend, scale=scale, mean=mean, std=std, **fields)  # type: ignore[arg-type]


def complete_hf(settings: Mapping[str, Any], default: Preprocess) -> tuple[dict[str, Any], list[str]]:
    """A preprocessor_config.json whose missing keys are taken from `default`; and those keys."""
    given = {key: value for key, value in settings.items() if value is not None}
    (h, w), fill = default.target, dict[str, Any]()
    if given.get("do_center_crop", False):
        crop = given.get("crop_size", max(h, w))
        sides = crop.values() if isinstance(crop, dict) else [crop]
        lengths = [side for side in sides if isinstance(side, int)] or [max(h, w)]
        fill = {"size": {"shortest_edge": max(lengths)}, "crop_size": {"height": h, "width": w}}
    else:
        fill = {"size": {"height": h, "width": w}}
    if given.get("do_resize", True):
        fill["resample"] = INTERPOLATIONS.index(default.interpolation)
    if given.get("do_normalize", True):
        fill |= {"image_mean": list(default.mean), "image_std": list(default.std)}
    return {**fill, **given}, [key for key in fill if key not in given]


def _hf_size(given: Mapping[str, Any], key: str, kind: str) -> tuple[Any, bool]:
    """A size in transformers' format, and whether it is only the short side."""
    value = given.get(key)
    sized = {name: side for name, side in value.items() if side} if isinstance(value, dict) else {}
    if sized.keys() == {"height", "width"}:
        return (sized["height"], sized["width"]), False
    if sized.keys() == {"shortest_edge"}:
        return sized["shortest_edge"], True
    short = [short for begin, short in _HF_SHORT.items() if kind.startswith(begin)]
    _refuse(key, value, when=not isinstance(value, int) or not short)
    return value, short[0]


def to_hf(spec: Preprocess) -> dict[str, Any]:
    """To a preprocessor_config.json, for transformers and `from_hf`."""
    _only("transformers", spec, channels=(1, 3), crop_rounding=("down" if spec.crops else "even",))
    (H, W), (h, w) = spec.target, spec.before_crop
    fast = "Fast" if spec.backend == "torch" else ""
    settings = {
        "image_processor_type": ("CLIP" if spec.crops else "ViT") + "ImageProcessor" + fast,
        "do_convert_rgb": spec.channels == 3,
        "do_resize": spec.resize != "none",
        "size": {"shortest_edge": h} if spec.resize == "shortest" else {"height": h, "width": w},
        "resample": INTERPOLATIONS.index(spec.interpolation),
        "do_center_crop": spec.crops,
        "do_rescale": True,
        "rescale_factor": spec.scale,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    return settings | ({"crop_size": {"height": H, "width": W}} if spec.crops else {})


def from_timm(settings: Mapping[str, Any]) -> Preprocess:
    """From a pretrained_cfg or data_config; the defaults are those of timm's resolve_data_config."""
    given = {key: value for key, value in settings.items() if value}
    shape, fraction = given.get("input_size", (3, 224, 224)), given.get("crop_pct", 0.875)
    mode, mean = given.get("crop_mode", "center"), given.get("mean", IMAGENET[0])
    _refuse("crop_border_pixels", given.get("crop_border_pixels"), when="crop_border_pixels" in given)
    _refuse("crop_mode", mode, when=mode not in ("center", "squash"))
    _refuse("crop_pct", fraction, when=not is_real(fraction))
    _refuse("input_size", shape, when=not isinstance(shape, (tuple, list)) or len(shape) != 3)
    # For a rectangular center timm rounds differently, and always resizes bilinearly.
    _refuse("input_size", shape, when=mode == "center" and shape[1] != shape[2])
    _refuse("mean", mean, when=not isinstance(mean, (tuple, list)) or len(mean) != shape[0])
    return Preprocess(
        size=(shape[1], shape[2]),
        resize="squash" if mode == "squash" else "shortest",
        resize_to=(math.floor(shape[1] / fraction), math.floor(shape[2] / fraction)),
        interpolation=given.get("interpolation", "bicubic"),
        mean=mean,
        std=given.get("std", IMAGENET[1]),
    )


def to_timm(spec: Preprocess) -> dict[str, Any]:
    """To a data_config, for timm.data.create_transform and `from_timm`."""
    (H, W), before = spec.target, spec.before_crop
    resizes = ("squash", "shortest") if H == W else ("squash",)
    _only("timm", spec, channels=(1, 3), resize=resizes, backend=("pillow",), crop_rounding=("even",))
    _only("timm", spec, scale=(1 / 255,))
    # timm rounds H / crop_pct down: where H / h is just below an integer, half a pixel more avoids it.
    fractions = [part for extra in (0, 0.5) for part in (H / (before[0] + extra), W / (before[1] + extra))]
    fitting = [part for part in fractions if (math.floor(H / part), math.floor(W / part)) == before]
    if not fitting:
        raise ConfigError(
            f"timm has one crop_pct for both sides, which cannot express size={spec.size} with "
            f"resize_to={spec.resize_to}; use a resize_to of the same shape as size."
        )
    return {
        "input_size": (spec.channels, H, W),
        "interpolation": spec.interpolation,
        "crop_pct": fitting[0],
        "crop_mode": "squash" if spec.resize == "squash" else "center",
        "mean": spec.mean,
        "std": spec.std,
    }


def _refuse(key: str, value: Any, *, when: bool) -> None:
    """Refuse a setting that Preprocess cannot express exactly."""
    if when:
        raise ConfigError(
            f"{key}={short_repr(value)} cannot be expressed by Preprocess; set its fields by hand instead."
        )


def _only(library: str, spec: Preprocess, **allowed: tuple[Any, ...]) -> None:
    """Refuse fields that the other library would read differently."""
    for name, values in allowed.items():
        if getattr(spec, name) not in values:
            raise ConfigError(
                f"{library} cannot express {name}={short_repr(getattr(spec, name))}, only "
                f"{' or '.join(map(repr, values))}; change it with dataclasses.replace, if pixels may differ "
                "a little."
            )
