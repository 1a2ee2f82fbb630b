"""The tile: a small block of a matrix product that stays in registers while the sum runs.

    C[r, j] = S[r, j] + sum_k A[r, k] * B[k, j]          r < rows <= ROWS,  j < cols <= VECTORS * lanes

For each k, a few vectors of B are loaded, each element of A's column is spread over a vector, and every pair is
multiplied and added: with AVX-512, 24 multiply-adds to 11 loads. On processors that work on a vector in two halves, the
last one is a half where no more columns are left: 100 columns of float32 cost 6.5 vectors, not 7. Each element of C is
one chain of multiply-adds in the order of k, whatever the tile, the blocking or the number of lanes: the bits depend on
none of these wherever the machine rounds a multiply-add once (all that have FMA do).

Matrices come as an address and a stride between rows, in elements. S is a row of biases (stride 0), a row of zeros, or
what an earlier part of the sum left behind. B is packed: row k begins at k times the number of columns rounded up to
whole vectors, and its columns behind `cols` may hold anything. Of the others, nothing outside rows x cols is touched.

References
----------
K. Goto, R. van de Geijn, Anatomy of high-performance matrix multiplication, ACM TOMS 34(3), 2008,
doi:10.1145/1356052.1356053.
F. Van Zee, R. van de Geijn, BLIS: a framework for rapidly instantiating BLAS functionality, ACM TOMS 41(3), 2015,
doi:10.1145/2764454. Of theirs: the register tile and the packing. Not theirs: no packing of A where its rows can be
read as they lie, and B packed by the first tile that uses it.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiddl.kernels.lanes import INT32, INT64, REGISTERS, UNIT, WIDTH, Lanes, emitter

VECTORS = 3
ROWS = 8 if REGISTERS == 32 else 4
"""ROWS * VECTORS sums, VECTORS parts of B and one element of A: 28 of 32 registers, or 16 of 16."""

CHUNK = 8
"""Steps of k between two rounds of prefetching; each round asks for one row of the tile's width."""

UNROLL = 2
"""Steps of k written out one after the other: 4 % faster than one (measured), no slower than four."""

_ROWS = "A lda PACK S lds C ldc k rows cols relu AHEAD ldh"
_FIRST = "A lda B ldb PACK S lds C ldc k rows cols relu AHEAD ldh"
_COLUMNS = "A lda PACK S lds C ldc k rows cols LISTED"


@intrinsic
def tile_rows(typing, like, a, lda, pack, s, lds, c, ldc, k, rows, cols, relu, ahead, ldh):
    """A tile that reads A along its rows: A[r, k] at a + r * lda + k.

    `like` is an array of the dtype. `relu` other than 0 stores max(0, sum). `ahead` is a matrix that will be read soon:
    its first k / CHUNK rows, as wide as the tile, are fetched into the second cache.
    """
    return types.void(like, *[types.int64] * 13), emitter(partial(_call, "rows"), _ROWS)


@intrinsic
def tile_first(typing, like, a, lda, b, ldb, pack, s, lds, c, ldc, k, rows, cols, relu, ahead, ldh):
    """The same, but B is read where it lies, `ldb` from row to row, and packed into `pack` on the way."""
    return types.void(like, *[types.int64] * 15), emitter(partial(_call, "first"), _FIRST)


@intrinsic
def tile_columns(typing, like, a, lda, pack, s, lds, c, ldc, k, rows, cols, listed):
    """A tile that reads A along its columns: A[r, k] at a + k * lda + r, all ROWS of them whatever `rows`.

    Column k of A belongs to row listed[k] of B (int32).

    The ROWS rows of C behind this tile are fetched for writing, for that is where the next one goes.
    """
    return types.void(like, *[types.int64] * 11), emitter(partial(_call, "columns"), _COLUMNS)


