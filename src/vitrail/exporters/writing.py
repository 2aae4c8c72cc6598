"""Write an exported file, which gets its name only after its outputs have been checked.

`x.onnx.proof.json` beside it holds every comparison, the versions, both speeds and the checksum. A file
whose outputs differ from the model's is not written.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitrail.base.errors import InputError, VitrailError, printable
from vitrail.base.safe_files import atomic_file, check_new, write_text
from vitrail.exporters.proof import Proof, check_failed
from vitrail.weights.bundle.bundle import versions


def check_output(path: Path, suffix: str) -> Path:
    """Check that the file and its proof are new, and that their folder exists."""
    if path.suffix != suffix:
        raise InputError(f"The name of this file must end in {suffix}, and {printable(path)} does not.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {printable(path.parent)}; create it, or choose another path.")
    for new in (path, _proof_path(path)):
        check_new(new, "an export")
    return path


def _proof_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.proof.json")


def write_checked(
    path: Path, data: bytes, prove: Callable[[Path], Proof], details: Mapping[str, Any]
) -> Proof:
    """Write a temporary file, check it with `prove`, and only then give it its name."""
    with atomic_file(path) as partial:
        partial.write_bytes(data)
        try:
            proof = prove(partial)
        except VitrailError:
            raise
        except Exception as error:  # any error of a runtime means that the file cannot be used
            raise check_failed(f"{type(error).__name__}: {error}") from error
        if proof.failed:
            worst = proof.failed[0]
            raise check_failed(
                f"{worst.what}: a difference of {worst.difference:.2g} (limit {worst.limit:.2g}), pixels "
                f"off by {worst.largest_pixel_difference}, same class: {worst.same_class} of {worst.inputs}"
            )
        packages = {
            name: importlib.metadata.version(name) for name in ("numpy", "pillow", *details["packages"])
        }
        proof = replace(
            proof,
            file=path.name,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            form=details["form"],
            opset=details.get("opset"),
            versions=versions() | packages,
        )
    try:
        write_text(_proof_path(path), json.dumps(asdict(proof), indent=2) + "\n")
    except BaseException:
        path.unlink()
        raise
    return proof
