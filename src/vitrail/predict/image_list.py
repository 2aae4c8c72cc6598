"""A fixed list of images to predict: files, folders of files, or tar shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from vitrail.base.errors import InputError
from vitrail.images.content import Progress
from vitrail.images.formats.lazy import LARGE
from vitrail.images.formats.shard_images import ShardImage
from vitrail.images.formats.shards import (
    ShardImages,
    ShardNames,
    ShardTable,
    is_shards,
    list_shards,
    open_shards,
)
from vitrail.predict.image_sources import Source, expand_paths


class ImageList:
    """Images in a fixed order.

    Args:
        inputs: paths of images and folders; or one path of shards (see data/shards.py).
        progress: called while shards without an index are read.
    """

    def __init__(self, inputs: Sequence[str], progress: Progress = lambda done, total: None) -> None:
        self.table: ShardTable | None = None
        self.sources: list[Source] = []
        if len(inputs) == 1 and is_shards(inputs[0]):
            files = [file for some in list_shards(inputs[0]).values() for file in some]
            self.table = ShardTable(open_shards(files, progress))
        else:
            self.sources = list(expand_paths(inputs))
        if not len(self):
            raise InputError("There are no images to predict; check the paths.")

    def __len__(self) -> int:
        return len(self.sources) if self.table is None else len(self.table)

    def read(self, first: int, last: int) -> Iterator[Source]:
        """The images from one number up to another."""
        if self.table is None:
            yield from self.sources[first:last]
            return
        rows = range(len(self.table))
        images: Sequence[ShardImage] = ShardImages(self.table, rows)[first:last]
        names: Sequence[str] = ShardNames(self.table, rows)[first:last]
        for image, name in zip(images, names, strict=True):
            yield Source(f"{os.path.basename(image.file)}/{name}", image)

    def digest(self) -> str:
        """A hash of the list: of the names; of very many images in shards, of their indexes."""
        digest: Any = hashlib.sha256(str(len(self)).encode())
        if self.table is not None and len(self.table) >= LARGE:
            digest.update(ShardNames(self.table, range(len(self.table))).identity())
        else:
            for source in self.read(0, len(self)):
                digest.update(source.name.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()
