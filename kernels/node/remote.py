"""Reading what other processes of one machine have in their memory: one copy, by the operating system, and none by its owner.

Only Linux has this call. The operating system decides which process may read which (`mpiddl.node.process_memory` finds out).
"""

from __future__ import annotations

from numba import types

from mpiddl.kernels.jit import kernel
from mpiddl.kernels.lanes import base

VECTORS = 4
"""int64 words that `fetch` needs for a call: where to, how many bytes, where from, how many bytes."""

_read = types.ExternalFunction("process_vm_readv", types.int64(types.int32, *[types.int64] * 5))


@kernel
def fetch(vectors, process, target, source, nbytes):
    """`nbytes` from the address `source` of a process to `target` here; returns whether all of them came."""
    done = 0
    while done < nbytes:
        vectors[0], vectors[1] = target + done, nbytes - done
        vectors[2], vectors[3] = source + done, nbytes - done
        came = _read(process, base(vectors), 1, base(vectors) + 16, 1, 0)
        if came <= 0:
            return False
        done += came
    return True
