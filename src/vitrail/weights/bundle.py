"""One file that is a whole model: weights, config, preprocessing, labels, card, and its own proof.

    bundle = vt.load("pets.safetensors")
    bundle.model(bundle.preprocess(image)[None])
    bundle.save("pets-2.safetensors")

The file is a safetensors file. Its tensors are the model's state dict, `extras/...` and `golden/...`;
its metadata holds one JSON object under "vitrail". The golden inputs are four pictures of levels 0 to
255, with the logits they gave when the file was written: `vitrail verify` sees whether they still do.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError, FileError, InputError, printable
from vitrail.fields import show
from vitrail.preprocess import Preprocess
from vitrail.weights.files import write_safetensors
from vitrail.weights.folder import Stored, unique

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.model import ViT

FORMAT = 1  # raised when an older vitrail could no longer read the file rightly
GOLDEN = 4
OTHERS = (  # endings of formats that a vitrail file is not in
    *(".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy", ".onnx", ".h5", ".hdf5", ".keras"),
    *(".gguf", ".msgpack", ".tflite", ".pb", ".zip", ".tar", ".json", ".pt2"),
)
PARTS = ("format", "config", "preprocess", "labels", "card", "source", "notes")


@dataclass(frozen=True, kw_only=True)
class Card:
    """Where a model comes from and what it may be used for."""

    name: str = ""
    source: str = ""
    licence: str = "unknown"
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, torch and vitrail, when the file was written."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The file a model was read from, so that it can be written back as it was."""

    family: str
    spelled: Mapping[str, str]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Every tensor of the file, its dtype and its shape."""
    keys: Sequence[Any] = ()
    """The rows of the user's own table that it was read by."""


@dataclass(kw_only=True)
class Bundle:
    """A model with all that is needed to use it. What is not given has a sensible default."""

    model: ViT
    preprocess: Preprocess | None = None
    labels: list[str] | None = None
    card: Card = field(default_factory=Card)
    source: Source | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the original file that the model does not use, such as a mask token."""
    notes: list[str] = field(default_factory=list)
    """What was taken on trust or changed when the model was loaded, a sentence each."""

    def __post_init__(self) -> None:
        from vitrail.model import ViT

        if not isinstance(self.model, ViT):
            raise InputError("A bundle holds a ViT.", show(self.model), "Build one with vitrail.create.")
        config = self.model.config
        if self.preprocess is None and config.input == "picture":
            half = (0.5,) * config.channels
            self.preprocess = Preprocess(size=config.pixels, mean=half, std=half)  # type: ignore[arg-type]
        check_preprocess(self.preprocess, config)
        if self.labels is not None:
            self.labels = check_labels(self.labels, config.classes)

    def save(self, path: str | Path) -> None:
        """Write the file, as safetensors; whole, or not at all. A file of that name is replaced."""
        check_ending(path)
        inputs = golden_inputs(self.model.config)
        self.write(path, inputs, self.golden_logits(inputs))

    def write(self, path: str | Path, inputs: Tensor, logits: Tensor) -> None:
        """Write the file with these golden inputs and their logits."""
        state = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        tensors = {**as_they_were(state, self.source), **{f"extras/{n}": t for n, t in self.extras.items()}}
        tensors |= {"golden/inputs": inputs, "golden/logits": logits}
        # One entry alone: of several, safetensors writes now this one first, now that, and files that
        # hold the same would not be the same.
        write_safetensors(path, tensors, {"vitrail": json.dumps(self.describe())})

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON has it."""
        return {
            "format": FORMAT,
            "config": asdict(self.model.config),
            "preprocess": None if self.preprocess is None else asdict(self.preprocess),
            "labels": self.labels,
            "card": {**asdict(self.card), "versions": versions()},
            "source": None if self.source is None else asdict(self.source),
            "notes": self.notes,
        }

    def golden_logits(self, inputs: Tensor) -> Tensor:
        """What the model makes of the golden inputs, in float32 on the CPU."""
        import copy

        import torch

        from vitrail.model.modes import evaluating

        model = self.model
        if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()):
            model = copy.deepcopy(model).to(device="cpu", dtype=torch.float32)
        with evaluating(model):
            return model(self.as_input(inputs)).float().contiguous()

    def as_input(self, levels: Tensor) -> Tensor:
        """Golden levels as the model takes them."""
        import torch

        if self.preprocess is None:
            return levels
        pictures = levels.permute(0, 2, 3, 1).numpy()  # (B, H, W, C)
        return torch.stack([self.preprocess.normalise(picture) for picture in pictures])


