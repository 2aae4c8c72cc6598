"""How much memory a model takes at least, and how much there is: what cannot fit is refused beforehand.

Linux grants memory that it does not have, and ends the process that uses it, without a word. So the
sizes are added up before anything is allocated. They are lower bounds: a model that is refused here
could not have run, and one that is let through may still be too large.
"""

from __future__ import annotations

import math
import re
import sys
from contextlib import suppress
from pathlib import Path

from vitrail.config import ViTConfig, by
from vitrail.errors import InputError

FLOAT = 4  # bytes; models on a CPU compute in float32
CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
REFUSALS = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "failed to map segment",
    "start new thread",
)


def memory_limit() -> int | None:
    """Bytes that this process can have: main memory and swap, or less where a limit is set.

    None where the system does not say.
    """
    found = [limit for limit in (installed(), process_limit(), *map(container_limit, CGROUP)) if limit]
    return min(found, default=None)


def installed() -> int | None:
    with suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        return 1024 * sum(int(size) for size in re.findall(r"^(?:MemTotal|SwapTotal): *(\d+) kB", text, re.M))
    return None


def process_limit() -> int | None:
    """What `ulimit -v` has set."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def container_limit(file: str) -> int | None:
    with suppress(OSError, ValueError):  # no such file, or the word "max"
        return int(Path(file).read_text())
    return None


def as_text(size: float) -> str:
    """Bytes as people say them: 25 GB."""
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 1000 or unit == "TB":
            break
    return f"{size:,.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


# ---- what a model takes ---------------------------------------------------------------------


def check_parameters(config: ViTConfig) -> None:
    """Refuse a model on the CPU whose parameters alone are more than the memory."""
    needed, limit = FLOAT * sum(config.matrices.values()), memory_limit()
    if limit is not None and needed > limit:
        largest = max(config.matrices, key=config.matrices.__getitem__)
        raise InputError(
            f"the parameters of this model need {as_text(needed)} of memory and {as_text(limit)} are there; "
            f"most of them are in {largest}: make that smaller."
        )


def forward_bytes(config: ViTConfig, pictures: int = 1) -> int:
    """What a forward pass holds at once, at least: the pictures, and the tokens at the widest place of a
    block; with a position bias also a number for each head and pair of tokens."""
    T, D, inner = config.tokens, config.width, 3 * config.heads_width
    pairs = config.heads * T * T if config.position in ("pairwise", "relative") else 0
    pixels = config.channels * math.prod(config.pixels) if config.input in ("picture", "video") else 0
    return FLOAT * (pictures * (pixels + T * (2 * D + max(inner, config.F))) + pairs)


def weights_bytes(config: ViTConfig, pictures: int) -> int:
    """The attention weights of one block, written down to be looked at, and the scores they come from."""
    return 2 * FLOAT * pictures * config.heads * config.tokens**2


def training_bytes(config: ViTConfig, pictures: int) -> int:
    """Weights, and what backward needs of every block."""
    return FLOAT * sum(config.matrices.values()) + config.depth * forward_bytes(config, pictures)


def check_fits(needed: int, config: ViTConfig, pictures: int, what: str, do: str) -> None:
    """Refuse what would need more than the memory: `what` of these pictures; `do` is how to need less."""
    limit = memory_limit()
    if limit is not None and needed > limit:
        many = f"{pictures:,} images" if pictures > 1 else "an image"
        raise InputError(
            f"{what} for {many} of {by(config.pixels)} ({config.tokens:,} tokens) needs at least "
            f"{as_text(needed)} of memory and {as_text(limit)} are there; {do}."
        )


# ---- when it was too much all the same ------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out; torch has several, some without a class of their own."""
    known = isinstance(error, (RuntimeError, ImportError))
    return isinstance(error, MemoryError) or (known and any(word in str(error) for word in REFUSALS))


def asked_for(error: BaseException) -> str | None:
    """How much was asked for when it could not be had, as the error tells it."""
    if found := re.search(r"allocate (\d+) bytes", str(error)):
        return as_text(int(found[1]))
    found = re.search(r"allocate ([\d.]+ [KMGTPE]i?B)", str(error))
    return found[1] if found else None
