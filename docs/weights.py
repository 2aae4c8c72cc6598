"""Measure every family of weights and write the tables of docs/weights.md: python -m docs.weights

    python -m docs.weights --only timm google     # print the rows of these; the page stays as it is

Each family is measured on tiny random models (docs/samples.py); nothing is kept from an earlier run.
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
from docs.samples import Sample, borrowed, make, read_arrays, version
from vitrail.published import CLIP, IMAGENET, published
from vitrail.weights.convert import CannotExpress, cannot, target_of
from vitrail.weights.families import FAMILIES
from vitrail.weights.table import Family

PAGE = Path(__file__).parent / "weights.md"
MODELS, PICTURES = 3, 8  # of each family: so many random models, so many pictures each
VERSIONS = ("torch", "timm", "transformers", "torchvision", "vit-pytorch")
HEADING = (
    *("family", "whose files", "read", "written from others", "round trip", "largest logit difference"),
    *("reference", "preprocessing, if the file does not say", "eps / activation"),
)
GROUPS = ("timm", "hf", "torchvision", "google", "lucidrains", "vitrail")
PLAIN = {"timm": "timm", "hf": "hf-vit", "torchvision": "torchvision", "google": "google"}
PLAIN |= {"lucidrains": "lucidrains"}  # the family that a plain ViT of the group is of


# ---- one row for each family ----------------------------------------------------------------


@dataclass
class Measured:
    """What came out for one family."""

    difference: float = 0.0
    largest: float = 0.0
    """Of all logits."""
    tensors: int = 0
    reference: str = ""
    back: bool = True
    """Whether every file came back to the last bit."""


def measure(family: Family) -> Measured:
    result = Measured()
    for seed in range(MODELS):
        with TemporaryDirectory() as name:
            folder = Path(name)
            sample = make(family.name, folder, seed)
            bundle = vt.load(sample.path, **sample.facts)
            assert bundle.source is not None, "the file is another library's"
            if bundle.source.family != family.name:
                raise RuntimeError(f"a sample of {family.name} was read as {bundle.source.family}")
            distance, largest = compare(bundle.model, sample.theirs, bundle.model.config)
            result.difference = max(result.difference, distance)
            result.largest = max(result.largest, largest)
            result.back &= comes_back(sample, bundle, family, folder)
            result.tensors, result.reference = len(sample.arrays), sample.reference
    return result


def compare(one: Any, other: Any, config: vt.ViTConfig) -> tuple[float, float]:
    """The largest difference on random pictures, and the largest number that the first gave."""
    pictures = torch.randn(PICTURES, *config.input_shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        a, b = one(pictures).double(), other(pictures).double()
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()) or a.abs().max() < 0.05:
        raise RuntimeError(f"logits that prove nothing, of {tuple(a.shape)} and {tuple(b.shape)}: {a}, {b}")
    return (a - b).abs().max().item(), a.abs().max().item()


def comes_back(sample: Sample, bundle: vt.Bundle, family: Family, folder: Path) -> bool:
    """Written back, at once and by way of a file of ours: same names, dtypes, shapes and bits?"""
    now, later = (folder / f"{word}{family.suffix}" for word in ("now", "later"))
    vt.convert(sample.path, now, to=family.name, **sample.facts)
    bundle.save(folder / "ours.safetensors")
    vt.convert(folder / "ours.safetensors", later, to=family.name)
    return all(same_bits(sample.arrays, read_arrays(path)) for path in (now, later))


def same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape, one[name].tobytes())
        == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name in one
    )


def row(family: Family, measured: Measured) -> list[str]:
    settings = family.read_settings is not Family.__dataclass_fields__["read_settings"].default
    words = family.fields
    return [
        f"{family.group}: `{family.name}`",
        family.title,
        "file or folder" if settings else "file",
        "yes" if family.expresses is not None else "no",
        f"{'bit-equal' if measured.back else 'differs'}, {measured.tensors} tensors",
        f"{measured.difference:.1e}",
        measured.reference,
        preprocessing(family.preprocess),
        f"{words['eps']:g} / {words['activation']}",
    ]


def preprocessing(name: str) -> str:
    """What is done to a picture for a model of 224 pixels, in a few words."""
    spec = published(name)
    known: dict[tuple[float, ...], str] = {IMAGENET[0]: "ImageNet's", CLIP[0]: "CLIP's"}
    levels = known.get(spec.mean, "0.5 and 0.5")
    (size, _), (before, _) = spec.target, spec.before_crop
    steps = "all to" if spec.resize == "squash" else f"short side {before}, centre"
    return f"{steps} {size}, {spec.interpolation}; mean and std {levels}"


# ---- from each to each ----------------------------------------------------------------------


def cell(source: str, to: str) -> str:
    """The largest difference between the two libraries after a conversion, or why there is none."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        sample = make(PLAIN.get(source, source), folder, 0)
        facts: dict[str, Any] = {}
        try:
            facts = to_give(sample, to)
            out = folder / ("out.npz" if to == "google" else "out.safetensors")
            vt.convert(sample.path, out, to=to, **{**sample.facts, **facts})
        except CannotExpress as refusal:
            return f"no: {', '.join(fields_in(refusal))}"
        distance, _ = compare(sample.theirs, *with_config(sample, out, to, facts))
    given = ", ".join(f"{field}={value!r}" for field, value in facts.items()).replace("'", '"')
    return f"{distance:.1e}" + (f" with `{given}`" if given else "")


