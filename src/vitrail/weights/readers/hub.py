"""Models on the Hugging Face hub, downloaded into its usual cache. Nothing downloaded is executed."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vitrail.base.errors import FileError, option, printable, require_extra
from vitrail.base.telemetry import disable_telemetry
from vitrail.weights.readers.folder import CARD, SETTINGS, TEXT_FILES, WEIGHTS, license_of, list_shards

_Name = re.Match[str]  # of _NAME
_BESIDE = tuple(dict.fromkeys((*SETTINGS, *TEXT_FILES)))  # the files that are read beside the weights
_USUAL = [name for weights in WEIGHTS for name in (f"{weights}.index.json", weights)]  # as in folder.py
_WORD = r"\w(?:[\w.+=-]*\w)?"  # never empty, "." or "..", and never like an option
_NAME = re.compile(
    r"(?a)hf:(?P<repo>\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?)"
    rf"(?:@(?P<revision>refs/(?:pr|convert)/{_WORD}|{_WORD}))?"
    rf"(?:/(?P<file>(?:{_WORD}/)*{_WORD}\.(?:npz|safetensors|bin|pth|pt)))?"
)
# Messages by an error's class name, its errno or its HTTP status; the first that applies is used.
_CLOSED = (
    "{name} requires a license or a login; accept the license on the model's page, and log in with "
    "`hf auth login`."
)
_CACHE = (
    "The cache cannot be written for {name} ({kind} for {file}); free some space, check its permissions, or "
    "set HF_HOME to another folder."
)
_REASONS = {
    "offline": "{file} of {name} is not in the cache, and nothing is downloaded offline; load it once "
    "without {offline} and HF_HUB_OFFLINE.",
    "GatedRepoError": _CLOSED,
    "RevisionNotFoundError": "{name} has no such revision; a branch, a tag or a commit is needed. See the "
    "files on the model's page.",
    "RepositoryNotFoundError": "{name} is not on the hub, or is private; check the name, or log in with "
    "`hf auth login`.",
    "HTTP 401": _CLOSED,
    "HTTP 403": _CLOSED,
    **dict.fromkeys(("ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS"), _CACHE),
    "HTTP": "The hub answered {kind} for {file} of {name}; try again later.",
    "list of files": "The hub cannot be reached for {name} ({kind}); check the network, or use only the "
    "cache with {offline}.",
    "": "The download of {file} of {name} is incomplete ({kind}); load it again. No partial file is used.",
}


def _parse_name(text: str) -> _Name:
    """The parts of a name. A malformed one is refused before any request is made."""
    match = _NAME.fullmatch(text) if len(text) < 500 else None
    if not match or re.search(r"--|\.\.|\.git$|.{97}", match["repo"]):  # the hub's own rules
        raise FileError(
            f"{printable(text)} is not the name of a model on the hub: hf:owner/name, optionally followed by "
            "@revision, /path/file.npz or both. Copy the name from the model's page."
        )
    return match


def fetch_model(path: str, *, offline: bool = False) -> tuple[Path, dict[str, str]]:
    """Download a model: its local path, and card fields from the hub."""
    name = _parse_name(path)
    disable_telemetry()
    with require_extra("hub"):
        from huggingface_hub import constants
    offline = offline or constants.HF_HUB_OFFLINE  # from the environment
    available, commit = _list_files(name, offline)
    weights = name["file"] or next((file for file in _USUAL if file in available), "")
    if weights not in available:
        missing = weights or WEIGHTS[0]
        raise _explain(KeyError(), name, missing, offline) if offline else _no_weights(name, available)
    needed = (CARD, weights) if name["file"] else (CARD, *_BESIDE, weights)
    first, *rest = [file for file in needed if file in available]
    if not offline:
        _announce(name, [first, *rest, *_shards_of(weights, available)], available, commit)
    # The first by its revision, so that the cache knows it offline; the others by the same commit.
    folder = _fetch_file(name, first, name["revision"], offline).parents[first.count("/")]
    for file in rest:
        _fetch_file(name, file, folder.name, offline)
    for file in list_shards(folder / weights) if weights.endswith(".index.json") else ():
        if file.endswith((".safetensors", ".bin")):  # other files in an index are reported as missing
            _fetch_file(name, file, folder.name, offline)
    source = f"hf:{name['repo']}@{folder.name}" + (f"/{name['file']}" if name["file"] else "")
    return folder / (name["file"] or ""), {"source": source, **license_of(folder / CARD)}


def _announce(name: _Name, files: list[str], sizes: Mapping[str, int | None], commit: str | None) -> None:
    """Say on stderr how much will be downloaded, before it is."""
    from huggingface_hub import constants, try_to_load_from_cache

    cached = {f for f in files if isinstance(try_to_load_from_cache(name["repo"], f, revision=commit), str)}
    missing = [sizes[file] for file in files if file not in cached]
    if missing and (commit is None or len(missing) == len(files) or sum(filter(None, missing)) > 1e6):
        known = None not in missing
        size = f"{sum(filter(None, missing)) / 1e6:,.1f} MB" if known else "files of unknown size"
        where = printable(constants.HF_HOME)
        print(f"Downloading {size} of {name[0]}, once, into the cache {where}.", file=sys.stderr)


def _shards_of(weights: str, available: Iterable[str]) -> list[str]:
    """The files that an index of shards probably lists."""
    if not weights.endswith(".index.json"):
        return []
    ending = Path(weights.removesuffix(".index.json")).suffix
    return [file for file in available if file.endswith(ending) and "-of-" in file]


def _list_files(name: _Name, offline: bool) -> tuple[dict[str, int | None], str | None]:
    """The files of a model with their sizes, and its commit; offline, the relevant files in the cache."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    repo, revision, wait = name["repo"], name["revision"], constants.HF_HUB_ETAG_TIMEOUT
    with _explained(name, "list of files", offline):
        if not offline:
            info = HfApi().model_info(repo, revision=revision, timeout=wait, files_metadata=True)
            return {file.rfilename: file.size for file in info.siblings or ()}, info.sha
        relevant = [CARD, *_BESIDE, *_USUAL, *filter(None, [name["file"]])]
        cached = [f for f in relevant if isinstance(try_to_load_from_cache(repo, f, revision=revision), str)]
        return dict.fromkeys(cached), None


