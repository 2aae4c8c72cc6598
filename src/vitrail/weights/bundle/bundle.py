"""Bundle: a complete model in one file, with its config, preprocessing, labels, card and golden logits.

    bundle = vt.load("pets.safetensors")
    bundle.model(bundle.preprocess(image)[None])
    bundle.save("pets-2.safetensors")

The file is a safetensors file. Its tensors are the model's state dict, `extras/...`, `golden/...`,
`features/...` (feature_statistics.py), `fingerprint/...` (fingerprint.py) and, as bytes, the files of a text
tower's tokenizer, `text/...`; its metadata holds one JSON object under "vitrail". The golden inputs are four
images of uint8 pixels, with the logits they gave when the file was written: `vitrail verify` checks that they
still do.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, FileError, InputError, printable
from vitrail.base.fields import short_repr
from vitrail.base.summary import Summary, first_names
from vitrail.images.fingerprint import Fingerprint
from vitrail.images.preprocess import Preprocess, default_preprocess
from vitrail.model.config import ViTConfig
from vitrail.weights.bundle.feature_statistics import PREFIX, FeatureStatistics
from vitrail.weights.bundle.scores import Scores
from vitrail.weights.readers.files import write_safetensors
from vitrail.weights.readers.folder import HEADER_KEY, TEXT_PREFIX

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vitrail.model import ViT
    from vitrail.weights.text.words import TextEncoder

FORMAT = 4  # increased when an older vitrail could no longer read the file correctly
_OLDER = (2, 3)  # which can say all but native: without a text tower, and with one
_GOLDEN_COUNT = 4
_OTHER_SUFFIXES = (  # of formats that a vitrail file is not in
    *(".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy", ".onnx", ".h5", ".hdf5", ".keras"),
    *(".gguf", ".msgpack", ".tflite", ".pb", ".zip", ".tar", ".json", ".pt2"),
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """Where a model comes from and what it may be used for."""

    name: str = ""
    source: str = ""
    license: str = "unknown"
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, torch and vitrail, when the file was written."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The file a model was read from, so that it can be written back unchanged."""

    family: str
    spelled: Mapping[str, str]
    """The prefixes of its names, w and p."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Every tensor of the file, its dtype and its shape."""
    keys: Sequence[Any] = ()
    """The rows of the user's key table, if it was read by one."""


