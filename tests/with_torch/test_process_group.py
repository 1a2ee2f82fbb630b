"""Collectives of the backend "mpiddl" against numpy on the gathered data: dtypes, operations, sizes, layouts in memory."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning")]  # torch 2.14 renames calls

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
ALL = (torch.bool, *WHOLE, *REAL, *COMPLEX)

FOLD = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "BAND": np.bitwise_and,
        "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}  # fmt: skip
FOLD_BOOL = {"SUM": np.logical_or, "PRODUCT": np.logical_and}

CASES = [(op, dtype) for op in FOLD for dtype in ALL
         if not (op.startswith("B") and dtype not in (torch.bool, *WHOLE))
         and not (op not in ("SUM", "AVG") and dtype in COMPLEX)
         and not (op == "AVG" and dtype in (torch.bool, *WHOLE))]  # fmt: skip


def sizes(ranks: int) -> tuple[int, ...]:
    return 0, 1, max(1, ranks - 1), ranks, ranks + 1, 1000, 70_001


def draw(rank: int, size: int, dtype: Any, seed: int = 0) -> Any:
    """Small whole numbers, which every dtype holds, so that sums are exact."""
    found = torch.from_numpy(np.random.default_rng([rank, size, seed]).integers(0, 3, 2 * size))
    return (found[:size] + 1j * found[size:]).to(dtype) if dtype.is_complex else found[:size].to(dtype)


def wide(tensor: Any) -> np.ndarray:
    return (tensor.double() if tensor.dtype in REAL else tensor).numpy()


def spread(tensor: Any) -> Any:
    """The same numbers with gaps between them."""
    found = torch.zeros(len(tensor), 2, dtype=tensor.dtype)[:, 1]
    found.copy_(tensor)
    return found


def reduced(op: str, parts: list[Any], dtype: Any) -> Any:
    fold = (FOLD_BOOL if dtype == torch.bool else {}).get(op, FOLD[op])
    total = reduce(fold, map(wide, parts))
    return torch.from_numpy(total / len(parts) if op == "AVG" else total).to(dtype)


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-2 if found.dtype in REAL[:2] else 1e-6, atol=0)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op}-{str(dtype).removeprefix('torch.')}" for op, dtype in CASES])
def test_reductions(dist: Any, op: str, dtype: Any) -> None:
    rank, ranks, how = dist.get_rank(), dist.get_world_size(), getattr(dist.ReduceOp, op)
    for size in sizes(ranks):
        parts = [draw(other, size, dtype) for other in range(ranks)]
        wanted = reduced(op, parts, dtype)
        for layout in (torch.clone, spread):
            whole = layout(parts[rank])
            dist.all_reduce(whole, how)
            same(whole, wanted)
            root = size % ranks
            at_root = layout(parts[rank])
            dist.reduce(at_root, root, how)
            if rank == root:
                same(at_root, wanted)
            else:
                same(at_root, parts[rank])  # as it was
        block = torch.zeros(size, dtype=dtype)
        blocks = [[draw(other, size, dtype, 1 + place) for place in range(ranks)] for other in range(ranks)]
        mine = reduced(op, [theirs[rank] for theirs in blocks], dtype)
        dist.reduce_scatter(block, blocks[rank], how)
        same(block, mine)
        block.zero_()
        dist.reduce_scatter_tensor(block, torch.cat(blocks[rank]), how)
        same(block, mine)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_moves(dist: Any, dtype: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for size in sizes(ranks):
        every = [draw(other, size, dtype) for other in range(ranks)]
        root = size % ranks
        for layout in (torch.clone, spread):
            data = layout(every[rank])
            dist.broadcast(data, root)
            same(data, every[root])
            found = [layout(torch.zeros(size, dtype=dtype)) for _ in range(ranks)]
            dist.all_gather(found, layout(every[rank]))
            for mine, theirs in zip(found, every, strict=True):
                same(mine, theirs)
            mine = layout(torch.zeros(size, dtype=dtype))
            dist.scatter(mine, [layout(each) for each in every] if rank == root else None, root)
            same(mine, every[rank])
            found = [layout(torch.zeros(size, dtype=dtype)) for _ in range(ranks)]
            dist.gather(layout(every[rank]), found if rank == root else None, root)
            for mine, theirs in zip(found, every, strict=True):
                same(mine, theirs if rank == root else torch.zeros_like(theirs))
        whole = torch.zeros(ranks * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, every[rank])
        same(whole, torch.cat(every))
        whole = torch.zeros(ranks, size, dtype=dtype)
        whole[rank] = every[rank]
        dist.all_gather_into_tensor(whole, whole[rank])  # in place
        same(whole, torch.stack(every))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_all_to_all(dist: Any, dtype: Any) -> None:
    """Rank r sends r + q rows to rank q."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for size in (0, 1, 300):
        counts = [(rank + other) * size for other in range(ranks)]
        parts = [[draw(a * ranks + b, (a + b) * size, dtype) for b in range(ranks)] for a in range(ranks)]
        wanted = [parts[other][rank] for other in range(ranks)]
        found = [torch.zeros(count, dtype=dtype) for count in counts]
        dist.all_to_all(found, [spread(part) for part in parts[rank]])
        for mine, theirs in zip(found, wanted, strict=True):
            same(mine, theirs)
        whole = torch.zeros(sum(counts), dtype=dtype)
        dist.all_to_all_single(whole, torch.cat(parts[rank]), counts, counts)
        same(whole, torch.cat(wanted))
    square = torch.arange(ranks * 6).view(2 * ranks, 3) + 1000 * rank
    found = torch.zeros_like(square)
    dist.all_to_all_single(found, square)
    same(found, torch.cat([torch.arange(6).view(2, 3) + 6 * rank + 1000 * other for other in range(ranks)]))


