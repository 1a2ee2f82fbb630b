"""Registered arrays: each is registered once, and until its memory is freed.

The device reads and writes memory that it knows. The system pins it: that takes some 100 microseconds per MB, and counts
against the limit of locked memory (`ulimit -l`). An array is registered together with the array that it is a view of, so that
all parts of a gradient have one registration.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.transport.verbs.work_requests import Device, Memory, Registered

WHOLE_BYTES = 64 << 20
"""A view is registered with all of its memory up to so many bytes, or up to eight times its own."""

MOST_PIECES = 8
"""Of a larger array that are registered one by one: then all of it is."""


@dataclass(eq=False)
class Known:
    """A registration, and what drops it when the array is freed that owns the memory.

    owner : its ``id``. Two arrays over the same memory of something else, such as an mmap, have a registration each.
    holders : how many have asked for it by `Registrations.hold`.
    """

    found: Registered
    owner: int
    finalizer: weakref.finalize
    holders: int = 0


class Registrations:
    """Those of one device; for several threads.

    Attributes
    ----------
    made : int
        How many were made so far.
    """

    def __init__(self, device: Device):
        self._device, self.made, self._keys = device, 0, count()
        self._known: dict[int, dict[int, Known]] = {}  # by owner
        self._lock = threading.RLock()  # an array may be freed in the middle of anything, by the same thread

    def __len__(self) -> int:
        """How many there are now."""
        return sum(map(len, self._known.values()))

    def local(self, array: np.ndarray) -> Memory:
        """A contiguous array, for this rank's device."""
        found = self._find(array).found
        return found.local.part(array.ctypes.data - found.address, array.nbytes)

    def remote(self, array: np.ndarray) -> Memory:
        """The same for a peer's device."""
        found = self._find(array).found
        return found.remote.part(array.ctypes.data - found.address, array.nbytes)

    def hold(self, array: np.ndarray) -> Memory:
        """The same as `remote`. `release` drops the registration when no other caller holds it."""
        with self._lock:
            self._find(array).holders += 1
            return self.remote(array)

    def release(self, array: np.ndarray) -> None:
        """Its memory is about to be given back."""
        with self._lock:
            known = self._find(array)
            known.holders -= 1
            if known.holders <= 0:
                self._drop(known.owner, next(key for key, each in self._known[known.owner].items() if each is known))

    def _find(self, array: np.ndarray) -> Known:
        begin, end, root = array.ctypes.data, array.ctypes.data + array.nbytes, _root(array)
        with self._lock:
            of_it = self._known.get(id(root), {})
            for known in list(of_it.values()):
                if known.found.address <= begin and end <= known.found.address + known.found.nbytes:
                    return known
            if root.flags.c_contiguous and (len(of_it) >= MOST_PIECES or root.nbytes <= max(WHOLE_BYTES, 8 * array.nbytes)):
                with suppress(TransportError):  # the parts may fit where the whole is too much to be locked
                    return self._register(root)
            return self._register(array)

    def register(self, array: np.ndarray) -> Registered:
        """Register a contiguous array, until its memory is freed."""
        with self._lock:
            return self._register(array).found

    def _register(self, array: np.ndarray) -> Known:
        root = _root(array)
        found, key, owner = self._device.register(array), next(self._keys), id(root)
        self.made += 1
        known = Known(found, owner, weakref.finalize(root, self._drop, owner, key))
        self._known[owner] = {key: known, **self._known.get(owner, {})}  # the newest may be the largest
        return known

    def _drop(self, owner: int, key: int) -> None:
        with self._lock:
            known = self._known.get(owner, {}).pop(key, None)
            if known is not None:
                known.finalizer.detach()
                self._device.unregister(known.found)
                if not self._known[owner]:
                    del self._known[owner]

    def close(self) -> None:
        for owner, of_it in list(self._known.items()):
            for key in list(of_it):
                self._drop(owner, key)


def _root(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory, or that was made over memory of something else."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
