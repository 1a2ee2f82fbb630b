"""Groups of the backend "mpiddl": asynchronous operations, messages, subgroups, and the programs that torch builds on them."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]


def total(ranks: int) -> float:
    return ranks * (ranks - 1) / 2


def test_operations_end_in_order(dist: Any) -> None:
    """Each result is the next one's argument, without a wait in between."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, ended, works = torch.full((70_000,), float(rank == 0)), [], []

    def end(number: int) -> None:
        ended.append(all(work.is_completed() for work in works[: number + 1]))

    for number in range(30):
        work = dist.all_reduce(data, async_op=True) if number % 3 else dist.broadcast(data, 0, async_op=True)
        work.get_future().add_done_callback(lambda _, number=number: end(number))
        works.append(work)
    works[-1].wait()
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    assert works[-1].result()[0] is data
    assert data[0] == data[-1] == float(ranks) ** 20 or ranks > 2
    torch.futures.wait_all([work.get_future() for work in works])
    assert ended == [True] * 30


def test_callbacks_may_communicate(dist: Any) -> None:
    """A callback issues a collective and waits for it, and for one that was issued before, as PowerSGD does."""
    ranks = dist.get_world_size()
    first, second = torch.ones(10), torch.ones(10)
    work = dist.all_reduce(first, async_op=True)
    behind = dist.all_reduce(second, async_op=True).get_future()

    def then(future: Any) -> Any:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0] + behind.wait()[0]

    assert work.get_future().then(then).wait().tolist() == [float(ranks**2 + ranks)] * 10


def test_a_failure_stays_with_its_work(dist: Any) -> None:
    """An operation that fails on all ranks raises in ``wait`` and in its future; the next one goes on."""
    group = dist.group.WORLD

    def fails() -> None:
        raise RuntimeError("told")

    work = group._put(fails, "allreduce", [], True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="told"):
        work.wait()
    with pytest.raises(RuntimeError, match="told"):
        future.wait()
    assert isinstance(work.exception(), RuntimeError)
    data = torch.ones(2)
    dist.all_reduce(data)
    assert data[0] == dist.get_world_size()


def test_messages(dist: Any) -> None:
    """All ranks receive first; then from any source; then with tags that cross; more than fits into the library's buffers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for size in (0, 1, 1 << 20):
        came = torch.zeros(size, 2)[:, 0]
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, came, left),
                                        dist.P2POp(dist.isend, torch.full((size, 3), float(rank))[:, 1], right)])
        for work in works:
            work.wait()
        assert (came == left).all()
    works = [dist.isend(torch.tensor([10.0 * tag + rank]), right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        one = torch.zeros(1)
        assert dist.recv(one, left, tag=tag) == left
        assert one.item() == 10.0 * tag + left
    for work in works:
        work.wait()
    if rank:
        dist.send(torch.tensor([rank]), 0)
    else:
        found = {}
        for _ in range(1, ranks):
            number = torch.zeros(1, dtype=torch.int64)
            source = dist.recv(number)
            found[source] = number.item()
        assert found == {other: other for other in range(1, ranks)}


@pytest.mark.mpi(min_size=2)
def test_messages_go_on_while_the_program_computes(dist: Any) -> None:
    """Rank 0 sends more than the library buffers and calls torch no more until rank 1 has it."""
    from mpi4py import MPI

    rank, size = dist.get_rank(), 1 << 22
    if rank == 0:
        work, over = dist.isend(torch.ones(size), 1), threading.Event()
        work.get_future().add_done_callback(lambda _: over.set())
        assert over.wait(100)
    elif rank == 1:
        data = torch.zeros(size)
        dist.recv(data, 0)
        assert data.sum() == size
    MPI.COMM_WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_message_that_is_too_long_or_never_comes(dist: Any) -> None:
    from mpi4py import MPI

    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.ones(10), 1)
    elif rank == 1:
        with pytest.raises(RuntimeError, match=r"recv: got .* rank 0, expected a message of at most 12 bytes"):
            dist.recv(torch.zeros(3), 0)
        work = dist.irecv(torch.zeros(3), 0, tag=5)
        with pytest.raises(RuntimeError, match=r"recv: got no message from rank 0 in 0\.2 s, expected the matching call"):
            work.wait(timedelta(seconds=0.2))
    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=5)


@pytest.mark.mpi(min_size=2)
def test_monitored_barrier(dist: Any) -> None:
    """It passes; then it names the ranks that have not come."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    group.monitored_barrier()
    if rank == 0:
        others = ", ".join(map(str, range(1, ranks)))
        with pytest.raises(RuntimeError, match=rf"Ranks? {others} failed to pass monitoredBarrier"):
            group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)


