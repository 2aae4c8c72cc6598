"""Tiny random models of every family, in files, for docs/weights.py.

The libraries build them themselves, through tests/weights. For Flax and OpenAI's CLIP, which are not
installed, the tests have their own forward pass.
"""

from __future__ import annotations

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
from tests.support.models import add_noise


@dataclass(frozen=True)
class Sample:
    """A random model of another library, in a file."""

    path: Path
    """The argument of `vitrail.load`."""
    arrays: Mapping[str, np.ndarray]
    """The contents of the file."""
    theirs: Callable[[Tensor], Tensor]
    """Images to logits, or to the pooled vector without classes."""
    reference: str
    """Who computes them."""
    overrides: Mapping[str, Any] = field(default_factory=lambda: {"heads": 2})
    """What the file does not show."""


def weights_tests(name: str) -> Any:
    """A module of tests/weights, with the builders of its library's models."""
    make_torchvision_importable()  # before anything imports timm or transformers
    return import_module(f"tests.weights.{name}")


def version(package: str) -> str:
    return f"{package} {metadata.version(package)}"


def as_arrays(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, read by the format's own library."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    from safetensors.numpy import load_file

    return load_file(path)


def in_file(
    folder: Path, state: Mapping[str, Tensor], theirs: Any, reference: str, **overrides: Any
) -> Sample:
    from safetensors.torch import save_file

    path = folder / "in.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, path)
    return Sample(path, read_arrays(path), theirs, reference, {"heads": 2, **overrides})


def flax(folder: Path, seed: int, module: str, name: str) -> Sample:
    tests = weights_tests(module)
    model = getattr(tests, name) if name.isupper() else tests.MODELS[name]
    arrays = model.arrays(seed)
    path = tests.save_npz(arrays | (tests.text_tower() if name == "SIGLIP" else {}), folder / "in.npz")

    def theirs(images: Tensor) -> Tensor:
        return torch.from_numpy(model.logits(arrays, images.movedim(1, -1).numpy()))

    return Sample(path, read_arrays(path), theirs, "NumPy forward pass in our tests", {})


def transformers(folder: Path, seed: int, module: str, name: str) -> Sample:
    tests = weights_tests(module)
    from vitrail.weights.families.hf import no_progress_bar

    with no_progress_bar():
        model, theirs = tests.build(name)
        file = tests.save_pretrained(model, folder / "in")
    return Sample(folder / "in", read_arrays(file), theirs, version("transformers"), {})


def clip(folder: Path, seed: int, lone: bool) -> Sample:
    tests = weights_tests("test_clip_family")
    state = tests.tower()
    theirs = partial(tests.reference, state, heads=2, activation=tests.quick_gelu)
    return in_file(
        folder, state if lone else tests.with_text_tower(state), theirs, "PyTorch forward pass in our tests"
    )


def clip_timm(folder: Path, seed: int) -> Sample:
    trunk, proj, state = weights_tests("test_clip_family").timm_tower()
    return in_file(folder, state, lambda x: trunk(x) @ proj.T, f"{version('timm')}, then the projection")


def timm(folder: Path, seed: int) -> Sample:
    tests = weights_tests("test_timm")
    model = tests.add_noise(tests.VisionTransformer(**tests.SMALL))
    return in_file(folder, model.state_dict(), model, version("timm"))


def deit(folder: Path, seed: int) -> Sample:
    tests = weights_tests("test_timm")
    model = tests.add_noise(tests.VisionTransformerDistilled(**tests.SMALL))
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "in.pth")
    return Sample(folder / "in.pth", as_arrays(model.state_dict()), model, version("timm"))


def dinov2(folder: Path, seed: int, registers: int) -> Sample:
    model, state = weights_tests("test_timm").dinov2(registers=registers, chunked=True, gated=True)
    return in_file(folder, state, model, f"{version('timm')}, registers inserted by tests")


def dinov3(folder: Path, seed: int) -> Sample:
    tests = weights_tests("test_dinov3")
    model = tests.transformers_model()
    source = f"{version('transformers')}, renamed by our tests"
    state = tests.published_state(model, gated=False)
    return in_file(folder, state, tests.class_token(model), source, size=32)


def dinov3_timm(folder: Path, seed: int) -> Sample:
    tests = weights_tests("test_dinov3")
    model = tests.add_noise(tests.timm.create_model("vit_small_patch16_dinov3_qkvb", **tests.TINY)).eval()
    return in_file(folder, model.state_dict(), model, version("timm"), size=64)


