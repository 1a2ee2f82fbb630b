"""The thin tile: a product with so few columns that all of them stay in registers.

    C[r, :] = S[r, :] + sum_k A[r, k] * B[k, :]          r < rows <= HEIGHT[units]

B has one to three vectors of columns, the last of them a half where that is cheaper (`UNIT`), and is read where it lies. The
tile is as high as the registers allow, for every element of A that is loaded is used once per vector: with two vectors of AVX2,
12 multiply-adds to 8 loads. Each element of C is one chain of multiply-adds in the order of k, whatever the tile.

Matrices come as an address and a stride between rows, in elements. The columns of B, C and S are whole units; nothing outside
`rows` is touched.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiddl.kernels.lanes import INT64, REGISTERS, UNIT, WIDTH, Lanes, emitter

WHOLE = WIDTH // UNIT
"""Units of a whole vector."""

_ROWS = {1: 14, 2: 12, 3: 8} if REGISTERS == 32 else {1: 8, 2: 6, 3: 4}
HEIGHT = {units: _ROWS[-(-units // WHOLE)] for units in range(1, max(_ROWS) * WHOLE + 1)}
"""Rows of a tile for so many units of columns: sums, one row of B and one element of A fill the registers."""

_NAMES = "units A lda B ldb S lds C ldc k rows"


@intrinsic
def thin_rows(typing, like, units, a, lda, b, ldb, s, lds, c, ldc, k, rows):
    """A tile that reads A along its rows: A[r, k] at a + r * lda + k. `like` is an array of the dtype."""
    return types.void(like, *[types.int64] * 11), emitter(partial(_call, "rows"), _NAMES)


@intrinsic
def thin_columns(typing, like, units, a, lda, b, ldb, s, lds, c, ldc, k, rows):
    """A tile that reads A along its columns: A[r, k] at a + k * lda + r."""
    return types.void(like, *[types.int64] * 11), emitter(partial(_call, "columns"), _NAMES)


@intrinsic
def fetch(typing, like, address, lines):
    """Ask for so many cache lines, into the second cache; any address will do."""
    return types.void(like, types.int64, types.int64), emitter(_write_fetch, "ADDRESS lines")


def _write_fetch(lanes, address, lines):
    builder, step = lanes.builder, 64 // lanes.size
    with cgutils.for_range(builder, lines, intp=INT64) as line:
        lanes.prefetch(lanes.at(address, builder.mul(line.index, INT64(step))), write=False)


def _call(kind, lanes, units, **given):
    """Call the tile of that width: for all its rows, or the one that looks how many there are."""
    builder = lanes.builder
    for width, height in HEIGHT.items():
        full = builder.icmp_signed(">=", given["rows"], INT64(height))
        with builder.if_then(builder.icmp_signed("==", units, INT64(width))), builder.if_else(full) as (whole, part):
            with whole:
                builder.call(_function(kind, lanes, given, width, True), list(given.values()))
            with part:
                builder.call(_function(kind, lanes, given, width, False), list(given.values()))


def _function(kind, lanes, given, units, whole):
    """The tile as a function of its own, so that registers are allotted without regard to the caller."""
    signature = ir.FunctionType(ir.VoidType(), [value.type for value in given.values()])
    name = f"mpiddl_thin_{kind}_{lanes.element}_{units}_{'whole' if whole else 'part'}"
    function = cgutils.get_or_insert_function(lanes.builder.module, signature, name)
    if function.is_declaration:
        function.linkage = "internal"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        _write(Lanes(builder, lanes.element), kind, units, whole, **dict(zip(given, function.args, strict=True)))
        builder.ret_void()
    return function


def _write(lanes, kind, units, whole, a, lda, b, ldb, s, lds, c, ldc, k, rows):
    """Start the sums, run over k, store."""
    builder, last = lanes.builder, lanes.builder.sub(rows, INT64(1))
    order = [INT64(r) for r in range(HEIGHT[units])]
    if not whole:  # a row that does not exist reads another one's elements
        order = [builder.select(builder.icmp_signed("<", row, last), row, last) for row in order]
    parts = _parts(lanes, units)
    heads = [lanes.at(a, row if kind == "columns" else builder.mul(row, lda)) for row in order]
    sums = [[cgutils.alloca_once(builder, part.vector) for part, _ in parts] for _ in order]
    for row, places in zip(order, sums, strict=True):
        line = lanes.at(s, builder.mul(row, lds))
        for (part, offset), place in zip(parts, places, strict=True):
            builder.store(part.load(part.at(line, offset)), place)
    with cgutils.for_range(builder, k, intp=INT64) as step:
        line = lanes.at(b, builder.mul(step.index, ldb))
        factors = [part.load(part.at(line, offset)) for part, offset in parts]
        index = builder.mul(step.index, lda) if kind == "columns" else step.index
        for head, places in zip(heads, sums, strict=True):
            element = builder.load(lanes.at(head, index))
            for (part, _), factor, place in zip(parts, factors, places, strict=True):
                builder.store(part.fma(part.splat(element), factor, builder.load(place)), place)
    for r, places in enumerate(sums):
        with builder.if_then(builder.icmp_signed(">", rows, INT64(r))):
            line = lanes.at(c, builder.mul(INT64(r), ldc))
            for (part, offset), place in zip(parts, places, strict=True):
                part.store(builder.load(place), part.at(line, offset))


def _parts(lanes, units):
    """Vectors of so many units together, whole ones as long as there is room, and where each begins."""
    whole, rest = divmod(units, WHOLE)
    smaller = Lanes(lanes.builder, lanes.element, UNIT // lanes.size)
    return [(lanes, v * lanes.count) for v in range(whole)] + [(smaller, whole * lanes.count)] * (rest > 0)
