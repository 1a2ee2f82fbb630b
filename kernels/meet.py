"""A barrier through memory that several processes share: a dissemination barrier on flags.

In round k rank r raises its flag k and waits for that of rank r - 2^k: after ceil(log2 P) rounds everybody has heard,
at some remove, of everybody. Flags count up and are never lowered, so there is nothing to reset. What a rank wrote
before it raised a flag is seen by whoever saw the flag (release and acquire).

Cost: ceil(log2 P) rounds of one written and one awaited cache line; 0.1 to 0.2 microseconds each between cores that
share a cache.
Reference: D. Hensgen, R. Finkel, U. Manber, Two algorithms for barrier synchronization, Int. J. Parallel Programming
17(1), 1988, doi:10.1007/BF01379320.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import kernel
from .lanes import INT64, base

FLAGS = 16
"""int64 flags a rank: 128 bytes, since processors fetch cache lines in pairs. Enough for 2^16 ranks."""

EAGER = 200
"""Looks before the core is first offered to others: some microseconds, longer than a flag takes between cores."""

_X86 = platform.machine() in ("x86_64", "AMD64")
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@kernel
def meet(flags, state, rank, size, patience):
    """Take part in a barrier, or go on with it; returns whether all ranks have come.

    `flags`, shape (size, FLAGS), lies in shared memory and was zero at first. `state`, shape (2,), is this rank's own:
    barriers passed, and the round of the one it is in. After `patience` looks at a flag that is still down the call
    returns False, to be called again.
    """
    count, turn = state[0] + 1, state[1]
    while (1 << turn) < size:
        _raise(base(flags) + 8 * (rank * FLAGS + turn), count)
        awaited = base(flags) + 8 * ((rank - (1 << turn)) % size * FLAGS + turn)
        looks = 0
        while _look(awaited) < count:
            looks += 1
            if looks > patience:
                state[1] = turn
                return False
            if looks < EAGER:
                _pause()
            else:
                _sched_yield()
        turn += 1
    state[0], state[1] = count, 0
    return True


@intrinsic
def _raise(typing, address, value):
    """Store with release: what was written before is seen before."""

    def write(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], INT64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), write


@intrinsic
def _look(typing, address):
    """Load with acquire: what is read after is read after."""

    def write(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], INT64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), write


@intrinsic
def _pause(typing):
    """Tell the processor, where it wants to know, that this is a waiting loop."""

    def write(context, builder, signature, args):
        if _X86:
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), [])
        return context.get_dummy_value()

    return types.void(), write
