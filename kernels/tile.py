"""The tile: a small block of a matrix product that stays in registers while the sum runs.

    C[r, j] = start + sum_k A[r, k] * B[k, j]        r < rows <= ROWS, j < cols <= VECTORS * lanes

For each k a few vectors of B are loaded, each element of A's column is spread over a vector, and every pair is
multiplied and added: 24 multiply-adds to 11 loads with AVX-512. Each element of C is one chain of multiply-adds in the
order of k, whatever the tile, the blocking or the number of lanes: the bits depend on none of them (where the machine
rounds a multiply-add once, as all with FMA do).

References
----------
K. Goto, R. van de Geijn, Anatomy of high-performance matrix multiplication, ACM TOMS 34(3), 2008,
doi:10.1145/1356052.1356053; F. Van Zee, R. van de Geijn, BLIS, ACM TOMS 41(3), 2015, doi:10.1145/2764454.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .lanes import INT64, REGISTERS, Lanes, address

VECTORS = 3
ROWS = 8 if REGISTERS == 32 else 4
"""ROWS * VECTORS sums, VECTORS parts of B and one element of A: 28 of 32 registers, or 16 of 16."""

ZERO, RESUME, BIAS, RELU = 0, 1, 2, 4
"""How a tile starts (from zero, from what C holds, from a row of biases); RELU is added where it ends with max(0, .)."""


CHUNK = 8
"""Steps of k between two rounds of prefetching."""


@intrinsic
def tile_first(typing, a, a0, lda, b, b0, ldb, pack, p0, k, c, c0, ldc, rows, cols, bias, bias0, mode, ahead, h0, ldh):
    n = types.int64
    return types.void(a, n, n, b, n, n, pack, n, n, c, n, n, n, n, bias, n, n, ahead, n, n), _generator("first")


@intrinsic
def tile_direct(typing, a, a0, lda, b, b0, ldb, k, c, c0, ldc, rows, cols, bias, bias0, mode, ahead, h0, ldh):
    n = types.int64
    return types.void(a, n, n, b, n, n, n, c, n, n, n, n, bias, n, n, ahead, n, n), _generator("direct")


@intrinsic
def tile_rows(typing, a, a0, lda, pack, p0, k, c, c0, ldc, rows, cols, bias, bias0, mode, ahead, h0, ldh):
    n = types.int64
    return types.void(a, n, n, pack, n, n, c, n, n, n, n, bias, n, n, ahead, n, n), _generator("rows")


@intrinsic
def tile_columns(typing, a, a0, lda, pack, p0, k, c, c0, ldc, rows, cols, mode, ahead, h0, ldh):
    n = types.int64
    return types.void(a, n, n, pack, n, n, c, n, n, n, n, n, ahead, n, n), _generator("columns")


def _generator(kind):
    def generate(context, builder, signature, arguments):
        element = context.get_data_type(signature.args[0].dtype)
        lanes = Lanes(builder, element)
        flat, position = [], 0
        while position < len(arguments):
            if isinstance(signature.args[position], types.Array):
                flat.append(address(context, builder, signature.args[position], arguments[position], arguments[position + 1]))
                position += 2
            else:
                flat.append(arguments[position])
                position += 1
        cols = flat[{"direct": 8, "first": 9, "rows": 7, "columns": 7}[kind]]
        needed = builder.sdiv(builder.add(cols, INT64(lanes.count - 1)), INT64(lanes.count))
        for vectors in range(1, VECTORS + 1):
            function = _function(builder.module, element, vectors, kind, [v.type for v in flat])
            with builder.if_then(builder.icmp_signed("==", needed, INT64(vectors))):
                builder.call(function, flat)
        return context.get_dummy_value()

    return generate


def _function(module, element, vectors, kind, kinds):
    name = f"mpiddl_tile_{kind}_{element}_{vectors}"
    function = cgutils.get_or_insert_function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    if function.is_declaration:
        function.linkage = "internal"
        function.attributes.add("noinline")
        _body(ir.IRBuilder(function.append_basic_block()), function.args, element, vectors, kind)
    return function


def _body(builder, arguments, element, vectors, kind):
    if kind == "first":
        a, lda, b, ldb, pack, k, c, ldc, rows, cols, bias, mode, ahead, ldh = arguments
    elif kind == "direct":
        a, lda, b, ldb, k, c, ldc, rows, cols, bias, mode, ahead, ldh = arguments
    elif kind == "rows":
        a, lda, pack, k, c, ldc, rows, cols, bias, mode, ahead, ldh = arguments
        b = ldb = None
    else:
        a, lda, pack, k, c, ldc, rows, cols, mode, ahead, ldh = arguments
        b = ldb = bias = None
    lanes = Lanes(builder, element)
    sums = [[cgutils.alloca_once(builder, lanes.vector) for _ in range(vectors)] for _ in range(ROWS)]
    masks = [lanes.first(builder.sub(cols, INT64(v * lanes.count))) for v in range(vectors)]
    c_rows = [lanes.at(c, builder.mul(INT64(r), ldc)) for r in range(ROWS)]
    _start(lanes, sums, masks, c_rows, bias, rows, mode)
    last = builder.sub(rows, INT64(1))
    heads = []
    for r in range(ROWS):
        row = builder.select(builder.icmp_signed("<", INT64(r), last), INT64(r), last)
        heads.append(lanes.at(a, builder.mul(row, lda)) if kind != "columns" else lanes.at(a, r))
    def step(index):
        if kind == "first":
            line = lanes.at(b, builder.mul(index, ldb))
            out = lanes.at(pack, builder.mul(index, INT64(vectors * lanes.count)))
            parts = [lanes.masked_load(lanes.at(line, v * lanes.count), masks[v]) for v in range(vectors)]
            for v in range(vectors): lanes.store(parts[v], lanes.at(out, v * lanes.count))
        elif kind == "direct":
            line = lanes.at(b, builder.mul(index, ldb))
            parts = [lanes.load(lanes.at(line, v * lanes.count)) for v in range(vectors)]
        else:
            line = lanes.at(pack, builder.mul(index, INT64(vectors * lanes.count)))
            parts = [lanes.load(lanes.at(line, v * lanes.count)) for v in range(vectors)]
        off = index if kind != "columns" else builder.mul(index, lda)
        for head, row in zip(heads, sums, strict=True):
            spread = lanes.splat(builder.load(lanes.at(head, off)))
            for part, one in zip(parts, row, strict=True):
                builder.store(lanes.fma(spread, part, builder.load(one)), one)
    chunks = builder.sdiv(builder.add(k, INT64(CHUNK - 1)), INT64(CHUNK))
    with cgutils.for_range(builder, chunks, intp=INT64) as chunk:
        near = lanes.at(ahead, builder.mul(chunk.index, ldh))
        for v in range(vectors):
            lanes.prefetch(lanes.at(near, v * lanes.count), kind == "columns")
        k0 = builder.mul(chunk.index, INT64(CHUNK))
        k1 = builder.add(k0, INT64(CHUNK))
        k1 = builder.select(builder.icmp_signed("<", k1, k), k1, k)
        with cgutils.for_range_slice(builder, k0, k1, INT64(1), intp=INT64) as (index, _):
            step(index)
    if bias is not None:
      with builder.if_then(builder.icmp_signed(">=", mode, INT64(RELU))):
        for one in (one for row in sums for one in row):
            value = builder.load(one)
            builder.store(lanes.positive(value, value), one)
    for r, row in enumerate(sums):
        with builder.if_then(builder.icmp_signed(">", rows, INT64(r))):
            for v, one in enumerate(row):
                lanes.masked_store(builder.load(one), lanes.at(c_rows[r], v * lanes.count), masks[v])
    builder.ret_void()


def _start(lanes, sums, masks, c_rows, bias, rows, mode):
    """Fill the sums with what `mode` says."""
    builder = lanes.builder
    how = builder.and_(mode, INT64(RESUME | BIAS))
    nothing = ir.Constant(masks[0].type, None)
    with builder.if_else(builder.icmp_signed("==", how, INT64(RESUME))) as (resume, begin):
        with resume:
            for r, row in enumerate(sums):
                there = builder.icmp_signed(">", rows, INT64(r))
                for v, one in enumerate(row):
                    mask = builder.select(there, masks[v], nothing)
                    builder.store(lanes.masked_load(lanes.at(c_rows[r], v * lanes.count), mask), one)
        with begin:
            for v, mask in enumerate(masks):
                if bias is None:
                    value = lanes.zero()
                else:
                    biased = builder.icmp_signed("==", how, INT64(BIAS))
                    mask = builder.select(biased, mask, nothing)
                    value = lanes.masked_load(lanes.at(bias, v * lanes.count), mask)
                for row in sums:
                    builder.store(value, row[v])
