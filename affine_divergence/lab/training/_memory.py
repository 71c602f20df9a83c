# Memory that training frees is kept by the process: glibc gives blocks of the size of a minibatch back to the kernel at once and
# takes them anew at the next step, page by page, which took a fifth of the time of a stack 64 wide.
from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Ask the allocator to keep what is freed, up to 1 GiB; False where it is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(option, KEPT) == 1 for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))
