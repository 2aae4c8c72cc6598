"""Checks of a model's input: shape and dtype, with advice for common mistakes."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.model.config import ViTConfig
from vitrail.model.init import has_values

_AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what autocast converts
_INPUT_NAMES = {"image": "Images", "video": "Videos", "audio": "Waveforms", "text": "Token ids"}


def check_input(
    images: Tensor, config: ViTConfig, dtype: torch.dtype, *, any_size: bool = False
) -> tuple[int, ...]:
    """Check a batch for a model of this config and dtype, and return its patch grid.

    Args:
        any_size: whether images may have other sizes that are multiples of the patch size.
    """
    name = _INPUT_NAMES[config.input]
    if not isinstance(images, Tensor):
        raise InputError(
            f"{name} must be a torch tensor, not {type(images).__name__}; convert with torch.as_tensor."
        )
    if config.input == "text":
        check_token_ids(images, config.vocabulary or 0)
    shape = config.input_shape
    if any_size and images.ndim == 4 and images.shape[1] == config.channels:
        sides = zip(images.shape[2:], config.patch_pixels, strict=True)
        shape = config.channels, *(max(side // step, 1) * step for side, step in sides)  # rounded down
    if images.ndim != len(shape) + 1 or images.shape[1:] != shape:
        expected = ", ".join(map(str, shape))
        raise InputError(
            f"{name} must have the shape (batch, {expected}), not {tuple(images.shape)}; "
            f"{_shape_advice(tuple(images.shape), config)}."
        )
    if config.input != "text":
        check_dtype(images, dtype, name)
    if not any_size:
        return config.grid
    down, across = config.patch_pixels
    return images.shape[2] // down, images.shape[3] // across


def check_dtype(x: Tensor, dtype: torch.dtype, name: str) -> None:
    """Check that an input has the model's dtype, or one that autocast converts."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # meta has no autocast
    castable = autocast and x.dtype in _AUTOCAST_DTYPES
    if x.dtype != dtype and not castable:
        normalize = "" if x.dtype.is_floating_point else " and normalize them as the model expects"
        raise InputError(
            f"{name} must have the model's dtype, {dtype}, not {x.dtype}; convert them with "
            f".to({dtype}){normalize}."
        )


def check_token_ids(tokens: Tensor, vocabulary: int) -> None:
    """Check token ids (B, T) of any length T.

    Their range is checked on a CPU only: on a GPU, reading values would synchronize at every step.
    """
    if not isinstance(tokens, Tensor):
        raise InputError(
            f"Token ids must be a torch tensor, not {type(tokens).__name__}; convert with torch.tensor."
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"Token ids must be torch.int64 or torch.int32, not {tokens.dtype}; convert with tokens.long()."
        )
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        advice = "add a batch axis: tokens[None]" if tokens.ndim == 1 else "put one sequence in each row"
        raise InputError(
            "Token ids must have the shape (batch, T) with at least one token, not "
            f"{tuple(tokens.shape)}; {advice}."
        )
    on_cpu = tokens.device.type == "cpu" and has_values(tokens)
    if on_cpu and tokens.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in tokens.aminmax())
        if low < 0 or high >= vocabulary:
            raise InputError(
                f"Token ids must be from 0 to {vocabulary - 1}, the vocabulary of the model, not "
                f"{low if low < 0 else high}; use the model's own tokenizer, or build it with a larger "
                "vocabulary."
            )


def check_mask(mask: Tensor | None, z: Tensor) -> Tensor | None:
    """Check a mask of attention for tokens (B, T, D) and return it as (T, T) or (B, 1, T, T)."""
    if mask is None:
        return None
    B, T = z.shape[:2]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        actual = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"A mask must be a torch tensor of bool, True where a token may attend to another, not {actual}; "
            "convert with mask.bool()."
        )
    if mask.shape not in ((T, T), (B, T, T)):
        raise InputError(
            f"A mask must have the shape ({T}, {T}), or ({B}, {T}, {T}) for each image, with the prefix "
            f"tokens first, not {tuple(mask.shape)}."
        )
    return mask if mask.ndim == 2 else mask[:, None]


def _shape_advice(shape: tuple[int, ...], config: ViTConfig) -> str:
    """Advice for a wrong shape."""
    match config.input:
        case "image":
            return _image_advice(shape, config)
        case "video" if len(shape) == 5 and shape[2] == config.channels != shape[1]:
            return "put the channels before the frames: videos.transpose(1, 2)"
        case "video":
            return f"take {config.pixels[0]} frames of each video and resize them"
        case "audio":
            return "crop or pad each waveform, of one channel, to that many samples"
        case "text":
            return "crop or pad each row to that length"


def _image_advice(shape: tuple[int, ...], config: ViTConfig) -> str:
    C, (down, across) = config.channels, config.patch_pixels
    if len(shape) == 3 and shape[0] == C:
        return "add a batch axis: images[None]"
    if len(shape) == 3 and shape[-1] == C:
        return "put the channels first and add a batch axis: images.permute(2, 0, 1)[None]"
    if len(shape) != 4:
        return "stack the images into one batch"
    if shape[1] != C and shape[3] == C:
        return "put the channels first: images.permute(0, 3, 1, 2)"
    if shape[1] != C:
        return f"build the model with channels={shape[1]}, or convert the images"
    if shape[2] % down or shape[3] % across:
        return "resize the images"
    size = tuple(shape[2:])
    return f"resize the images, or the model with vitrail.surgery.resize(model, {size})"
