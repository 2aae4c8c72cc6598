"""Models by their name on the Hugging Face hub, fetched into its usual cache. Nothing fetched is run."""

from __future__ import annotations

import errno
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from vitrail.errors import FileError, needs, printable
from vitrail.telemetry import disable_telemetry
from vitrail.weights.folder import SETTINGS, WEIGHTS, shards

Name = re.Match[str]  # of NAME
CARD = "README.md"
USUAL = [name for weights in WEIGHTS for name in (f"{weights}.index.json", weights)]  # as in weight_names
WORD = r"\w(?:[\w.+=-]*\w)?"  # so never empty, "." or "..", and nothing that starts like an option
NAME = re.compile(
    r"(?a)hf:(?P<repo>\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?)"
    rf"(?:@(?P<revision>refs/(?:pr|convert)/{WORD}|{WORD}))?"
    rf"(?:/(?P<file>(?:{WORD}/)*{WORD}\.(?:npz|safetensors|bin|pth|pt)))?"
)
CLOSED = ("The model must be open to you.", "{name}, which asks for a licence or a login first",
          "Accept the licence on the model's page, and log in with `hf auth login`.")  # fmt: skip
CACHE = ("The cache must have room and let itself be written.", "{name}, and {kind} for {file}",
         "Make room, check its rights, or let HF_HOME name another folder.")  # fmt: skip
REASONS = {  # by an error's name, its errno or its HTTP status: the first that is true
    "offline": ("Offline, a model must be in the cache.", "{name}, whose {file} is not in it",
                "Load it once without offline=True, --offline or HF_HUB_OFFLINE."),
    "GatedRepoError": CLOSED,
    "RevisionNotFoundError": ("A revision must be a branch, a tag or a commit.", "{name}, which has no such",
                              "Look at the files on the model's page."),
    "RepositoryNotFoundError": ("A model must be on the hub.", "{name}, which is not there, or private",
                                "Check the name; for a private one log in with `hf auth login`."),
    "HTTP 401": CLOSED, "HTTP 403": CLOSED,
    **dict.fromkeys(("ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS"), CACHE),
    "HTTP": ("The hub must give what is asked for.", "{name}, and {kind} for {file}", "Try again later."),
    "list of files": ("The hub must be in reach.", "{name}, and no connection ({kind})",
                      "Check the network, or use the cache alone with offline=True (--offline)."),
    "": ("A file must come whole.", "{name}, and a part of {file} ({kind})", "Load again; no half is used."),
}  # fmt: skip


def parse(text: str) -> Name:
    """The parts of a name. One that is not well formed is refused before anyone is asked for it."""
    found = NAME.fullmatch(text) if len(text) < 500 else None
    if not found or re.search(r"--|\.\.|\.git$|.{97}", found["repo"]):  # as the hub itself has it
        must = "A model on the hub is hf:owner/name, with @revision or /path/file.npz behind it, or both."
        raise FileError(must, printable(text), "Copy the name from the model's page.")
    return found


def fetch_model(path: str | Path, *, offline: bool = False) -> tuple[str | Path, dict[str, Any]]:
    """Where a model lies on this disk, and what its card gains by that; a path stays as it is."""
    text = path.as_posix() if isinstance(path, PurePath) else str(path)
    if not text.startswith("hf:"):
        return path, {}
    name = parse(text)
    disable_telemetry()
    with needs("hub"):
        from huggingface_hub import constants
    offline = offline or constants.HF_HUB_OFFLINE  # from the environment
    there = fetch_names(name, offline)
    weights = name["file"] or next((one for one in USUAL if one in there), "")
    if weights not in there:
        raise reason(KeyError(), name, weights or WEIGHTS[0], offline) if offline else without(name, there)
    wanted = (CARD, weights) if name["file"] else (CARD, *SETTINGS, weights)
    first, *rest = [one for one in wanted if one in there]
    # The first by its revision, which the cache then knows when it is alone; the others by the same commit.
    folder = fetch_file(name, first, name["revision"], offline).parents[first.count("/")]
    for file in rest:
        fetch_file(name, file, folder.name, offline)
    for file in shards(folder / weights) if weights.endswith(".index.json") else ():
        if file.endswith((".safetensors", ".bin")):  # what else an index names is missing, and said to be
            fetch_file(name, file, folder.name, offline)
    source = f"hf:{name['repo']}@{folder.name}" + (f"/{name['file']}" if name["file"] else "")
    return folder / (name["file"] or ""), {"source": source, **licence_of(folder / CARD)}


def fetch_names(name: Name, offline: bool) -> list[str]:
    """The files of a model; offline, those in the cache that could be of use."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    repo, revision, wait = name["repo"], name["revision"], constants.HF_HUB_ETAG_TIMEOUT
    with explained(name, "list of files", offline):
        if not offline:
            found = HfApi().model_info(repo, revision=revision, timeout=wait).siblings
            return [one.rfilename for one in found or ()]
        wanted = [CARD, *SETTINGS, *USUAL, *filter(None, [name["file"]])]
        return [f for f in wanted if isinstance(try_to_load_from_cache(repo, f, revision=revision), str)]


def fetch_file(name: Name, file: str, revision: str | None, offline: bool) -> Path:
    """A file in the cache: models--owner--name/snapshots/commit/file."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    get = try_to_load_from_cache if offline else hf_hub_download
    with explained(name, file, offline):
        return Path(get(name["repo"], file, revision=revision))  # type: ignore[arg-type]  # or it is explained


def without(name: Name, there: list[str]) -> FileError:
    files = [one for one in there if NAME.fullmatch(f"hf:{name['repo']}/{one}")]
    return FileError(
        f"A model on the hub must hold {name['file'] or ' or '.join(WEIGHTS)}.",
        f"{name[0]} with {', '.join(files[:5]) or 'no weight file'}{' ...' if files[5:] else ''}",
        f"Name a file of it, such as hf:{name['repo']}/{files[0]}." if files else "Check the name.",
    )


def licence_of(card: Path) -> dict[str, str]:
    """The licence, from the lines between --- at the top of a model card."""
    text = card.read_text("utf-8-sig", "replace") if card.is_file() else ""
    top = re.match(r"---\s*\n(.*?)^---", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"""^(license|license_name): *["']?(\w[\w.+ -]*)""", top[1] if top else "", re.M)
    found = {key: value.strip()[:100] for key, value in lines}
    named = found.get("license_name") if found.get("license") == "other" else None
    return {"licence": named or found["license"]} if "license" in found else {}


@contextmanager
def explained(name: Name, file: str, offline: bool) -> Iterator[None]:
    """Whatever goes wrong in there is one sentence; the hub's own log and warnings are not shown."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:  # which ones there are depends on the versions of many packages
        raise reason(error, name, file, offline) from None  # its own words can hold a signed address
    finally:
        log.setLevel(level)


def reason(error: BaseException, name: Name, file: str, offline: bool) -> FileError:
    """What went wrong, in our words alone."""
    chain = [error, *filter(None, [error.__cause__])]  # the hub says "not found" because of a network error
    number = getattr(error, "errno", None)
    answers = [answer for one in chain if (answer := getattr(one, "response", None)) is not None]
    kind = os.strerror(number) if number else type(error).__name__
    kind = f"HTTP {answers[0].status_code}" if answers else kind
    kinds = {one.__name__ for each in chain for one in type(each).__mro__} | {file, kind, kind[:4]}
    kinds |= {"offline" if offline else "", errno.errorcode.get(number or 0, "")}
    must, got, do = next(REASONS[one] for one in REASONS if one in kinds)
    return FileError(must, got.format(name=name[0], file=printable(file), kind=kind), do)