def _call(kind, lanes, **given):
    """Call the tile that has as many vectors as the columns need; where halves pay, the last one can be a half."""
    builder = lanes.builder
    unit = lanes.count * UNIT // WIDTH
    needed = builder.udiv(builder.add(given["cols"], INT64(unit - 1)), INT64(unit))
    for units in range(1, VECTORS * lanes.count // unit + 1):
        function = _function(kind, lanes, given, units * unit)
        with builder.if_then(builder.icmp_signed("==", needed, INT64(units))):
            builder.call(function, list(given.values()))


def _function(kind, lanes, given, columns):
    """The tile as a function of its own, so that registers are allotted without regard to the caller."""
    signature = ir.FunctionType(ir.VoidType(), [value.type for value in given.values()])
    name = f"mpiddl_tile_{kind}_{lanes.element}_{columns}"
    function = cgutils.get_or_insert_function(lanes.builder.module, signature, name)
    if function.is_declaration:
        function.linkage = "internal"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        _Tile(Lanes(builder, lanes.element), dict(zip(given, function.args, strict=True)), columns).write()
        builder.ret_void()
    return function


class _Tile:
    """Writes the code of one tile."""

    def __init__(self, lanes, arguments, columns):
        self.lanes = lanes
        self.builder = lanes.builder
        self.given = arguments
        self.offsets = list(range(0, columns, lanes.count))
        # Only the last vector of a row can reach behind the columns, or be a half.
        self.last = Lanes(self.builder, lanes.element, columns - self.offsets[-1])
        self.kinds = [lanes] * (len(self.offsets) - 1) + [self.last]
        self.mask = self.last.first(self.builder.sub(arguments["cols"], INT64(self.offsets[-1])))
        self.sums = [[cgutils.alloca_once(self.builder, kind.vector) for kind in self.kinds] for _ in range(ROWS)]

    def write(self):
        """Start the sums, run over k, finish and store."""
        last = self.builder.sub(self.given["rows"], INT64(1))
        rows = [self.builder.select(self.builder.icmp_signed("<", INT64(r), last), INT64(r), last) for r in range(ROWS)]
        for row, sums in zip(rows, self.sums, strict=True):
            for value, place in zip(self._load(self._line("s", row)), sums, strict=True):
                self.builder.store(value, place)
        self._run(self._heads(rows))
        if "relu" in self.given:
            self._rectify()
        for r, sums in enumerate(self.sums):
            with self.builder.if_then(self.builder.icmp_signed(">", self.given["rows"], INT64(r))):
                self._store([self.builder.load(place) for place in sums], self._line("c", INT64(r)))

    def _line(self, name, row):
        """Pointer to a row of the matrix `name`."""
        return self.lanes.at(self.given[name], self.builder.mul(row, self.given["ld" + ("h" if name == "ahead" else name)]))

    def _load(self, line):
        """The tile's vectors of a line."""
        *whole, last = (self.lanes.at(line, offset) for offset in self.offsets)
        return [*map(self.lanes.load, whole), self.last.masked_load(last, self.mask)]

    def _store(self, values, line):
        """The tile's vectors into a line."""
        *whole, last = (self.lanes.at(line, offset) for offset in self.offsets)
        for value, place in zip(values, whole, strict=False):
            self.lanes.store(value, place)
        self.last.masked_store(values[-1], last, self.mask)

    def _heads(self, rows):
        """Where each row of A begins; a row that does not exist reads another one's elements."""
        if "relu" in self.given:
            return [self._line("a", row) for row in rows]
        return [self.lanes.at(self.given["a"], r) for r in range(ROWS)]

    def _run(self, heads):
        """The loop over k, by chunks that begin with a round of prefetching."""
        builder, k = self.builder, self.given["k"]
        even = builder.mul(builder.udiv(k, INT64(UNROLL)), INT64(UNROLL))
        chunks = builder.udiv(builder.add(even, INT64(CHUNK - 1)), INT64(CHUNK))
        with cgutils.for_range(builder, chunks, intp=INT64) as chunk:
            self._prefetch(chunk.index)
            begin = builder.mul(chunk.index, INT64(CHUNK))
            end = builder.add(begin, INT64(CHUNK))
            # A known number of rounds would be unrolled by LLVM until the instructions outgrow their cache.
            end = builder.select(builder.icmp_signed("<", end, even), end, even)
            with cgutils.for_range_slice(builder, begin, end, INT64(UNROLL), intp=INT64) as (index, _):
                for u in range(UNROLL):
                    self._step(heads, builder.add(index, INT64(u)))
        with cgutils.for_range_slice(builder, even, k, INT64(1), intp=INT64) as (index, _):
            self._step(heads, index)

    def _prefetch(self, index):
        """Ask for one line of what comes next."""
        write = "ahead" not in self.given
        line = self._line("c", self.builder.add(index, INT64(ROWS))) if write else self._line("ahead", index)
        for offset in self.offsets:
            self.lanes.prefetch(self.lanes.at(line, offset), write=write)

    def _step(self, heads, k):
        """One column of A times one row of B."""
        row = k
        if "listed" in self.given:
            listed = self.builder.bitcast(self.given["listed"], INT32.as_pointer())
            row = self.builder.sext(self.builder.load(self.builder.gep(listed, [k])), INT64)
        packed = self.lanes.at(self.given["pack"], self.builder.mul(row, INT64(self.lanes.count * len(self.offsets))))
        places = [self.lanes.at(packed, offset) for offset in self.offsets]
        if "b" in self.given:
            parts = self._load(self._line("b", k))
            for kind, part, place in zip(self.kinds, parts, places, strict=True):
                kind.store(part, place)
        else:
            parts = [kind.load(place) for kind, place in zip(self.kinds, places, strict=True)]
        index = k if "relu" in self.given else self.builder.mul(k, self.given["lda"])
        for head, sums in zip(heads, self.sums, strict=True):
            spread = self.lanes.splat(self.builder.load(self.lanes.at(head, index)))
            for kind, part, place in zip(self.kinds, parts, sums, strict=True):
                own = spread if kind.count == self.lanes.count else self._lower(spread)
                self.builder.store(kind.fma(own, part, self.builder.load(place)), place)

    def _lower(self, vector):
        """The lower half of a vector, which costs no instruction."""
        return self.builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT32, self.last.count),
                                                                       list(range(self.last.count))))

    def _rectify(self):
        """max(0, sum), if asked for."""
        with self.builder.if_then(self.builder.icmp_signed("!=", self.given["relu"], INT64(0))):
            for kind, place in ((kind, place) for row in self.sums for kind, place in zip(self.kinds, row, strict=True)):
                value = self.builder.load(place)
                self.builder.store(kind.positive(value, value), place)
