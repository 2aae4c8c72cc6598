"""Measure every weight family and write the tables of docs/weights.md: python -m docs.weights

    python -m docs.weights --only timm google     # print these rows only; the page is not changed

Each family is measured on tiny random models (docs/samples.py); nothing is reused from an earlier run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import vitrail as vt
from bench.measure import machine
from docs.samples import Sample, make, read_arrays, version
from tests.support.flax_files import Flax
from vitrail.images.published_preprocess import CLIP, IMAGENET, published_preprocess
from vitrail.weights.conversion import find_target
from vitrail.weights.families import LIBRARIES
from vitrail.weights.families.family import Family
from vitrail.weights.families.to_family import ConversionError, unsupported

PAGE = Path(__file__).parent / "weights.md"
MODELS, IMAGES = 3, 8  # random models of each family, and images for each model
VERSIONS = ("torch", "timm", "transformers", "torchvision", "vit-pytorch")
HEADING = (
    *("family", "whose files", "read", "written from others", "round trip", "largest logit difference"),
    *("reference", "preprocessing by default", "eps / activation"),
)
GROUPS = ("timm", "hf", "torchvision", "google", "lucidrains", "vitrail")
PLAIN = {"timm": "timm", "hf": "hf-vit", "torchvision": "torchvision", "google": "google"}
PLAIN |= {"lucidrains": "lucidrains"}  # the family of a plain ViT of the group


# ---- one row per family ----------------------------------------------------------------


@dataclass
class Measurement:
    """The results for one family."""

    difference: float = 0.0
    largest: float = 0.0
    """Of all logits."""
    tensors: int = 0
    reference: str = ""
    bit_equal: bool = True
    """Whether every round trip was bit-equal."""


def measure(family: Family) -> Measurement:
    result = Measurement()
    for seed in range(MODELS):
        with TemporaryDirectory() as name:
            folder = Path(name)
            sample = make(family.name, folder, seed)
            bundle = vt.load(sample.path, **sample.overrides)
            assert bundle.source is not None, "the file is of another library"
            if bundle.source.family != family.name:
                raise RuntimeError(f"a sample of {family.name} was read as {bundle.source.family}")
            distance, largest = compare(bundle.model, sample.theirs, bundle.model.config)
            result.difference = max(result.difference, distance)
            result.largest = max(result.largest, largest)
            result.bit_equal &= round_trips(sample, bundle, family, folder)
            result.tensors, result.reference = len(sample.arrays), sample.reference
    return result


def compare(one: Any, other: Any, config: vt.ViTConfig) -> tuple[float, float]:
    """The largest difference on random images, and the largest logit of the first model."""
    images = torch.randn(IMAGES, *config.input_shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        a, b = one(images).double(), other(images).double()
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()) or a.abs().max() < 0.05:
        raise RuntimeError(f"logits that prove nothing, of {tuple(a.shape)} and {tuple(b.shape)}: {a}, {b}")
    return (a - b).abs().max().item(), a.abs().max().item()


def round_trips(sample: Sample, bundle: vt.Bundle, family: Family, folder: Path) -> bool:
    """Whether a file is written back bit for bit, directly and from a vitrail file."""
    now, later = (folder / f"{name}{family.writer.suffix}" for name in ("now", "later"))
    vt.convert(sample.path, now, to=family.name, **sample.overrides)
    bundle.save(folder / "ours.safetensors")
    vt.convert(folder / "ours.safetensors", later, to=family.name)
    return all(same_bits(sample.arrays, read_arrays(path)) for path in (now, later))


def same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape, one[name].tobytes())
        == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name in one
    )


def row(family: Family, measured: Measurement) -> list[str]:
    fields = family.profile.fields
    return [
        f"{family.group}: `{family.name}`",
        family.title,
        "file or folder" if family.writer.read_settings else "file",
        "yes" if family.writer.expresses is not None else "no",
        f"{'bit-equal' if measured.bit_equal else 'differs'}, {measured.tensors} tensors",
        f"{measured.difference:.1e}",
        measured.reference,
        preprocessing(family.profile.preprocess),
        f"{fields['eps']:g} / {fields['activation']}",
    ]


def preprocessing(name: str) -> str:
    """A short description of the preprocessing of a model for 224 pixels."""
    spec = published_preprocess(name)
    names: dict[tuple[float, ...], str] = {IMAGENET[0]: "ImageNet's", CLIP[0]: "CLIP's"}
    mean = names.get(spec.mean, f"{spec.mean[0]:g} and {spec.std[0]:g}")
    (size, _), (before, _) = spec.target, spec.before_crop
    steps = "resize to" if spec.resize == "squash" else f"short side {before}, center"
    return f"{steps} {size}, {spec.interpolation}; mean and std {mean}"


# ---- every conversion ----------------------------------------------------------------------


def cell(source: str, to: str) -> str:
    """The largest difference between the two libraries after a conversion, or why it is refused."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        sample = make(PLAIN.get(source, source), folder, 0)
        overrides: dict[str, Any] = {}
        try:
            overrides = needed_overrides(sample, to)
            out = folder / ("out.npz" if to == "google" else "out.safetensors")
            vt.convert(sample.path, out, to=to, **{**sample.overrides, **overrides})
        except ConversionError as error:
            return f"no: {', '.join(fields_in(error))}"
        distance, _ = compare(sample.theirs, *with_config(sample, out, to, overrides))
    given = ", ".join(f"{field}={value!r}" for field, value in overrides.items()).replace("'", '"')
    return f"{distance:.1e}" + (f" with `{given}`" if given else "")