def test_shapes_of_tensors(dist: Any) -> None:
    """Scalars, transposed matrices, conjugates, views, and parts of different lengths."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == ranks * (ranks - 1) / 2
    turned = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(turned)
    same(turned, ranks * torch.arange(6.0).view(2, 3).t())
    conjugate = torch.tensor([1 + 2j]).conj()
    dist.group.WORLD.allreduce([conjugate]).wait()  # dist.all_reduce refuses it
    assert conjugate.item() == ranks * (1 - 2j)
    uneven = [torch.zeros(2 + other) for other in range(ranks)]
    dist.all_gather(uneven, torch.full((2 + rank,), float(rank)))
    for other, part in enumerate(uneven):
        same(part, torch.full((2 + other,), float(other)))
    pieces = [torch.full((1 + other,), float(rank)) for other in range(ranks)]
    mine = torch.zeros(1 + rank)
    dist.reduce_scatter(mine, pieces)
    same(mine, torch.full((1 + rank,), ranks * (ranks - 1) / 2))


def test_coalesced_and_objects(dist: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    several = [torch.full((3,), 1.0), torch.full((2, 2), 2, dtype=torch.int64), torch.full((5,), 3.0)]
    with dist._coalescing_manager():
        for each in several[:1] + several[2:]:
            dist.all_reduce(each)
    dist.all_reduce_coalesced(several[1:2])
    for number, each in enumerate(several, 1):
        same(each, torch.full_like(each, number * ranks))
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": other, "text": "x" * other} for other in range(ranks)]
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, ranks - 1)
    assert told == [f"from {ranks - 1}"]


def test_factor_and_rounding(dist: Any) -> None:
    """PREMUL_SUM multiplies first; half precision rounds the sum once, not each of its steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    scaled = torch.full((4,), rank + 1.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    same(scaled, torch.full((4,), ranks * (ranks + 1) / 4))
    big = torch.full((5000,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)  # 2048 + 1 is no float16
    dist.all_reduce(big)
    same(big, torch.full((5000,), 2048.0 + ranks - 1).half())


BAD = {
    "op": lambda dist, ranks: dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND),
    "op: got AVG": lambda dist, ranks: dist.all_reduce(torch.zeros(2, dtype=torch.int32), dist.ReduceOp.AVG),
    "layout": lambda dist, ranks: dist.broadcast(torch.zeros(2).to_sparse(), 0),
    "meta": lambda dist, ranks: dist.all_reduce(torch.zeros(2, device="meta")),
    "tensor_list": lambda dist, ranks: dist.all_gather([torch.zeros(2)] * (ranks + 1), torch.zeros(2)),
    "output": lambda dist, ranks: dist.all_gather_into_tensor(torch.zeros(2 * ranks + 1), torch.zeros(2)),
    "input": lambda dist, ranks: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * ranks + 1)),
    "split": lambda dist, ranks: dist.all_to_all_single(torch.zeros(2), torch.zeros(2), [3] * ranks, [2] + [0] * (ranks - 1)),
    "tag": lambda dist, ranks: dist.isend(torch.zeros(2), 0, tag=-1),
    "split_group": lambda dist, ranks: dist.group.WORLD.split_group([0]),
    "device": lambda dist, ranks: dist.group.WORLD._get_backend(torch.device("cuda")),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_arguments(dist: Any, words: str) -> None:
    """Each is refused at once, with what was expected; the group goes on."""
    ranks = dist.get_world_size()
    kind = RuntimeError if words == "device" else ValueError  # what torch expects there
    with pytest.raises(kind, match=f"{words}.*expected"):
        BAD[words](dist, ranks)
    total = torch.ones(3)
    dist.all_reduce(total)
    same(total, torch.full((3,), float(ranks)))