def test_subgroups(dist: Any) -> None:
    """Overlapping groups, in the order of their ranks; ranks that are in none; groups made by their members alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {(first, second): dist.new_group([first, second] if first != second else [first])
              for first in range(ranks) for second in range(first, ranks)}
    for members, group in groups.items():
        if rank in members:
            data = torch.tensor([float(rank)])
            dist.all_reduce(data, group=group)
            assert data.item() == sum(set(members))
            assert dist.get_group_rank(group, rank) == sorted(set(members)).index(rank)
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
    mine = [rank - rank % 2, rank - rank % 2 + 1]
    local = dist.new_group([each for each in mine if each < ranks], use_local_synchronization=True)
    data = torch.ones(1)
    dist.all_reduce(data, group=local)
    assert data.item() == len([each for each in mine if each < ranks])
    dist.destroy_process_group(local)
    if torch.__version__ >= (2, 13):  # 2.5 tells the group nothing
        with pytest.raises(RuntimeError, match="allreduce: got a process group that was destroyed, expected"):
            local.allreduce([data])


def test_compared_calls(dist: Any) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL calls that differ are an error on all ranks, and not a hang."""
    rank, before = dist.get_rank(), dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.all_reduce(torch.ones(3))
        if dist.get_world_size() > 1:
            with pytest.raises(RuntimeError, match=r"allreduce.*got .*float32\[4\].* on ranks \[1.*expected .*float32\[3\]"):
                dist.all_reduce(torch.ones(4 if rank else 3))
    finally:
        dist.set_debug_level(before)


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(12, 31), torch.nn.Tanh(), torch.nn.Linear(31, 30), torch.nn.Linear(30, 3))


def train(model: Any, make: Any, rows: Any, steps: int = 4) -> Any:
    """Some steps on ``rows(step)``; returns the parameters."""
    optimiser = make(model.parameters())
    for step in range(steps):
        optimiser.zero_grad()
        model(rows(step)).square().mean().backward()
        optimiser.step()
    return flat(model)


def flat(model: Any) -> Any:
    wholes = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().reshape(-1) for each in wholes])


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.01)


def batch(step: int, ranks: int) -> Any:
    return torch.randn(ranks, 5, 12, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("how", ["plain", "views", "unused", "compiled", "fp16", "bf16", "powersgd", "zero", "fsdp",
                                 "fully_shard"])
def test_training_equals_one_rank_with_the_whole_batch(dist: Any, how: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    wanted = train(network(), adam, lambda step: batch(step, ranks).flatten(0, 1))
    model, make = network(), adam
    if how == "fsdp":
        fsdp = pytest.importorskip("torch.distributed.fsdp")
        model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif how == "fully_shard":
        fsdp = pytest.importorskip("torch.distributed.fsdp")
        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("this torch has no fully_shard")
        mesh = pytest.importorskip("torch.distributed.device_mesh").init_device_mesh("cpu", (ranks,))
        model = fsdp.fully_shard(model, mesh=mesh)
    else:
        options = {"views": {"gradient_as_bucket_view": True}, "unused": {"find_unused_parameters": True}}.get(how, {})
        model = DistributedDataParallel(model, **{"bucket_cap_mb": 0.003 if how != "compiled" else 25} | options)
        if how == "compiled":
            model = torch.compile(model, backend="aot_eager")  # which needs no compiler of C++
        if how in ("fp16", "bf16"):
            try:
                model.register_comm_hook(None, getattr(default_hooks, f"{how}_compress_hook"))
            except TypeError as error:  # before torch 2.14, of every backend without NCCL
                pytest.skip(str(error))
        if how == "powersgd":
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 8, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
        if how == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            def make(parameters: Any) -> Any:
                return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)

    found = train(model, make, lambda step: batch(step, ranks)[rank])
    if how == "fsdp":
        with fsdp.FullyShardedDataParallel.summon_full_params(model):
            found = flat(model)
    if how == "powersgd":  # low rank is no equality, but the ranks agree
        every = [torch.zeros_like(found) for _ in range(ranks)]
        dist.all_gather(every, found)
        assert all(torch.equal(each, found) for each in every)
    else:
        loose = how in ("fp16", "bf16")
        torch.testing.assert_close(found, wanted, rtol=0.2 if loose else 1e-4, atol=0.03 if loose else 1e-5)


def test_uneven_steps(dist: Any) -> None:
    """`join`: rank r has r + 2 batches; ``no_sync`` adds up gradients before one exchange."""
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network(), bucket_cap_mb=0.003)
    with model.join():
        train(model, adam, lambda step: batch(step, ranks)[rank], steps=rank + 2)
    optimiser = adam(model.parameters())
    with model.no_sync():
        model(batch(0, ranks)[rank]).square().mean().backward()
    model(batch(1, ranks)[rank]).square().mean().backward()
    optimiser.step()
    mine = flat(model)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    torch.testing.assert_close(mine, theirs)


def test_groups_are_found_by_name(dist: Any) -> None:
    """Functional collectives, meshes and distributed tensors, compiled or not."""
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    mesh = pytest.importorskip("torch.distributed.device_mesh").init_device_mesh("cpu", (1, dist.get_world_size()),
                                                                                mesh_dim_names=("a", "b"))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def add(data: Any) -> Any:
        return functional.all_reduce(2 * data, "sum", dist.group.WORLD) + 1

    assert add(torch.ones(3)).tolist() == [2.0 * ranks + 1] * 3
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, dist.group.WORLD)
    assert gathered.tolist() == [float(other) for other in range(ranks) for _ in range(2)]
    part = functional.reduce_scatter_tensor(torch.ones(2 * ranks), "sum", 0, mesh.get_group("b"))
    assert part.tolist() == [float(ranks)] * 2


def test_again(dist: Any) -> None:
    """A program may end its groups and begin again; copies of a group's state stay its own."""
    for seconds in (5, 600):
        dist.destroy_process_group()
        dist.init_process_group("mpiddl", timeout=timedelta(seconds=seconds))
        data = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(data)
        assert data[0] == total(dist.get_world_size())
        assert copy.copy(dist.group.WORLD.timeout) == timedelta(seconds=seconds)
