"""Images inside a Parquet file, in the layout of Hugging Face's datasets: a column of {bytes, path}.

A row group is the smallest part of the column that can be read. The last few stay in memory, for images that
are read one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vitrail.base.errors import printable, require_extra
from vitrail.images.formats.stored_images import StoredImage, Version, version_of
from vitrail.images.limits import BrokenImage

_GROUPS = 4  # row groups that stay in memory


@dataclass(frozen=True, slots=True)
class ParquetImage(StoredImage):
    """An image in a Parquet file, in place of the path of an image file."""

    file: str
    image_name: str
    column: str
    group: int
    row: int
    """Within its row group."""
    version: Version

    def read_bytes(self) -> bytearray:
        """The bytes of the image file."""
        data = _read_group(self.file, self.column, self.group, self.version)[self.row].as_py()
        if not data:
            raise BrokenImage(f"{printable(self)} is empty, or only the path of a file that is elsewhere.")
        return bytearray(data)


@lru_cache(maxsize=_GROUPS)
def _read_group(file: str, column: str, group: int, version: Version) -> Any:
    """The bytes of the images of a row group, as an array of pyarrow."""
    with require_extra("parquet"):
        import pyarrow.parquet as pq

    if version_of(file) != version:
        raise BrokenImage(f"{printable(file)} was changed while it was in use; start again.")
    try:
        # Without pyarrow's threads, which a forked worker does not have.
        with pq.ParquetFile(file, pre_buffer=False) as opened:
            table = opened.read_row_group(group, columns=[f"{column}.bytes"], use_threads=False)
    except (OSError, ValueError) as error:
        raise BrokenImage(f"{printable(file)} cannot be read: {printable(error)}.") from error
    return table.column(column).combine_chunks().field("bytes")
