"""Explicit vectors: the few LLVM instructions that the tiles are made of.

LLVM turns the same vector code into AVX-512, AVX2, NEON or whatever the machine has; what must fit the machine is the
number of lanes, for a vector wider than a register is split and spilled.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils
from numba.np.arrayobj import make_array

BIT, INT32, INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)


def _machine() -> tuple[int, int]:
    """Bytes of a vector register, and how many registers there are."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 64, 32
    if features.get("avx2"):
        return 32, 16
    return 16, 32 if features.get("neon") else 16


WIDTH, REGISTERS = _machine()


class Lanes:
    """Vectors of one element type, emitted through one builder.

    Parameters
    ----------
    builder
        Where instructions go.
    element
        LLVM's float or double.
    """

    def __init__(self, builder: ir.IRBuilder, element: ir.Type):
        self.builder = builder
        self.size = 4 if isinstance(element, ir.FloatType) else 8
        self.count = WIDTH // self.size
        self.element = element
        self.vector = ir.VectorType(element, self.count)
        self.mask = ir.VectorType(BIT, self.count)
        self._suffix = f"v{self.count}f{8 * self.size}"

    def zero(self) -> ir.Value:
        """All lanes zero."""
        return ir.Constant(self.vector, None)

    def splat(self, scalar: ir.Value) -> ir.Value:
        """The scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, self.count), ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, INT32(0))
        return self.builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(INT32, self.count), None))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z, rounded once where the machine can."""
        return self._call(f"llvm.fmuladd.{self._suffix}", self.vector, x, y, z)

    def positive(self, condition: ir.Value, value: ir.Value) -> ir.Value:
        """`value` where `condition` > 0, else zero."""
        return self.builder.select(self.builder.fcmp_ordered(">", condition, self.zero()), value, self.zero())

    def first(self, count: ir.Value) -> ir.Value:
        """The mask of the first `count` lanes (none if it is negative)."""
        lanes = ir.Constant(ir.VectorType(INT64, self.count), list(range(self.count)))
        return self.builder.icmp_signed("<", lanes, self.splat(count))

    def load(self, pointer: ir.Value) -> ir.Value:
        """A vector from memory of any alignment."""
        loaded = self.builder.load(self.builder.bitcast(pointer, self.vector.as_pointer()))
        loaded.align = self.size
        return loaded

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        """A vector to memory of any alignment."""
        stored = self.builder.store(value, self.builder.bitcast(pointer, self.vector.as_pointer()))
        stored.align = self.size

    def masked_load(self, pointer: ir.Value, mask: ir.Value) -> ir.Value:
        """The lanes of `mask` from memory, zero in the others; memory behind those is not touched."""
        # LLVM renames the intrinsic where pointers are opaque.
        name = f"llvm.masked.load.{self._suffix}.p0{self._suffix}"
        pointer = self.builder.bitcast(pointer, self.vector.as_pointer())
        return self._call(name, self.vector, pointer, INT32(self.size), mask, self.zero())

    def masked_store(self, value: ir.Value, pointer: ir.Value, mask: ir.Value) -> None:
        """The lanes of `mask` to memory; nothing else is touched."""
        name = f"llvm.masked.store.{self._suffix}.p0{self._suffix}"
        pointer = self.builder.bitcast(pointer, self.vector.as_pointer())
        self._call(name, ir.VoidType(), value, pointer, INT32(self.size), mask)

    def prefetch(self, pointer: ir.Value, write: bool) -> None:
        """Ask for a cache line; any address will do."""
        byte = ir.IntType(8).as_pointer()
        how = [INT32(int(write)), INT32(3 if write else 2), INT32(1)]
        self._call("llvm.prefetch.p0i8", ir.VoidType(), self.builder.bitcast(pointer, byte), *how)

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
        """Lanes picked from `x` (0 ...) and `y` (count ...)."""
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, self.count), lanes))

    def at(self, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
        """`pointer` moved by `offset` elements."""
        return self.builder.gep(pointer, [INT64(offset) if isinstance(offset, int) else offset])

    def _call(self, name: str, returns: ir.Type, *arguments: ir.Value) -> ir.Value:
        """An LLVM intrinsic."""
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)


def address(context, builder: ir.IRBuilder, kind, array: ir.Value, offset: ir.Value) -> ir.Value:
    """Pointer to element `offset` of a contiguous numba array."""
    return builder.gep(make_array(kind)(context, builder, array).data, [offset])