def to_give(sample: Sample, to: str) -> dict[str, Any]:
    """eps and activation as the other library has them, where nothing else is in the way."""
    bundle = vt.load(sample.path, **sample.facts)
    if to == "vitrail":
        return {}
    try:
        target_of(to, bundle)
        return {}
    except CannotExpress:
        pass
    family = next(one for one in FAMILIES if one.name == PLAIN[to])
    reasons = " ".join(cannot(family, bundle.model.config))
    facts = {field: family.fields[field] for field in ("eps", "activation") if f"{field} is" in reasons}
    target_of(to, vt.load(sample.path, **{**sample.facts, **facts}))
    return facts


def fields_in(refusal: CannotExpress) -> list[str]:
    return [
        f"`{field}`" for field in dict.fromkeys(re.findall(r"\b(\w+) is \S+ (?:there|here)", str(refusal)))
    ]


def with_config(sample: Sample, out: Path, to: str, facts: Mapping[str, Any]) -> tuple[Any, vt.ViTConfig]:
    """The model that the other library makes of the file, and what it takes."""
    config = vt.load(sample.path, **{**sample.facts, **facts}).model.config
    if to == "vitrail":
        return vt.load(out).model, config
    arrays = read_arrays(out)
    if to == "google":
        sizes = dict(width=config.width, depth=config.depth, heads=config.heads, hidden=config.F)
        model = borrowed("flax_files").Flax(**sizes)
        return lambda x: torch.from_numpy(model.logits(arrays, x.movedim(1, -1).numpy())), config
    family = next(one for one in FAMILIES if one.name == PLAIN[to])
    assert family.peer is not None
    return family.peer(config, {name: torch.from_numpy(array) for name, array in arrays.items()}), config


# ---- the page -------------------------------------------------------------------------------


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heading, *rows)]
    return "\n".join([lines[0], "|" + "---|" * (lines[0].count(" | ") + 1), *lines[1:]])


def families(only: Iterable[str] = ()) -> tuple[list[list[str]], float]:
    """The rows of the first table, and the largest logit of all."""
    wanted = [family for family in FAMILIES if not only or {family.name, family.group} & set(only)]
    measured = [measure(family) for family in wanted]
    rows = [row(*pair) for pair in zip(wanted, measured, strict=True)]
    return rows, max((one.largest for one in measured), default=0.0)


def made_by() -> str:
    cpu = machine().get("cpu", "one CPU")
    return f"`python -m docs.weights`; {cpu}; {', '.join(version(name) for name in VERSIONS)}."


def blocks() -> dict[str, str]:
    """What stands between each pair of markers."""
    rows, largest = families()
    n = f"n = {MODELS} random models of each family, {PICTURES} random pictures each, ours in float32"
    first = f"{table(HEADING, rows)}\n\n{n}; the largest logit is {largest:.0f}. {made_by()}"
    square = [[f"from **{source}**", *(cell(source, to) for to in GROUPS)] for source in GROUPS]
    n = f"n = 1 random model of each library, {PICTURES} random pictures"
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
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="print these rows alone")
    only = parser.parse_args(arguments).only
    unknown = set(only) - {word for family in FAMILIES for word in (family.name, family.group)}
    if unknown:
        parser.error(f"not a family: {', '.join(sorted(unknown))}")
    if only:
        print(table(HEADING, families(only)[0]))
    else:
        PAGE.write_text(page(blocks()))


if __name__ == "__main__":
    main()
