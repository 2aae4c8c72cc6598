"""`vitrail pack`: the images of a data set, decoded and resized once into one file; or tar shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.progress import ProgressBars
from vitrail.cli.option_values import parse_workers, refuse_given
from vitrail.cli.options import QUIET, WORKERS

if TYPE_CHECKING:
    from vitrail.images.formats.pack_shards import ShardResult
    from vitrail.images.formats.pack_writer import PackResult

_FORMATS = ("file", "shards")
_MOST = 5  # names that are printed of a kind


def pack(
    data: str | None = Argument(
        None, help="A folder with one folder of images per class, or a .csv or .jsonl file."
    ),
    out: Path | None = Argument(
        None, help="The packed file to write, such as pets.pack; with --to shards, a folder."
    ),
    to: str = Option("file", help="file: one packed file. shards: tar files in WebDataset's layout."),
    size: int | None = Option(
        None, min=1, max=65_535, help="The short side that larger images are resized to.", show_default="256"
    ),
    shard_size: int | None = Option(
        None, min=1, max=1_000_000, help="Megabytes of images in a shard.", show_default="512"
    ),
    jpeg: bool = Option(False, "--jpeg", help="Store JPEGs of quality 95: smaller, and slower to read."),
    check: bool = Option(
        False, "--check", help="Write nothing: check that OUT is intact and DATA has not changed since."
    ),
    clear_cache: bool = Option(
        False, "--clear-cache", help="Empty the cache folder, which train --cache fills."
    ),
    workers: str = WORKERS,
    quiet: bool = QUIET,
) -> None:
    """Decode and resize the images of a data set once, into one file.

    Every command takes the packed file as DATA. It has the labels, classes and splits of the data, and
    feeds a GPU several times as fast as image files do. Images that cannot be read are listed, and stay
    unreadable in the packed file. An interrupted pack resumes when the same command is run again. With
    --check, the exit code is 1 if the packed file is damaged or its source has changed.

    With --to shards, the image files are written as they are, with their labels, into tar files and an index
    beside each: for data sets of millions of images, object stores and other tools.
    """
    if clear_cache:
        _clear_cache(given=data is not None or out is not None)
        return
    if data is None or out is None:
        raise InputError("vitrail pack takes DATA and OUT, such as vitrail pack pets/ pets.pack.")
    if to not in _FORMATS:
        raise InputError(f"unknown format {to!r} for --to. {suggest(to, _FORMATS)}")
    if to == "shards":
        of_file = {"--size": size, "--jpeg": jpeg, "--check": check}
        refuse_given(of_file, "OPTION is not for shards, which hold the image files as they are; remove it.")
    else:
        refuse_given({"--shard-size": shard_size}, "OPTION is for --to shards; add that, or remove it.")
    if check:
        _check(data, out, quiet)
        return
    from vitrail.images.formats.pack_shards import SHARD_SIZE, pack_shards
    from vitrail.images.formats.pack_writer import SIZE, pack_dataset
    from vitrail.images.formats.sources import read_data

    with ProgressBars(enabled=not quiet) as bars:
        bars("listing files", 0, None)
        dataset = read_data(data, on_rows=partial(bars, "reading rows", total=None))
        bars("listing files", len(dataset.train), len(dataset.train))
        progress, unit, into = partial(bars, "packing images"), "images", ""
        result: PackResult | ShardResult
        if to == "shards":
            result = pack_shards(dataset, out, shard_size=shard_size or SHARD_SIZE, progress=progress)
            unit, into = "shards", f"{result.shards:,} shard{'s' * (result.shards != 1)} in "
        else:
            count = parse_workers(workers)
            result = pack_dataset(
                dataset, out, size=size or SIZE, jpeg=jpeg, workers=count, progress=progress
            )
    if result.resumed:
        print(f"Resumed after {result.resumed:,} {unit}.")
    _print_names("could not be read, and stay unreadable", list(result.unreadable))
    size_mb = f"{result.bytes / 1e6:,.1f} MB"
    print(f"Packed {result.images:,} images into {into}{printable(out)} ({size_mb}).")


def _check(data: str, out: Path, quiet: bool) -> None:
    from vitrail.images.formats.pack_writer import check_packed
    from vitrail.images.formats.sources import read_data

    with ProgressBars(enabled=not quiet) as bars:
        check = check_packed(read_data(data), out, lambda done, total: bars("checking images", done, total))
    _print_names("damaged in the packed file", check.damaged)
    _print_names("changed since it was packed", check.changed)
    _print_names("no longer in the data", check.missing)
    _print_names("new in the data", check.new)
    if not check.is_current:
        print("The packed file is not current; pack the data again.")
        raise typer.Exit(1)
    print(f"All {check.images:,} images are intact, and their sources unchanged.")


def _clear_cache(given: bool) -> None:
    from vitrail.base.safe_files import cache_folder
    from vitrail.images.formats.pack_cache import clear_cache

    if given:
        raise InputError("--clear-cache takes neither DATA nor OUT; run vitrail pack --clear-cache.")
    count, size = clear_cache()
    print(f"Deleted {count:,} files ({size / 1e6:,.1f} MB) from {printable(cache_folder())}.")


def _print_names(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
        print(f"{len(names):,} {what}: {', '.join(map(printable, names[:_MOST]))}{more}")
