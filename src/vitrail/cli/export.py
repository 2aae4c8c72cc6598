"""`vitrail export`: a model in another form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrail.cli import facts as options
from vitrail.errors import InputError, printable, suggest

if TYPE_CHECKING:
    from vitrail.config import ViTConfig
    from vitrail.export.proof import Proof

NAMES = {"onnx": "model.onnx", "torch-export": "model.pt2", "html": "classroom.html"}
FREE = ("batch", "size")


def export(
    model: Annotated[str, typer.Argument(help="A weight file, a folder with one, or hf:owner/name.")],
    to: Annotated[
        str,
        typer.Option(
            help="onnx: one file for ONNX Runtime, with a proof. torch-export: a .pt2 program. "
            "html: a page that computes the model in a browser."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="A new file.", show_default="model.onnx, model.pt2, classroom.html")
    ] = None,
    size: options.Size = None,
    dynamic: Annotated[
        str | None,
        typer.Option(help="What stays free: batch, which always does, or batch,size.", show_default="batch"),
    ] = None,
    with_preprocess: Annotated[
        bool, typer.Option("--with-preprocess", help="The graph takes 8-bit pictures and resizes them.")
    ] = False,
    family: options.Family = None,
    keys: options.Keys = None,
    given: options.Set = None,
) -> None:
    """Put a model into another form, and prove that it gives the same answers.

    An ONNX or .pt2 file is run beside the model on the same inputs before it gets its name; the comparison,
    the versions and the time both took are in a .proof.json beside it. vitrail predict and vitrail serve
    take the .onnx.

    The HTML file holds a small model to draw for, in any browser, without a server. A model that a form
    cannot hold is refused, with the field that stands in the way.
    """
    if to not in NAMES:
        raise InputError("--to must name a form that is there.", printable(repr(to)), suggest(to, NAMES))
    place = out or Path(NAMES[to])
    facts = options.facts(family, keys, given, size)
    if to == "html":
        if dynamic is not None or with_preprocess:
            got = "--dynamic" if dynamic is not None else "--with-preprocess"
            raise InputError("A page takes neither --dynamic nor --with-preprocess.", got, "Leave it out.")
        write_page(model, place, facts)
        return
    free = words(dynamic)

    from vitrail.export.keep import check_place
    from vitrail.export.onnx import write_onnx
    from vitrail.export.torch_export import write_torch
    from vitrail.weights.load import load

    check_place(place, Path(NAMES[to]).suffix)
    bundle = load(model, **facts)
    write = write_onnx if to == "onnx" else write_torch
    show(write(bundle, place, dynamic=free, with_preprocess=with_preprocess), place, bundle.model.config)


def words(dynamic: str | None) -> tuple[str, ...]:
    found = tuple(word.strip() for word in ("batch" if dynamic is None else dynamic).split(","))
    for word in found:
        if word not in FREE:
            raise InputError(
                "--dynamic takes batch, or batch,size.", printable(repr(word)), suggest(word, FREE)
            )
    return found


def write_page(model: str, place: Path, facts: dict[str, object]) -> None:
    from vitrail.export.html import check_place, write_classroom
    from vitrail.weights.load import load

    check_place(place)
    bundle = load(model, **facts)  # type: ignore[arg-type]
    for note in write_classroom(bundle, place, name=Path(model).stem):
        print(f"note: {note}")
    print(f"Written: {printable(place)}, {place.stat().st_size / 1e6:.1f} MB. Open it in a browser.")


def show(proof: Proof, place: Path, config: ViTConfig) -> None:
    """The proof in a few lines."""
    checks, speed = proof.checks, proof.speed
    worst = max(checks, key=lambda check: check.difference / check.limit)
    same, count = sum(check.same_class for check in checks), sum(check.inputs for check in checks)
    levels, others = (sum(getattr(check, name) for check in checks) for name in ("levels", "other_levels"))
    gives = f"embedding (batch, {config.pooled_width})"
    print(f"gives        {f'logits (batch, {config.classes}), ' if config.classes else ''}{gives}")
    print(
        f"difference   {worst.difference:.2g}, of at most {worst.limit:.2g}, over {len(checks)} comparisons"
    )
    print(f"same class   {same} of {count} inputs")
    if levels:
        step, most = (max(getattr(c, name) for c in checks) for name in ("largest_step", "all_in_all"))
        print(f"levels       {others:,} of {levels:,} not those of Preprocess, by at most {step}")
        print(f"             with which outputs differ by {most:.2g}")
    print(
        f"one picture  {speed.exported:.3g} ms in {speed.runtime}, {speed.eager:.3g} ms in eager torch "
        f"(median of {speed.n} in turns, threads: {speed.threads})"
    )
    print("versions     " + ", ".join(f"{name} {version}" for name, version in proof.versions.items()))
    print(f"sha256       {proof.sha256}")
    print(f"Written: {printable(place)}, {proof.bytes / 1e6:.1f} MB, and {printable(place.name)}.proof.json.")
