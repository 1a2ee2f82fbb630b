"""Registered arrays: each is registered once, and until its memory is freed.

The device reads and writes memory that it knows. The system pins it: that takes some 100 microseconds per MB, and counts
against the limit of locked memory (`ulimit -l`). An array is registered together with the array that it is a view of, so that
all parts of a gradient have one registration.
"""

from __future__ import annotations

import threading
import weakref
from itertools import count
from typing import NamedTuple

import numpy as np

from mpiddl.transport.verbs.work_requests import Device, Memory, Registered

WHOLE_BYTES = 64 << 20
"""A view is registered with all of its memory up to so many bytes, or up to eight times its own."""


class Known(NamedTuple):
    """A registration, and what drops it when the array is freed that owns the memory.

    owner : its ``id``. Two arrays over the same memory of something else, such as an mmap, have a registration each.
    """

    found: Registered
    owner: int
    finalizer: weakref.finalize


class Registrations:
    """Those of one device; for several threads.

    Attributes
    ----------
    made : int
        How many were made so far.
    """

    def __init__(self, device: Device):
        self._device, self.made, self._keys = device, 0, count()
        self._known: dict[int, Known] = {}
        self._lock = threading.RLock()  # an array may be freed in the middle of anything, by the same thread

    def __len__(self) -> int:
        """How many there are now."""
        return len(self._known)

    def local(self, array: np.ndarray) -> Memory:
        """A contiguous array, for this rank's device."""
        found = self._find(array)
        return found.local.part(array.ctypes.data - found.address, array.nbytes)

    def remote(self, array: np.ndarray) -> Memory:
        """The same for a peer's device."""
        found = self._find(array)
        return found.remote.part(array.ctypes.data - found.address, array.nbytes)

    def _find(self, array: np.ndarray) -> Registered:
        begin, end, root = array.ctypes.data, array.ctypes.data + array.nbytes, _root(array)
        with self._lock:
            for known in list(self._known.values()):
                found = known.found
                if known.owner == id(root) and found.address <= begin and end <= found.address + found.nbytes:
                    return found
            whole = root.flags.c_contiguous and root.nbytes <= max(WHOLE_BYTES, 8 * array.nbytes)
            return self.register(root if whole else array)

    def register(self, array: np.ndarray) -> Registered:
        """Register a contiguous array, until its memory is freed."""
        root = _root(array)
        with self._lock:
            found, key = self._device.register(array), next(self._keys)
            self.made += 1
            self._known[key] = Known(found, id(root), weakref.finalize(root, self._drop, key))
        return found

    def forget(self, array: np.ndarray) -> None:
        """Its memory is about to be given back."""
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        with self._lock:
            for key, known in list(self._known.items()):
                if known.found.address < end and begin < known.found.address + known.found.nbytes:
                    self._drop(key)

    def _drop(self, key: int) -> None:
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                known.finalizer.detach()
                self._device.unregister(known.found)

    def close(self) -> None:
        for key in list(self._known):
            self._drop(key)


def _root(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory, or that was made over memory of something else."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
