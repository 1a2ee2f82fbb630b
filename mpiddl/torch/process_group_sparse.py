"""The sum of sparse tensors (COO), such as gradients of an embedding: every rank gathers all indices and values, and adds up.

Cost a rank: two all-gathers of the non-zero elements of all ranks. The result has the union of the ranks' indices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mpiddl.errors import UsageError
from mpiddl.torch.process_group_tensors import REDUCED, words


def is_sparse(tensors: Any) -> bool:
    """Whether it is one sparse tensor on the CPU."""
    return (isinstance(tensors, list) and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor)
            and tensors[0].layout == torch.sparse_coo and tensors[0].device.type == "cpu")


def check(tensors: list[torch.Tensor], op: Any) -> None:
    """Raise a `UsageError` for another operation than SUM, or a dtype without sums."""
    if op != dist.ReduceOp.SUM:
        raise UsageError(f"op: got {op} for a sparse tensor, expected SUM, or a dense tensor: tensor.to_dense()")
    if tensors[0].dtype not in REDUCED:
        raise UsageError(f"tensor: got a sparse tensor of {tensors[0].dtype}, expected an integer, float or complex dtype")


def allreduce(comm: Any, tensor: torch.Tensor) -> None:
    """``tensor`` becomes the sum of all ranks' tensors, which have one shape; coalesced."""
    with torch.no_grad():
        own = tensor.detach().coalesce()
        counts: list[int] = comm.allgather(own._nnz())
        indices = _gathered(comm, own.indices().t().contiguous(), counts)
        values = _gathered(comm, own.values().contiguous(), counts)
        total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False).coalesce()
        tensor.copy_(total)  # of a detached one, only the detached one would change


def _gathered(comm: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The rows of all ranks, one behind the other."""
    every = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype)
    length = rows[0].numel() if len(rows) else every[:1].numel()
    comm.Allgatherv(words(rows.view(-1)), [words(every.view(-1)), [length * count for count in counts]])
    return every
