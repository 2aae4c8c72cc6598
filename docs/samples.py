"""Tiny random models of every family, in files: what docs/weights.py measures.

The libraries make them themselves, by the builders of tests/weights. Where the library is out of Python's
reach here (flax), the tests' own forward stands for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vitrail as vt
from bench.peers import make_torchvision_importable

TESTS = Path(__file__).parents[1] / "tests"


@dataclass(frozen=True)
class Sample:
    """A random model of somebody else's, in a file."""

    path: Path
    """What `vitrail.load` is given."""
    arrays: Mapping[str, np.ndarray]
    """What the file holds."""
    theirs: Callable[[Tensor], Tensor]
    """Pictures to logits, or to the pooled vector where there are no classes."""
    reference: str
    """Who computes that."""
    facts: Mapping[str, Any] = field(default_factory=lambda: {"heads": 2})
    """What the file does not tell."""


def borrowed(name: str) -> Any:
    """A module of tests/weights, found as pytest finds it."""
    for folder in (TESTS / "weights", TESTS, TESTS.parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    make_torchvision_importable()  # before anything imports timm or transformers
    return import_module(name)


def version(package: str) -> str:
    return f"{package} {metadata.version(package)}"


def as_arrays(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, read by the libraries of its format and not by ours."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    from safetensors.numpy import load_file

    return load_file(path)


def in_file(folder: Path, state: Mapping[str, Tensor], theirs: Any, reference: str, **facts: Any) -> Sample:
    from safetensors.torch import save_file

    path = folder / "in.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, path)
    return Sample(path, read_arrays(path), theirs, reference, {"heads": 2, **facts})


def flax(folder: Path, seed: int, module: str, name: str) -> Sample:
    made = borrowed(module)
    model = getattr(made, name) if name.isupper() else made.MODELS[name]
    arrays = model.arrays(seed)
    path = made.saved(arrays | (made.text_tower() if name == "SIGLIP" else {}), folder / "in.npz")

    def theirs(pictures: Tensor) -> Tensor:
        return torch.from_numpy(model.logits(arrays, pictures.movedim(1, -1).numpy()))

    return Sample(path, read_arrays(path), theirs, "our own NumPy forward in tests", {})


def transformers(folder: Path, seed: int, module: str, name: str) -> Sample:
    made = borrowed(module)
    from vitrail.weights.families.hf import quietly

    with quietly():
        model, theirs = made.made(name)
        file = made.written(model, folder / "in")
    return Sample(folder / "in", read_arrays(file), theirs, version("transformers"), {})


def clip(folder: Path, seed: int, lone: bool) -> Sample:
    made = borrowed("test_clip_family")
    state = made.tower()
    theirs = partial(made.reference, state, heads=2, activation=made.quick_gelu)
    return in_file(folder, state if lone else made.whole(state), theirs, "our own PyTorch forward in tests")


def clip_timm(folder: Path, seed: int) -> Sample:
    trunk, proj, state = borrowed("test_clip_family").timms_tower()
    return in_file(folder, state, lambda x: trunk(x) @ proj.T, f"{version('timm')}, then the projection")


def timm(folder: Path, seed: int) -> Sample:
    made = borrowed("test_timm")
    model = made.shake(made.VisionTransformer(**made.SMALL))
    return in_file(folder, model.state_dict(), model, version("timm"))


def deit(folder: Path, seed: int) -> Sample:
    made = borrowed("test_timm")
    model = made.shake(made.VisionTransformerDistilled(**made.SMALL))
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "in.pth")
    return Sample(folder / "in.pth", as_arrays(model.state_dict()), model, version("timm"))


def dinov2(folder: Path, seed: int, registers: int) -> Sample:
    model, state = borrowed("test_timm").dinov2(registers=registers, chunked=True, gated=True)
    return in_file(folder, state, model, f"{version('timm')}, registers put in by tests")


def torchvision(folder: Path, seed: int) -> Sample:
    model = borrowed("test_torchvision").theirs()
    return in_file(folder, model.state_dict(), model, version("torchvision"))


def lucidrains(folder: Path, seed: int, spelling: tuple[int, int], words: str) -> Sample:
    model = borrowed("test_lucidrains").spelled(spelling)
    return in_file(folder, model.state_dict(), model, version("vit-pytorch") + words)


def torch_encoder(folder: Path, seed: int) -> Sample:
    model = borrowed("test_torch_encoder").net()
    return in_file(folder, model.state_dict(), model, f"{version('torch')}, nn.TransformerEncoder")


def ours(folder: Path, seed: int) -> Sample:
    model = borrowed("conftest").shake(
        vt.ViT(vt.ViTConfig(width=32, depth=2, heads=2, patch=8, size=32, classes=5))
    )
    vt.Bundle(model=model).save(folder / "in.safetensors")
    return Sample(folder / "in.safetensors", {}, model, "vitrail", {})


SAMPLES: dict[str, Callable[[Path, int], Sample]] = {
    "google": partial(flax, module="test_google", name="plain"),
    "big_vision-siglip": partial(flax, module="test_big_vision", name="SIGLIP"),
    "big_vision": partial(flax, module="test_big_vision", name="stacked, class token"),
    "hf-deit": partial(transformers, module="test_hf", name="deit with teacher"),
    "hf-dinov2-registers": partial(transformers, module="test_hf", name="registers"),
    "hf-dinov2": partial(transformers, module="test_hf", name="dinov2"),
    "hf-vit": partial(transformers, module="test_hf", name="vit"),
    "hf-mae": partial(transformers, module="test_hf", name="mae with decoder"),
    "hf-clip-classifier": partial(transformers, module="test_hf_clip", name="clip classifier"),
    "hf-siglip-classifier": partial(transformers, module="test_hf_clip", name="siglip classifier"),
    "hf-clip": partial(transformers, module="test_hf_clip", name="clip with text"),
    "hf-siglip": partial(transformers, module="test_hf_clip", name="siglip with text"),
    "clip": partial(clip, lone=False),
    "clip-visual": partial(clip, lone=True),
    "clip-timm": clip_timm,
    "deit": deit,
    "dinov2-registers": partial(dinov2, registers=4),
    "dinov2": partial(dinov2, registers=0),
    "timm": timm,
    "torchvision": torchvision,
    "lucidrains": partial(lucidrains, spelling=(1, 16), words=""),
    "lucidrains-old": partial(lucidrains, spelling=(0, 7), words=", its parts as in 0.7"),
    "torch": torch_encoder,
    "vitrail": ours,
}
"""For each family a function of a folder and a seed. torch's seed is set before."""


def make(name: str, folder: Path, seed: int) -> Sample:
    """A random model of a family, in this folder; the same for the same seed."""
    torch.manual_seed(seed)
    return SAMPLES[name](folder, seed)