def newer(
    folder: Path, seed: int, kind: str, name: str = "", published: bool = False, **options: Any
) -> Sample:
    """A model of tests/weights/test_newer_towers.py: timm's own, or its tensors under the authors' names."""
    tests = weights_tests("test_newer_towers")
    model = getattr(tests, kind)(*[name] * bool(name)).eval()
    if kind in ("perception_encoder", "mobileclip") and hasattr(model.head, "bias"):
        model.head.bias.data.zero_()  # the authors' projection has none
    names = {"eva02": "published_eva02", "perception_encoder": "published_pe"}
    names |= {"aimv2_timm": "published_aimv2", "mobileclip": "published_mobileclip"}
    state = getattr(tests, names[kind])(model, **options) if published else model.state_dict()
    return in_file(folder, state, model, version("timm") + ", renamed by our tests" * published)


def torchvision(folder: Path, seed: int) -> Sample:
    model = weights_tests("test_torchvision").theirs()
    return in_file(folder, model.state_dict(), model, version("torchvision"))


def lucidrains(folder: Path, seed: int, release: tuple[int, int], note: str) -> Sample:
    model = weights_tests("test_lucidrains").build_version(release)
    return in_file(folder, model.state_dict(), model, version("vit-pytorch") + note)


def torch_encoder(folder: Path, seed: int) -> Sample:
    model = weights_tests("test_torch_encoder").net()
    return in_file(folder, model.state_dict(), model, f"{version('torch')}, nn.TransformerEncoder")


def ours(folder: Path, seed: int) -> Sample:
    model = add_noise(vt.ViT(vt.ViTConfig(width=32, depth=2, heads=2, patch=8, size=32, classes=5)))
    vt.Bundle(model=model).save(folder / "in.safetensors")
    return Sample(folder / "in.safetensors", {}, model, "vitrail", {})


SAMPLES: dict[str, Callable[[Path, int], Sample]] = {
    "google": partial(flax, module="test_google", name="plain"),
    "big_vision-siglip": partial(flax, module="test_big_vision", name="SIGLIP"),
    "big_vision": partial(flax, module="test_big_vision", name="stacked, class token"),
    "hf-deit": partial(transformers, module="test_hf", name="deit with teacher"),
    "hf-dinov2-registers": partial(transformers, module="test_hf", name="registers"),
    "hf-dinov2": partial(transformers, module="test_hf", name="dinov2"),
    "hf-dinov3": partial(transformers, module="test_dinov3", name="plain"),
    "dinov3": dinov3,
    "timm-dinov3": dinov3_timm,
    "timm-eva02": partial(newer, kind="eva02", name="split, inner norm"),
    "timm-eva02-small": partial(newer, kind="eva02", name="fused, no inner norm"),
    "eva02": partial(newer, kind="eva02", name="CLIP, norm on the heads", published=True),
    "eva02-small": partial(newer, kind="eva02", name="fused, no inner norm", published=True),
    "perception-encoder": partial(newer, kind="perception_encoder", name="core", published=True),
    "perception-encoder-visual": partial(
        newer, kind="perception_encoder", name="core", published=True, at=""
    ),
    "perception-encoder-trunk": partial(newer, kind="perception_encoder", name="lang", published=True),
    "timm-perception-encoder": partial(newer, kind="perception_encoder", name="core"),
    "timm-perception-encoder-trunk": partial(newer, kind="perception_encoder", name="spatial"),
    "hf-aimv2": partial(transformers, module="test_newer_towers", name="plain"),
    "aimv2": partial(newer, kind="aimv2_timm", published=True),
    "timm-aimv2": partial(newer, kind="aimv2_timm"),
    "mobileclip": partial(newer, kind="mobileclip", published=True),
    "timm-mobileclip": partial(newer, kind="mobileclip"),
    "hf-vit": partial(transformers, module="test_hf", name="vit"),
    "hf-mae": partial(transformers, module="test_hf", name="mae with decoder"),
    "hf-clip-classifier": partial(transformers, module="test_hf_clip", name="clip classifier"),
    "hf-siglip-classifier": partial(transformers, module="test_hf_clip", name="siglip classifier"),
    "hf-clip": partial(transformers, module="test_hf_clip", name="clip with text"),
    "hf-siglip": partial(transformers, module="test_hf_clip", name="siglip with text"),
    "hf-siglip2-naflex": partial(transformers, module="test_naflex", name="with text"),
    "clip": partial(clip, lone=False),
    "clip-visual": partial(clip, lone=True),
    "clip-timm": clip_timm,
    "deit": deit,
    "dinov2-registers": partial(dinov2, registers=4),
    "dinov2": partial(dinov2, registers=0),
    "timm": timm,
    "torchvision": torchvision,
    "lucidrains": partial(lucidrains, release=(1, 16), note=""),
    "lucidrains-old": partial(lucidrains, release=(0, 7), note=", structured as in 0.7"),
    "torch": torch_encoder,
    "vitrail": ours,
}
"""A function of a folder and a seed for each family. torch's seed is set before."""


def make(name: str, folder: Path, seed: int) -> Sample:
    """A random model of a family, written to a folder; the same for the same seed."""
    torch.manual_seed(seed)
    return SAMPLES[name](folder, seed)
