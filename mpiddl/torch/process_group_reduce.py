"""Reductions of tensors: torch's operations on mpiddl's collectives.

Sums of float32 and float64 go by the algorithm that `mpiddl.Communicator` chooses for the size and the hosts. AVG is a sum and
a division, PREMUL_SUM a product and a sum. float16 and bfloat16 are added up in float32 and rounded once: blocks of half
precision travel, so the bytes are those of a ring of half precision (alltoall, sums, all-gather). bool: a sum is "or".

Cost a rank of V bytes on P ranks: as docs/collectives.md says of the algorithm; half precision 2 (P-1)/P V.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiddl.errors import UsageError
from mpiddl.layout import ceil_div
from mpiddl.torch.process_group_tensors import HALF, Flat, numbers, words

OPS = {"SUM": MPI.SUM, "AVG": MPI.SUM, "PREMUL_SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX,
       "BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}  # fmt: skip

OF_BOOL = {"SUM": MPI.MAX, "PRODUCT": MPI.MIN, "MIN": MPI.MIN, "MAX": MPI.MAX, "BAND": MPI.BAND, "BOR": MPI.BOR,
           "BXOR": MPI.BXOR}  # fmt: skip

OF_HALF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda parts: parts.sum(0),
    "AVG": lambda parts: parts.sum(0) / len(parts),
    "PREMUL_SUM": lambda parts: parts.sum(0),
    "PRODUCT": lambda parts: parts.prod(0),
    "MIN": lambda parts: parts.amin(0),
    "MAX": lambda parts: parts.amax(0),
}
"""Of float32 arrays, one a row."""

HALF_PIECE = 1 << 22
"""Elements of half precision that travel at a time: their float32 copies from all ranks must not fill the memory."""

FEW = 4096
"""Up to here one round with all elements is faster than two with a part of them."""


class Reduction(NamedTuple):
    """An operation of torch: its name, and of PREMUL_SUM the factor, a number or a tensor."""

    name: str
    factor: Any = None


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """What ``op``, a `torch.distributed.ReduceOp`, means for ``dtype``. Local.

    Raises
    ------
    UsageError
        There is no such operation for the dtype.
    """
    found = _known(int(getattr(op, "op", op)), dtype)  # a ReduceOp has one; older versions pass it itself
    return Reduction("PREMUL_SUM", _factor(op)) if found.name == "PREMUL_SUM" else found


@cache
def _known(kind: int, dtype: torch.dtype) -> Reduction:
    name = next((name for name in OPS if hasattr(dist.ReduceOp, name) and kind == int(getattr(dist.ReduceOp, name))), "")
    known = OF_BOOL if dtype == torch.bool else OF_HALF if dtype in HALF else OPS
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if (
        name not in known
        or (name in ("BAND", "BOR", "BXOR") and not whole)
        or (name in ("AVG", "PREMUL_SUM") and whole)
        or (name in ("MIN", "MAX") and dtype.is_complex)
    ):
        words_ = "integers" if name.startswith("B") else "real numbers" if name in ("MIN", "MAX") else "floating-point numbers"
        raise UsageError(f"op: got {name or kind} for {dtype}, expected {words_ if name else 'one of ' + ', '.join(OPS)}")
    return Reduction(name)


def _factor(op: Any) -> Any:
    return op.__getstate__()[1]


def allreduce(comm: Any, flat: Flat, op: Reduction) -> None:
    """``flat`` becomes the reduction on every rank."""
    if not flat.tensor.numel():
        return
    whole = flat if op.factor is None else Flat(_scaled(flat.data, op))
    if flat.tensor.dtype in HALF:
        for part in whole.data.split(HALF_PIECE):
            _allreduce_half(comm, part, op)
    else:
        comm.Allreduce(MPI.IN_PLACE, whole.numbers, _op(flat.tensor, op))
        if op.name == "AVG":
            whole.data.div_(comm.Get_size())
    if whole is not flat:
        flat.data.copy_(whole.data)


def reduce(comm: Any, flat: Flat, op: Reduction, root: int) -> None:
    """The root's ``flat`` becomes the reduction; that of other ranks stays."""
    data = _scaled(flat.data, op)
    at_root = comm.Get_rank() == root
    if data.dtype in HALF:
        total = data if at_root else data.clone()
        for begin in range(0, total.numel(), HALF_PIECE):
            _allreduce_half(comm, total[begin : begin + HALF_PIECE], op)
    elif data.numel():
        array = numbers(data)
        comm.Reduce(MPI.IN_PLACE if at_root else array, array if at_root else None, _op(data, op), root)
        if at_root:
            _divide(data, op, comm.Get_size())
    if at_root and op.factor is not None:
        flat.data.copy_(data)


def reduce_scatter(comm: Any, blocks: torch.Tensor, mine: torch.Tensor, op: Reduction) -> None:
    """``mine`` becomes this rank's block of the reduction of all ranks' ``blocks``, which are of one size; 1-D, contiguous."""
    data = _scaled(blocks, op)
    if not mine.numel():
        return
    if data.dtype in HALF:
        mine.copy_(_reduced_block(comm, data, mine.numel(), op))
    else:
        comm.Reduce_scatter_block(numbers(data), numbers(mine), _op(data, op))
        _divide(mine, op, comm.Get_size())


def _allreduce_half(comm: Any, part: torch.Tensor, op: Reduction) -> None:
    size, n = comm.Get_size(), part.numel()
    if n <= FEW:
        every = torch.empty(size, n, dtype=part.dtype)
        comm.Allgather(words(part), words(every.view(-1)))
        part.copy_(OF_HALF[op.name](every.float()))
        return
    block = ceil_div(n, size)
    padded = torch.zeros(size * block, dtype=part.dtype)
    padded[:n] = part
    own = _reduced_block(comm, padded, block, op).to(part.dtype)
    comm.Allgather(words(own), words(padded))
    part.copy_(padded[:n])


def _reduced_block(comm: Any, blocks: torch.Tensor, n: int, op: Reduction) -> torch.Tensor:
    """This rank's block of ``n`` elements, in float32."""
    every = torch.empty(comm.Get_size(), n, dtype=blocks.dtype)
    comm.Alltoall(words(blocks), words(every.view(-1)))
    return OF_HALF[op.name](every.float())


def _op(data: torch.Tensor, op: Reduction) -> Any:
    return (OF_BOOL if data.dtype == torch.bool else OPS)[op.name]


def _scaled(data: torch.Tensor, op: Reduction) -> torch.Tensor:
    return data if op.factor is None else (data * op.factor).to(data.dtype)


def _divide(data: torch.Tensor, op: Reduction, size: int) -> None:
    if op.name == "AVG":
        data.div_(size)