def check_ending(path: str | Path, *written: str) -> None:
    """A name that promises another format than the one that is written is refused."""
    suffix = Path(path).suffix.lower()
    if suffix in OTHERS and suffix not in written:
        ends = " or ".join([".safetensors", *written])
        raise FileError(f"{printable(path)} cannot be written as {suffix}: let its name end in {ends}.")


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors with a NaN or an infinity."""
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]


def check_preprocess(preprocess: Preprocess | None, config: ViTConfig) -> None:
    if preprocess is None:
        return
    shape = preprocess.channels, *preprocess.target
    if config.input != "picture" or shape != config.input_shape:
        raise ConfigError(
            "The preprocessing must give what the model takes.",
            f"pictures of {shape} for a model that takes {config.input_shape}",
            "Use dataclasses.replace(preprocess, size=...), or leave it out.",
        )


def check_labels(labels: Any, classes: int) -> list[str]:
    good = isinstance(labels, (list, tuple)) and all(isinstance(label, str) for label in labels)
    if not good or len(labels) != classes:
        raise ConfigError(
            f"labels must be a list of {classes} names, one for each class.",
            f"{len(labels)} of them" if good else show(labels),
            "Give as many names as the model has classes.",
        )
    return list(labels)


def versions() -> dict[str, str]:
    import torch

    from vitrail import __version__

    return {"vitrail": __version__, "torch": torch.__version__, "python": platform.python_version()}


def as_they_were(state: Mapping[str, Tensor], source: Source | None) -> dict[str, Tensor]:
    """Tensors in the dtype of the file they came from, where that loses nothing."""
    import torch

    dtypes = {dtype for dtype, _ in source.tensors.values()} if source else set()
    floats = [dtype for dtype in sorted(dtypes) if "float" in dtype]
    if len(floats) != 1 or floats[0] == "float32":
        return dict(state)
    dtype = getattr(torch, floats[0])
    return {name: exactly(tensor, dtype) for name, tensor in state.items()}


def exactly(tensor: Tensor, dtype: Any) -> Tensor:
    """The tensor in another dtype, if every number survives."""
    import torch

    cast = tensor.to(dtype)
    back = cast.to(tensor.dtype)
    return cast if torch.equal(torch.nan_to_num(back), torch.nan_to_num(tensor)) else tensor


def golden_inputs(config: ViTConfig) -> Tensor:
    """Four inputs that are the same everywhere: waves of growing frequency, with noise on top.

    Pictures are levels from 0 to 255; videos and sounds lie between -1 and 1; texts are numbers.
    """
    import torch

    shape = (GOLDEN, *config.input_shape)
    noise = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    if config.input == "text":
        return noise * 7919 % (config.vocabulary or 1)
    places = torch.arange(noise[0].numel()).reshape(shape[1:]) / noise[0].numel()
    waves = [torch.sin(6.283 * 3 ** (number + 1) * places) for number in range(GOLDEN)]
    mixed = torch.stack(waves) * 96 + noise / 4 + 96  # from 0 to 255.75
    if config.input == "picture":
        return mixed.to(torch.uint8)
    return (mixed / 127.5 - 1).float()


# ---- reading --------------------------------------------------------------------------------


def read_header(file: Stored) -> dict[str, Any] | None:
    """The JSON object of one of our files, checked; None where the file is not ours."""
    if "vitrail" not in file.metadata:
        return None
    try:
        header = json.loads(file.metadata["vitrail"], object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"its description is no JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise damaged(file, "its description has no format version")
    if header["format"] > FORMAT:
        raise FileError(
            f"This vitrail reads files up to format {FORMAT}.",
            f"{printable(str(file.path))} of format {header['format']}",
            "Install a newer vitrail.",
        )
    unknown = [key for key in header if key not in PARTS]
    if unknown or not isinstance(header.get("config"), dict):
        raise damaged(file, f"its description has {printable(str(unknown)) if unknown else 'no config'}")
    return header


def damaged(file: Stored, reason: str) -> FileError:
    return FileError(
        "A vitrail file must describe its model.", f"{printable(str(file.path))}: {reason}", "Save it again."
    )


def parse(file: Stored, header: Mapping[str, Any]) -> dict[str, Any]:
    """Config, preprocessing, labels, card, source and notes of one of our files, each checked."""
    try:
        config = ViTConfig(**as_tuples(header["config"]))
        spec = header.get("preprocess")
        preprocess = None if spec is None else Preprocess(**as_tuples(spec))
        labels = header.get("labels")
        source = header.get("source")
        parts = {
            "config": config,
            "preprocess": preprocess,
            "labels": None if labels is None else check_labels(labels, config.classes),
            "card": Card(**header.get("card", {})),
            "source": None if source is None else Source(**{**source, "tensors": read_tensors(source)}),
            "notes": [str(note) for note in header.get("notes", [])],
        }
        check_preprocess(preprocess, config)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise damaged(file, printable(str(error))) from error
    return parts


def read_tensors(source: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        str(n): (str(dtype), tuple(int(s) for s in shape)) for n, (dtype, shape) in source["tensors"].items()
    }


def as_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