@dataclass(kw_only=True, repr=False)
class Bundle(Summary):
    """A model with everything needed to use it. What is not given has a sensible default."""

    model: ViT
    preprocess: Preprocess | None = None
    labels: list[str] | None = None
    scores: Scores = field(default_factory=Scores)
    """How logits become scores: by softmax, or by sigmoid with a threshold per class."""
    card: Card = field(default_factory=Card)
    source: Source | None = None
    statistics: FeatureStatistics | None = None
    """Of the features of the training set, to tell images that are unlike them; None if there are none."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the original file that the model does not use, such as a mask token."""
    fingerprint: Fingerprint | None = None
    """Which images the model was trained on, if that is known."""
    notes: list[str] = field(default_factory=list)
    """What was assumed or changed when the model was loaded, a sentence each."""
    guess: str = ""
    """If the preprocessing is a guess: what was assumed, what else it may be, and how to choose."""
    text_files: dict[str, bytes] = field(default_factory=dict)
    """The settings and the tokenizer of a text tower, by file name."""
    native: Mapping[str, Any] | None = None
    """Of a model for images in their own shape: how positions are resized (native.py)."""

    @property
    def has_text(self) -> bool:
        """Whether the file has a text tower."""
        if not self.extras:
            return False
        from vitrail.weights.text.words import entries_of, has_text

        return has_text(entries_of(self.extras))

    @property
    def needs_words(self) -> bool:
        """Whether it has a text tower, and no classes of its own: the outputs are an embedding of images."""
        return self.labels is None and self.has_text

    def require_classes(self, advice: str) -> None:
        """Refuse a file with both towers as a classifier."""
        if self.needs_words:
            raise InputError(f"This model has a text tower and no classes of its own; {advice}")

    @cached_property
    def text(self) -> TextEncoder:
        """The text tower: `bundle.text(["a photo of a cat"])` are unit vectors (B, E)."""
        from vitrail.weights.text.words import build_text

        encoder = build_text(self.extras, self.text_files, self.model.config)
        encoder.tower.to(next(self.model.parameters()).device)
        return encoder

    def zero_shot(self, labels: Sequence[str], templates: Sequence[str] | None = None) -> Bundle:
        """A classifier of these classes, from the text tower: an ordinary bundle.

        Args:
            templates: texts with {} in place of the class; an ensemble of our own by default.
        """
        from vitrail.weights.text.prompts import bake_prompts, fill_templates

        return bake_prompts(self, fill_templates(labels, templates))

    def __post_init__(self) -> None:
        from vitrail.model import ViT

        if not isinstance(self.model, ViT):
            raise InputError(
                f"A bundle holds a ViT, not {short_repr(self.model)}; build one with vitrail.create."
            )
        config = self.model.config
        if self.preprocess is None and config.input == "image":
            self.preprocess = default_preprocess(config)
        check_preprocess(self.preprocess, config)
        if self.labels is not None:
            self.labels = check_labels(self.labels, config.classes)
        self.scores.check_classes(config.classes)
        if self.statistics is not None:
            self.statistics.check_width(config.pooled_width)

    def summary(self) -> dict[str, str]:
        """Size, input and classes of the model, and where it comes from."""
        config, card = self.model.config, self.card
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        rows = {
            "name": card.name,
            "model": f"ViT of width {config.width}, depth {config.depth}, {parameters:,} parameters",
            "input": f"{config.input} {config.input_shape}",
            "classes": first_names(self.labels or [], config.classes),
            "license": "" if card.license == "unknown" else card.license,
        }
        return {name: text for name, text in rows.items() if text}

    def save(self, path: str | Path) -> None:
        """Write the file as safetensors, completely or not at all. An existing file is replaced."""
        if Path(path).suffix.lower() in (".pth", ".pt", ".bin"):
            raise FileError(
                f"{printable(path)} cannot be written: a bundle is a .safetensors file. For plain weights, "
                "use torch.save(bundle.model.state_dict(), path); vt.load reads them, but they have no "
                "preprocessing and no labels."
            )
        check_suffix(path)
        inputs = golden_inputs(self.model.config)
        self.write(path, inputs, self.golden_logits(inputs))

    def write(self, path: str | Path, inputs: Tensor, logits: Tensor) -> None:
        """Write the file with these golden inputs and their logits."""
        import torch

        state = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        tensors = {
            **in_source_dtype(state, self.source),
            **{f"extras/{n}": t for n, t in self.extras.items()},
        }
        tensors |= {"golden/inputs": inputs, "golden/logits": logits}
        if self.fingerprint is not None:
            tensors |= {n: torch.from_numpy(array) for n, array in self.fingerprint.arrays().items()}
        if self.statistics is not None:
            tensors |= {PREFIX + n: torch.from_numpy(a) for n, a in self.statistics.arrays().items()}
        for name, data in self.text_files.items():
            tensors[TEXT_PREFIX + name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        # Only one entry: safetensors writes several in varying order, and equal models would give different
        # files.
        write_safetensors(path, tensors, {HEADER_KEY: json.dumps(self.describe())})

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors, for JSON."""
        return {
            "format": _OLDER[bool(self.text_files)] if self.native is None else FORMAT,
            "config": asdict(self.model.config),
            "preprocess": None if self.preprocess is None else asdict(self.preprocess),
            "labels": self.labels,
            "scores": self.scores.describe(),
            "card": {**asdict(self.card), "versions": versions()},
            "source": None if self.source is None else asdict(self.source),
            "notes": self.notes,
            **({} if self.native is None else {"native": dict(self.native)}),
            "fingerprint": None if self.fingerprint is None else self.fingerprint.describe(),
        }

    def golden_logits(self, inputs: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The model's logits for the golden inputs, in float32 without TF32; on the CPU by default."""
        import copy

        import torch

        from vitrail.model.device import eval_mode

        model, device = self.model, torch.device(device)
        if any(p.dtype != torch.float32 or p.device != device for p in model.parameters()):
            model = copy.deepcopy(model).to(device=device, dtype=torch.float32)
        # cuDNN's convolutions round to TF32.
        exact = torch.backends.cudnn.flags(enabled=False) if device.type == "cuda" else nullcontext()
        with eval_mode(model), exact:
            return model(self.as_input(inputs).to(device)).float().cpu().contiguous()

    def as_input(self, golden: Tensor) -> Tensor:
        """The model's input for golden inputs; pixels are normalized."""
        import torch

        if self.preprocess is None:
            return golden
        images = golden.permute(0, 2, 3, 1).numpy()  # (B, H, W, C)
        return torch.stack([self.preprocess.normalize(image) for image in images])


def check_suffix(path: str | Path, *allowed: str) -> None:
    """Refuse a file name that promises another format than the one written."""
    suffix = Path(path).suffix.lower()
    if suffix in _OTHER_SUFFIXES and suffix not in allowed:
        endings = " or ".join([".safetensors", *allowed])
        raise FileError(
            f"{printable(path)} cannot be written as {suffix}; use a name that ends in {endings}."
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with NaN or infinity."""
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]


def check_preprocess(preprocess: Preprocess | None, config: ViTConfig) -> None:
    if preprocess is None:
        return
    shape = preprocess.channels, *preprocess.target
    if config.input != "image" or shape != config.input_shape:
        raise ConfigError(
            f"The preprocessing gives images of {shape}, but the model takes {config.input_shape}; use "
            "dataclasses.replace(preprocess, size=...), or leave it out."
        )


def check_labels(labels: Any, classes: int) -> list[str]:
    valid = isinstance(labels, (list, tuple)) and all(isinstance(label, str) for label in labels)
    if not valid or len(labels) != classes:
        raise ConfigError(
            f"labels must be a list of {classes} names, one for each class of the model, but got "
            f"{len(labels) if valid else short_repr(labels)}."
        )
    return list(labels)


def versions() -> dict[str, str]:
    """The versions of vitrail, torch and Python."""
    import torch

    from vitrail.base.version import __version__

    return {"vitrail": __version__, "torch": torch.__version__, "python": platform.python_version()}


def in_source_dtype(state: Mapping[str, Tensor], source: Source | None) -> dict[str, Tensor]:
    """Tensors in the dtype of the file they came from, if that loses nothing."""
    import torch

    dtypes = {dtype for dtype, _ in source.tensors.values()} if source else set()
    floats = [dtype for dtype in sorted(dtypes) if "float" in dtype]
    if len(floats) != 1 or floats[0] == "float32":
        return dict(state)
    dtype = getattr(torch, floats[0])
    return {name: cast_exactly(tensor, dtype) for name, tensor in state.items()}


def cast_exactly(tensor: Tensor, dtype: Any) -> Tensor:
    """The tensor in another dtype if that changes no value, else unchanged."""
    import torch

    cast = tensor.to(dtype)
    back = cast.to(tensor.dtype)
    return cast if torch.equal(torch.nan_to_num(back), torch.nan_to_num(tensor)) else tensor


def golden_inputs(config: ViTConfig) -> Tensor:
    """Four inputs that are the same everywhere: waves of increasing frequency with noise.

    Images are pixels from 0 to 255; video and audio are between -1 and 1; text is token ids.
    """
    import torch

    shape = (_GOLDEN_COUNT, *config.input_shape)
    noise = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    if config.input == "text":
        return noise * 7919 % (config.vocabulary or 1)
    positions = torch.arange(noise[0].numel()).reshape(shape[1:]) / noise[0].numel()
    waves = [torch.sin(6.283 * 3 ** (number + 1) * positions) for number in range(_GOLDEN_COUNT)]
    mixed = torch.stack(waves) * 96 + noise / 4 + 96  # from 0 to 255.75
    if config.input == "image":
        return mixed.to(torch.uint8)
    return (mixed / 127.5 - 1).float()
