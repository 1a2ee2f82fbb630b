"""Explicit vectors: the few LLVM instructions that the kernels are made of.

LLVM turns the same vector code into AVX-512, AVX2, NEON or whatever the machine has; what must fit the machine is the
number of lanes, for a vector wider than a register is split in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

INT32, INT64 = ir.IntType(32), ir.IntType(64)


def _registers() -> tuple[int, int]:
    """Bytes of a vector register of the processor that numba compiles for, and how many of them there are."""
    # NUMBA_CPU_FEATURES may ask for less than this machine has, for the sake of others that share the cache.
    chosen = config.CPU_FEATURES
    features = (binding.get_host_cpu_features().flatten() if chosen is None else chosen).split(",")
    if "+avx512f" in features:
        return 64, 32
    if "+avx2" in features:
        return 32, 16
    return 16, 32 if "+neon" in features else 16


WIDTH, REGISTERS = _registers()

HALVING = ("znver4",)
"""Processors that work on a vector of 512 bits in two halves: half of one costs half as much."""

UNIT = WIDTH // 2 if WIDTH == 64 and (config.CPU_NAME or binding.get_host_cpu_name()) in HALVING else WIDTH
"""Bytes of the smallest vector that costs less than a larger one."""


class Lanes:
    """Vectors of one element type, written through one builder.

    Parameters
    ----------
    builder
        Where instructions go.
    element
        LLVM's float or double.
    count
        Elements of a vector; by default as many as a register holds.
    """

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, count: int | None = None):
        self.builder = builder
        self.element = element
        self.size = 4 if isinstance(element, ir.FloatType) else 8
        self.count = count or WIDTH // self.size
        self.vector = ir.VectorType(element, self.count)
        self._suffix = f"v{self.count}f{8 * self.size}"

    def constant(self, value: float) -> ir.Value:
        """The number in every lane."""
        return ir.Constant(self.vector, [float(value)] * self.count)

    def splat(self, scalar: ir.Value) -> ir.Value:
        """The scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, self.count), ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, INT32(0))
        return self.shuffle(single, undefined, [0] * self.count)

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: Iterable[int]) -> ir.Value:
        """Lanes picked from `x` (0 ...) and `y` (count ...)."""
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, self.count), list(lanes)))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z, rounded once where the machine can."""
        return self._intrinsic(f"llvm.fmuladd.{self._suffix}", self.vector, x, y, z)

    def rotated(self, vector: ir.Value, span: int) -> ir.Value:
        """Lane i from lane i + span, round the end."""
        return self.shuffle(vector, vector, [(i + span) % self.count for i in range(self.count)])

    def fold(self, vector: ir.Value, combine: Callable) -> ir.Value:
        """All lanes combined into each, by halves: the order is the same on every machine."""
        span = self.count // 2
        while span:
            vector = combine(vector, self.rotated(vector, span))
            span //= 2
        return vector

    def lane(self, vector: ir.Value, index: int = 0) -> ir.Value:
        """One lane as a scalar."""
        return self.builder.extract_element(vector, INT32(index))

    def positive(self, condition: ir.Value, value: ir.Value) -> ir.Value:
        """`value` where `condition` > 0 or is not a number, else zero: a broken network must not look sound."""
        zero = self.constant(0)
        return self.builder.select(self.builder.fcmp_unordered(">", condition, zero), value, zero)

    def first(self, count: ir.Value) -> ir.Value:
        """The mask of the first `count` lanes (none if it is negative)."""
        lanes = ir.Constant(ir.VectorType(INT64, self.count), list(range(self.count)))
        return self.builder.icmp_signed("<", lanes, self.splat(count))

    def at(self, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
        """`pointer` moved by `offset` elements."""
        return self.builder.gep(pointer, [INT64(offset) if isinstance(offset, int) else offset])

    def load(self, pointer: ir.Value) -> ir.Value:
        """A vector from memory of any alignment."""
        loaded = self.builder.load(self._vectors(pointer))
        loaded.align = self.size
        return loaded

    def store(self, value: ir.Value, pointer: ir.Value, *, past: bool = False) -> None:
        """A vector to memory of any alignment; `past` the caches, to the boundary of a vector."""
        stored = self.builder.store(value, self._vectors(pointer))
        stored.align = self.count * self.size if past else self.size
        if past:
            stored.set_metadata("nontemporal", self.builder.module.add_metadata([INT32(1)]))

    def masked_load(self, pointer: ir.Value, mask: ir.Value, other: float = 0) -> ir.Value:
        """The lanes of `mask` from memory, `other` in the rest; memory behind those is not touched."""
        # LLVM renames the intrinsic by itself where pointers are opaque.
        name = f"llvm.masked.load.{self._suffix}.p0{self._suffix}"
        where = self._vectors(pointer)
        return self._intrinsic(name, self.vector, where, INT32(self.size), mask, self.constant(other))

    def masked_store(self, value: ir.Value, pointer: ir.Value, mask: ir.Value) -> None:
        """The lanes of `mask` to memory; nothing else is touched."""
        name = f"llvm.masked.store.{self._suffix}.p0{self._suffix}"
        self._intrinsic(name, ir.VoidType(), value, self._vectors(pointer), INT32(self.size), mask)

    def prefetch(self, pointer: ir.Value, *, write: bool) -> None:
        """Ask for a cache line, into the first cache to write, into the second to read; any address will do."""
        byte = self.builder.bitcast(pointer, ir.IntType(8).as_pointer())
        how = INT32(int(write)), INT32(3 if write else 2), INT32(1)
        self._intrinsic("llvm.prefetch.p0i8", ir.VoidType(), byte, *how)

    def _vectors(self, pointer: ir.Value) -> ir.Value:
        """`pointer` as one to vectors."""
        return self.builder.bitcast(pointer, self.vector.as_pointer())

    def _intrinsic(self, name: str, returns: ir.Type, *arguments: ir.Value) -> ir.Value:
        """One of LLVM's own functions."""
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)