def needed_overrides(sample: Sample, to: str) -> dict[str, Any]:
    """The other library's eps and activation, if only they prevent the conversion."""
    bundle = vt.load(sample.path, **sample.overrides)
    if to == "vitrail":
        return {}
    try:
        find_target(to, bundle)
        return {}
    except ConversionError:
        pass
    family = next(one for one in LIBRARIES if one.name == PLAIN[to])
    reasons = " ".join(unsupported(family, bundle.model.config))
    overrides = {
        field: family.profile.fields[field] for field in ("eps", "activation") if f"{field} is" in reasons
    }
    find_target(to, vt.load(sample.path, **{**sample.overrides, **overrides}))
    return overrides


def fields_in(error: ConversionError) -> list[str]:
    return [f"`{field}`" for field in dict.fromkeys(re.findall(r"\b(\w+) is \S+ (?:there|here)", str(error)))]


def with_config(sample: Sample, out: Path, to: str, overrides: Mapping[str, Any]) -> tuple[Any, vt.ViTConfig]:
    """The other library's model with the file loaded, and its config."""
    config = vt.load(sample.path, **{**sample.overrides, **overrides}).model.config
    if to == "vitrail":
        return vt.load(out).model, config
    arrays = read_arrays(out)
    if to == "google":
        sizes = dict(width=config.width, depth=config.depth, heads=config.heads, hidden=config.F)
        model = Flax(**sizes)
        return lambda x: torch.from_numpy(model.logits(arrays, x.movedim(1, -1).numpy())), config
    family = next(one for one in LIBRARIES if one.name == PLAIN[to])
    assert family.writer.peer is not None
    return family.writer.peer(
        config, {name: torch.from_numpy(array) for name, array in arrays.items()}
    ), config


# ---- the page -------------------------------------------------------------------------------


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heading, *rows)]
    return "\n".join([lines[0], "|" + "---|" * (lines[0].count(" | ") + 1), *lines[1:]])


def families(only: Iterable[str] = ()) -> tuple[list[list[str]], float]:
    """The rows of the first table, and the largest logit of all."""
    selected = [family for family in LIBRARIES if not only or {family.name, family.group} & set(only)]
    measured = [measure(family) for family in selected]
    rows = [row(*pair) for pair in zip(selected, measured, strict=True)]
    return rows, max((one.largest for one in measured), default=0.0)


def made_by() -> str:
    cpu = machine().get("cpu", "one CPU")
    return f"`python -m docs.weights`; {cpu}; {', '.join(version(name) for name in VERSIONS)}."


def blocks() -> dict[str, str]:
    """The text between each pair of markers."""
    rows, largest = families()
    n = f"n = {MODELS} random models of each family, {IMAGES} random images each, in float32"
    first = f"{table(HEADING, rows)}\n\n{n}; the largest logit is {largest:.0f}. {made_by()}"
    square = [[f"from **{source}**", *(cell(source, to) for to in GROUPS)] for source in GROUPS]
    n = f"n = 1 random model of each library, {IMAGES} random images"
    second = f"{table(['', *(f'to **{to}**' for to in GROUPS)], square)}\n\n{n}. {made_by()}"
    return {"families": first, "matrix": second}


def page(written: Mapping[str, str]) -> str:
    """The page with these tables in it."""
    text = PAGE.read_text()
    for name, block in written.items():
        before, rest = text.split(f"<!-- {name} -->", 1)
        _, after = rest.split(f"<!-- end of {name} -->", 1)
        text = f"{before}<!-- {name} -->\n{block}\n<!-- end of {name} -->{after}"
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.weights", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="print only these rows")
    only = parser.parse_args(arguments).only
    unknown = set(only) - {name for family in LIBRARIES for name in (family.name, family.group)}
    if unknown:
        parser.error(f"not a family: {', '.join(sorted(unknown))}")
    if only:
        print(table(HEADING, families(only)[0]))
    else:
        PAGE.write_text(page(blocks()))


if __name__ == "__main__":
    main()
