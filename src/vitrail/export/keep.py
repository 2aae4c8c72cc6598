"""Writing an exported file: it gets its name only once it has been proved.

`x.onnx.proof.json` beside it holds every comparison, the versions, the time both took, and the checksum. A
file that does not give the answers of its model is not kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitrail.errors import InputError, VitrailError, printable
from vitrail.export.proof import Proof, unproven
from vitrail.report.page import write_whole
from vitrail.weights.bundle import versions


def check_place(place: Path, suffix: str) -> Path:
    """The file and its proof must be new, in a folder that is there."""
    if place.suffix != suffix:
        raise InputError(f"The name of such a file must end in {suffix}.", printable(place), "Name it so.")
    if not place.parent.is_dir():
        got = f"{printable(place.parent)}, which is no folder"
        raise InputError("An export goes into a folder that is there.", got, "Make it, or name another.")
    for path in (place, proof_of(place)):
        if os.path.lexists(path):
            got = f"{printable(path)}, which is there already"
            raise InputError(
                "An export is a new file: nothing of yours is overwritten.", got, "Name another."
            )
    return place


def proof_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.proof.json")


def write_proven(place: Path, data: bytes, prove: Callable[[Path], Proof], facts: Mapping[str, Any]) -> Proof:
    """Write the file under another name, prove that, and only then let it have its own."""
    part = place.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            proof = prove(part)
        except VitrailError:
            raise
        except Exception as error:  # whatever a runtime says: the file cannot be used
            raise unproven(f"{type(error).__name__}: {error}") from error
        if proof.failed:
            worst = proof.failed[0]
            raise unproven(
                f"{worst.what}: a difference of {worst.difference:.2g} of at most {worst.limit:.2g}, levels "
                f"off by {worst.largest_step}, the same class for {worst.same_class} of {worst.inputs}"
            )
        packages = {
            name: importlib.metadata.version(name) for name in ("numpy", "pillow", *facts["packages"])
        }
        proof = replace(
            proof,
            file=place.name,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            form=facts["form"],
            opset=facts.get("opset"),
            versions=versions() | packages,
        )
        check_place(place, place.suffix)  # nobody made one in the meantime
        os.rename(part, place)
        try:
            write_whole(proof_of(place), json.dumps(asdict(proof), indent=2) + "\n")
        except BaseException:
            place.unlink()
            raise
    finally:
        with suppress(OSError):
            part.unlink()
    return proof
