"""The setting of the C library's memory allocator."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from <malloc.h>


def keep_freed_memory() -> None:
    """Let this process keep freed memory instead of returning it to the system.

    PyTorch allocates every CPU tensor anew. By default large ones come from the system each time, page by
    page and zeroed: with S/16 and 32 images that costs a tenth of the time. Only glibc has this setting.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
            library.mallopt(_M_MMAP_MAX, 0)
