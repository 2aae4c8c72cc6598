"""What a model may be given: the shape, the dtype, and a word on the usual slips."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import InputError

AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)  # what autocast turns into its own dtype
NAMES = {"picture": "Pictures", "video": "Videos", "audio": "Sounds", "text": "Tokens"}


def check_input(images: Tensor, config: ViTConfig, dtype: torch.dtype) -> None:
    """Whether this is a batch for a model of this config and dtype."""
    if config.input == "text":
        check_numbers(images, config.vocabulary or 0)
    names = NAMES[config.input]
    if not isinstance(images, Tensor):
        raise InputError(
            f"{names} must come as a torch tensor.",
            type(images).__name__,
            "Convert them with torch.as_tensor.",
        )
    shape = config.input_shape
    spelled = ", ".join(map(str, shape))
    if images.ndim != len(shape) + 1 or images.shape[1:] != shape:
        raise InputError(
            f"{names} must have the shape (batch, {spelled}) that the model was built for.",
            str(tuple(images.shape)),
            shape_advice(tuple(images.shape), config),
        )
    if config.input != "text":
        check_dtype(images, dtype, names)


def check_dtype(x: Tensor, dtype: torch.dtype, names: str) -> None:
    castable = torch.is_autocast_enabled(x.device.type) and x.dtype in AUTOCAST
    if x.dtype != dtype and not castable:
        scale = "" if x.dtype.is_floating_point else ", and scale them as the model expects"
        raise InputError(
            f"{names} must have the model's dtype, {dtype}.",
            str(x.dtype),
            f"Convert them with .to({dtype}){scale}.",
        )


def check_numbers(tokens: Tensor, vocabulary: int) -> None:
    """Whether these are rows of token numbers below the vocabulary, however long.

    Their size is looked at on a CPU only: elsewhere it would make every step wait for the device.
    """
    if not isinstance(tokens, Tensor):
        raise InputError(
            "Tokens must come as a torch tensor.", type(tokens).__name__, "Convert with torch.tensor."
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(
            "Tokens must be whole numbers, torch.int64 or torch.int32.",
            str(tokens.dtype),
            "Convert them with tokens.long().",
        )
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise InputError(
            "Tokens must have the shape (batch, T), T from 1 up.",
            str(tuple(tokens.shape)),
            "Add a batch axis: tokens[None]." if tokens.ndim == 1 else "Put one sequence in each row.",
        )
    if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in tokens.aminmax())
        if low < 0 or high >= vocabulary:
            raise InputError(
                f"Tokens must be numbers from 0 to {vocabulary - 1}, below the vocabulary.",
                str(low if low < 0 else high),
                f"Use the model's own vocabulary, or build the model with more than {vocabulary}.",
            )


def shape_advice(shape: tuple[int, ...], config: ViTConfig) -> str:
    """What to do about a wrong shape, for the slips that are common."""
    match config.input:
        case "picture":
            return picture_advice(shape, config)
        case "video" if len(shape) == 5 and shape[2] == config.channels != shape[1]:
            return "Put the channels before the frames: videos.transpose(1, 2)."
        case "video":
            return "Take as many frames as the model was built for, and resize them."
        case "audio":
            return "Cut or pad the sounds to that many samples, one channel each."
        case "text":
            return "Cut or pad the rows to that length."


def picture_advice(shape: tuple[int, ...], config: ViTConfig) -> str:
    C, (down, across) = config.channels, config.patch_pixels
    if len(shape) == 3 and shape[0] == C:
        return "Add a batch axis: images[None]."
    if len(shape) == 3 and shape[-1] == C:
        return "Put the channels first and add a batch axis: images.permute(2, 0, 1)[None]."
    if len(shape) != 4:
        return "Stack the pictures into one batch."
    if shape[1] != C and shape[3] == C:
        return "Put the channels first: images.permute(0, 3, 1, 2)."
    if shape[1] != C:
        return f"Build the model with channels={shape[1]}, or convert the pictures."
    if shape[2] % down or shape[3] % across:
        return "Resize the pictures."
    return f"Resize the pictures, or the model: size={shape[2:]}."
