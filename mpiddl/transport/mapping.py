"""A file mapped into memory without being kept open.

Python's own `mmap` keeps a file open for each mapping (before 3.13 always), of which a process may have a thousand or so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Any

import numpy as np

FAILED = ctypes.c_void_p(-1).value


@cache
def _library() -> Any:
    """The C library's calls."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    library.munmap.argtypes = address, size
    library.madvise.argtypes = address, size, number
    return library


def mapped(file: int, nbytes: int) -> np.ndarray:
    """The first ``nbytes``, at least 1, of an open file as an array of uint8 that shares them, until the last view of it goes.

    Raises
    ------
    OSError
        If the system refuses.
    """
    library = _library()
    found = library.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if found == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(found)
    # At the end of the program the system does it: threads may still be at it.
    weakref.finalize(memory, library.munmap, found, nbytes).atexit = False
    return np.frombuffer(memory, np.uint8)


def forget(array: np.ndarray) -> None:
    """Give the pages back of an array of whole pages of a file without a disk; it is zero then. Where that cannot be, nothing
    happens: the pages go with the last view."""
    if array.size and hasattr(mmap, "MADV_REMOVE"):
        _library().madvise(array.ctypes.data, array.size, mmap.MADV_REMOVE)
