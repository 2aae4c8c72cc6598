"""Write embeddings to a .npy file row by row, when their number is not known in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitrail.base.safe_files import atomic_file

if TYPE_CHECKING:
    from numpy.typing import NDArray


@contextmanager
def writing_rows(path: Path, width: int) -> Iterator[Callable[[NDArray[np.float32] | None], None]]:
    """A function that appends a row, (width,) or None, to a float32 array in a new file.

    None becomes a row of NaN, so that rows align with those of the table. After an error there is no file.
    """
    count, missing = 0, np.full(width, np.nan, np.float32)
    with atomic_file(path) as partial, partial.open("r+b") as file:
        _write_header(file, (0, width))
        start = file.tell()

        def append(row: NDArray[np.float32] | None) -> None:
            nonlocal count
            file.write((missing if row is None else row).astype("<f4").tobytes())
            count += 1

        yield append
        file.seek(0)
        _write_header(file, (count, width))  # NumPy leaves room for the first axis to grow
        if file.tell() != start:
            raise RuntimeError("the header of a .npy file has grown over its first row")


def _write_header(file: object, shape: tuple[int, int]) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
