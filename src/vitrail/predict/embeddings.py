"""Embeddings to a .npy file, row by row, when nobody knows yet how many there will be."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.errors import FileError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray


@contextmanager
def writing_rows(path: Path, width: int) -> Iterator[Callable[[NDArray[np.float32] | None], None]]:
    """A function that adds a row, (width,) or None, to a float32 array in a new file.

    None becomes a row of NaN, so that rows stand where those of the table do. The file gets its name when
    it is whole; after an error there is none.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    count, nothing = 0, np.full(width, np.nan, np.float32)
    try:
        with part.open("xb") as file:
            write_header(file, (0, width))
            start = file.tell()

            def add(row: NDArray[np.float32] | None) -> None:
                nonlocal count
                file.write((nothing if row is None else row).astype("<f4").tobytes())
                count += 1

            yield add
            file.seek(0)
            write_header(file, (count, width))  # NumPy leaves room for the first axis to grow
            if file.tell() != start:
                raise RuntimeError("the header of a .npy file has grown over its first row")
            file.flush()
            os.fsync(file.fileno())
        if os.path.lexists(path):
            got = f"{printable(path)}, which somebody made meanwhile"
            raise FileError("Embeddings need a new file: nothing is overwritten.", got, "Name another.")
        os.rename(part, path)
    finally:
        with suppress(OSError):
            part.unlink()


def write_header(file: object, shape: tuple[int, int]) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
