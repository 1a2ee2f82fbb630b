"""How every kernel is compiled: lazily, cached on disk, without the interpreter lock.

numba files a compiled function under its module, its qualified name and the time stamp of its own source file; it does
not notice that a function which it calls, or a generator of instructions, has changed in another file. So the
qualified name is given a fingerprint of all sources of this package: whichever file changes, nothing stale is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from numba import njit

from mpiddl.machine.kernel_cache import define


def _fingerprint() -> str:
    """A short hash of the sources of this package."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:10]


_FINGERPRINT = _fingerprint()


def kernel(function: Callable) -> Callable:
    """Compile `function` at its first call with each set of dtypes; load it from the cache if it is there."""
    function.__qualname__ = f"{function.__qualname__}-{_FINGERPRINT}"
    return define(lambda: njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: Callable) -> Callable:
    """A part of kernels that is written into each of them, so that it is compiled once and not twice."""
    return define(lambda: njit(inline="always", error_model="numpy")(function))