def _fetch_file(name: _Name, file: str, revision: str | None, offline: bool) -> Path:
    """A file in the cache: models--owner--name/snapshots/commit/file."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    get = try_to_load_from_cache if offline else hf_hub_download
    with _explained(name, file, offline):
        return Path(get(name["repo"], file, revision=revision))  # type: ignore[arg-type]  # None becomes a TypeError, which is explained


def _no_weights(name: _Name, available: Iterable[str]) -> FileError:
    files = [one for one in available if _NAME.fullmatch(f"hf:{name['repo']}/{one}")]
    shown = f"{', '.join(files[:5]) or 'no weight file'}{' ...' if files[5:] else ''}"
    return FileError(
        f"{name[0]} has no {name['file'] or ' or '.join(WEIGHTS)}, but {shown}; "
        + (f"name one of its files, such as hf:{name['repo']}/{files[0]}." if files else "check the name.")
    )


@contextmanager
def _explained(name: _Name, file: str, offline: bool) -> Iterator[None]:
    """Turn any error of the hub's library into one sentence, and hide its log and warnings."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:  # their classes depend on the versions of many packages
        raise _explain(error, name, file, offline) from None  # its own text can hold a signed URL
    finally:
        log.setLevel(level)


def _explain(error: BaseException, name: _Name, file: str, offline: bool) -> FileError:
    """What went wrong, without quoting the error."""
    chain = [error, *filter(None, [error.__cause__])]  # the hub reports "not found" after a network error
    number = getattr(error, "errno", None)
    answers = [answer for one in chain if (answer := getattr(one, "response", None)) is not None]
    kind = os.strerror(number) if number else type(error).__name__
    kind = f"HTTP {answers[0].status_code}" if answers else kind
    kinds = {one.__name__ for each in chain for one in type(each).__mro__} | {file, kind, kind[:4]}
    kinds |= {"offline" if offline else "", errno.errorcode.get(number or 0, "")}
    message = next(_REASONS[one] for one in _REASONS if one in kinds)
    words = {"name": name[0], "file": printable(file), "kind": kind, "offline": option("offline", True)}
    return FileError(message.format(**words))
