# What the allocator is asked for.
from __future__ import annotations

import platform

from affine_divergence.lab.training import keep_freed_memory


def test_freed_memory_is_kept_where_the_allocator_is_that_of_glibc() -> None:
    assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")
