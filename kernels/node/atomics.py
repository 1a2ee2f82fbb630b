"""Words of memory that several processes or threads share: single instructions, and how one waits for another's.

Addresses are int64, in bytes (`lanes.base`).
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mpiddl.kernels.jit import inlined
from mpiddl.kernels.lanes import INT64

EAGER = 200
"""Looks before the core is first offered to others: some microseconds, longer than a flag takes between cores."""

_X86 = platform.machine() in ("x86_64", "AMD64")

offer = types.ExternalFunction("sched_yield", types.int32())
"""Let others have the core, if any of them wants it."""


@intrinsic
def put(typing, address, value):
    """Store with release: what was written before is seen before."""

    def write(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], INT64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), write


@intrinsic
def look(typing, address):
    """Load with acquire: what is read after is read after."""

    def write(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], INT64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), write


@intrinsic
def add(typing, address, value):
    """Add a value, and return what was there before: no two callers that add 1 get the same."""

    def write(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], INT64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), write


@intrinsic
def replace(typing, address, expected, value):
    """Store a value if the word is the expected one, and return what was there before."""

    def write(context, builder, signature, args):
        pair = builder.cmpxchg(builder.inttoptr(args[0], INT64.as_pointer()), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), write


@intrinsic
def mark(typing, address, bits):
    """Set bits, and return what was there before."""

    def write(context, builder, signature, args):
        return builder.atomic_rmw("or", builder.inttoptr(args[0], INT64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), write


@intrinsic
def unmark(typing, address, bits):
    """Clear bits, and return what was there before: of several callers one finds them set."""

    def write(context, builder, signature, args):
        return builder.atomic_rmw("and", builder.inttoptr(args[0], INT64.as_pointer()), builder.not_(args[1]), "seq_cst")

    return types.int64(types.int64, types.int64), write


@intrinsic
def fence(typing):
    """What was read or written before it was so for everybody before anything that is read or written after it."""

    def write(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), write


@intrinsic
def pause(typing):
    """Tell the processor, where it wants to know, that this is a waiting loop."""

    def write(context, builder, signature, args):
        if _X86:
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), [])
        return context.get_dummy_value()

    return types.void(), write


@inlined
def wait_for(address, least, patience):
    """Whether a word that others count up is `least` or more, after up to `patience` more looks at it."""
    looks = 0
    while look(address) < least:
        looks += 1
        if looks > patience:
            return False
        if looks < EAGER:
            pause()
        else:
            offer()
    return True