@intrinsic
def base(typing, array):
    """Address of a contiguous array's first element.

    Kernels hand addresses to intrinsics, in bytes: numba counts references, atomically, wherever arrays are passed on.
    """

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(make_array(signature.args[0])(context, builder, arguments[0]).data, INT64)

    return types.int64(array), generate


@intrinsic
def copy(typing, target, source, nbytes):
    """Bytes from one address to another."""

    def write(context, builder, signature, args):
        target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], INT64(1))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), write


@intrinsic
def lanes_of(typing, array):
    """How many elements of `array` a vector holds, as a constant: dividing by it is then a shift."""
    lanes = WIDTH * 8 // array.dtype.bitwidth
    return types.int64(array), lambda context, builder, signature, arguments: INT64(lanes)


@intrinsic
def unit_of(typing, array):
    """How many elements of `array` a `UNIT` holds, as a constant."""
    lanes = UNIT * 8 // array.dtype.bitwidth
    return types.int64(array), lambda context, builder, signature, arguments: INT64(lanes)


@intrinsic
def size_of(typing, array):
    """Bytes of an element of `array`, as a constant."""
    size = array.dtype.bitwidth // 8
    return types.int64(array), lambda context, builder, signature, arguments: INT64(size)


@intrinsic
def least_of(typing, array):
    """The smallest normal number of the dtype of `array`, as a constant."""
    least = {32: 2.0**-126, 64: 2.0**-1022}[array.dtype.bitwidth]

    def generate(context, builder, signature, arguments):
        return ir.Constant(context.get_data_type(signature.return_type), least)

    return array.dtype(array), generate


def emitter(write: Callable, names: str, count: Callable[[int], int] | None = None) -> Callable:
    """Code of an intrinsic whose first argument is an array that tells the element type, and the rest are int64.

    ``write(lanes, **arguments)`` gets the rest by name; those in capitals, which are addresses, as pointers. What it
    returns, a tuple of values or nothing, the intrinsic returns. ``count(size)`` says how many elements of that many
    bytes a vector has, if not as many as a register.
    """

    def generate(context, builder, signature, arguments):
        bits = signature.args[0].dtype.bitwidth
        lanes = Lanes(builder, context.get_data_type(signature.args[0].dtype), count and count(bits // 8))
        pointer = lanes.element.as_pointer()
        given = {
            name.lower(): builder.inttoptr(value, pointer) if name.isupper() else value
            for name, value in zip(names.split(), arguments[1:], strict=True)
        }
        values = write(lanes, **given)
        if values is None:
            return context.get_dummy_value()
        return context.make_tuple(builder, signature.return_type, values)

    return generate
