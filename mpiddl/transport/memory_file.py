"""A file mapped into memory without being kept open.

Python's own `mmap` keeps a file open for each mapping (before 3.13 always), of which a process may have a thousand or so. So it
maps nothing but room here, in whose place the file is put: what it gives back in the end, without any step of Python that a
signal could come into, is the file's mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np

FAILED = ctypes.c_void_p(-1).value
MAP_FIXED = 0x10  # sys/mman.h of Linux and macOS


@cache
def _library() -> Any:
    """The C library's calls."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    library.madvise.argtypes = address, size, number
    return library


def mapped(file: int, nbytes: int) -> np.ndarray:
    """The first ``nbytes``, at least 1, of an open file as an array of uint8 that shares them, until the last view of it goes.

    Raises
    ------
    OSError
        If the system refuses.
    """
    room = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    if _library().mmap(room.ctypes.data, nbytes, rights, mmap.MAP_SHARED | MAP_FIXED, file, 0) == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return room


def forget(array: np.ndarray) -> None:
    """Give the pages back of an array of whole pages of a file without a disk; it is zero then. Where that cannot be, nothing
    happens: the pages go with the last view."""
    if array.size and hasattr(mmap, "MADV_REMOVE"):
        _library().madvise(array.ctypes.data, array.size, mmap.MADV_REMOVE)
