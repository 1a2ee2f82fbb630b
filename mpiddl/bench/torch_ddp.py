"""PyTorch's DistributedDataParallel over the backend "mpiddl" against gloo: the exchange of a gradient, and whole steps.

Both groups live in one program: their ranks, threads and arrays are the same, and they take turns (`mpiddl.study.interleaved`).
"exchange" is an ``all_reduce`` of one array. "step" is forward pass, backward pass with DDP's buckets, and SGD, of a network of
square layers with about as many parameters. gloo gets the interface that joins the hosts, or the loopback interface on one
host. Nothing is measured before both have given the same sums and the same parameters.

A strategy takes part in "round": several steps of that network, one after the other, because a strategy may exchange in some of
them only. With it, `mpiddl.torch.distribute` trains the plain network. Its parameters are its own, so they are not compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpiddl.errors import MpiddlError, UsageError
from mpiddl.machine.launch import promise
from mpiddl.node.topology import neighbours
from mpiddl.strategies import of_programs
from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.transport.mpi import MpiComm, world
from mpiddl.transport.multicast.interfaces import interfaces

ELEMENTS = (100_000, 1_000_000, 10_000_000)

LAYERS = 4

ROUND = 16
"""Steps in a round."""

OURS, GLOO = "mpiddl", "gloo"

INTERFACE = "GLOO_SOCKET_IFNAME"


def run(env: Any, elements: Sequence[int] = ELEMENTS, batch: int = 32, threads: int = 1,
        seconds: float = 4.0, strategies: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows for every size, on rank 0; elsewhere none.

    Parameters
    ----------
    elements : sequence of int
        float32 elements of the exchanged array, and about the parameters of the network.
    batch : int
        Rows of each rank in a step.
    threads : int
        Of PyTorch, on every rank.
    seconds : float
        For each case.
    strategies : sequence of str
        Beside DistributedDataParallel.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    try:
        import torch
        import torch.distributed as dist

        import mpiddl.torch  # noqa: F401
    except ImportError:
        raise UsageError("torch: got no PyTorch, expected it: pip install 'mpiddl[torch]'") from None
    for name in strategies:
        of_programs.named(name)
    with world(env) as link, _groups(link) as groups:
        torch.set_num_threads(threads)
        rows: list[dict[str, Any]] = []
        for size in elements:
            rows += _rows(link, "exchange", size, _exchanges(groups, size), seconds)
            rows += _rows(link, f"step, {batch} rows", size, _steps(groups, size, batch), seconds)
            if strategies:
                rows += _rows(link, f"round of {ROUND} steps, {batch} rows", size, {
                    **_steps(groups, size, batch, ROUND), **_distributed(strategies, size, batch)}, seconds)
        dist.barrier()
        return [] if link.rank else rows


@contextmanager
def _groups(link: MpiComm) -> Iterator[dict[str, Any]]:
    """The default group, and one of gloo on the same ranks."""
    import torch.distributed as dist

    if promise(os.environ).size != link.size:
        raise UsageError("ranks: got a launcher that is unknown, expected mpiexec or srun")
    alone = len(neighbours(link).topology.nodes) == 1
    found = next((each.name for each in interfaces() if each.loopback == alone), None)
    if found is not None:
        os.environ.setdefault(INTERFACE, found)
    dist.init_process_group(OURS)
    try:
        yield {OURS: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    finally:
        dist.destroy_process_group()


def _exchanges(groups: dict[str, Any], size: int) -> dict[str, tuple[Contender, Any]]:
    import torch
    import torch.distributed as dist

    found = {}
    for name, group in groups.items():
        array = torch.empty(size)

        def write(array: Any = array) -> None:
            array.fill_(dist.get_rank() + 1.0)

        def call(array: Any = array, group: Any = group) -> None:
            dist.all_reduce(array, group=group)

        found[name] = Contender(call, write=write, read=array.sum), lambda array=array: [array]
    return found


def _steps(groups: dict[str, Any], size: int, batch: int, steps: int = 1) -> dict[str, tuple[Contender, Any]]:
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for name, group in groups.items():
        model, optimiser, rows = _network(size, batch)
        wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        parameters = [each.detach() for each in model.parameters()]
        found[name] = _training(wrapped, optimiser, rows, steps), lambda parameters=parameters: parameters
    return found


def _distributed(strategies: Sequence[str], size: int, batch: int) -> dict[str, tuple[Contender, Any]]:
    import mpiddl.torch

    found: dict[str, tuple[Contender, Any]] = {}
    for name in strategies:
        model, optimiser, rows = _network(size, batch)
        mpiddl.torch.distribute(model, optimiser, strategy=name)
        found[name] = _training(model, optimiser, rows, ROUND), None
    return found


def _network(size: int, batch: int) -> tuple[Any, Any, Any]:
    """A network of about ``size`` parameters, its optimiser, and rows that are this rank's own."""
    import torch

    width = max(1, round((size / LAYERS) ** 0.5))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    torch.manual_seed(1 + torch.distributed.get_rank())
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(batch, width)


def _training(model: Any, optimiser: Any, rows: Any, steps: int) -> Contender:
    def call() -> None:
        for _ in range(steps):
            optimiser.zero_grad()
            model(rows).square().mean().backward()
            optimiser.step()

    return Contender(call)


def _rows(link: MpiComm, what: str, size: int, contenders: dict[str, tuple[Contender, Any]],
          seconds: float) -> Iterator[dict[str, Any]]:
    import torch

    results = []
    for contender, result in contenders.values():
        contender.write()
        for _ in range(2):
            contender.call()
        if result is not None:
            results.append([each.clone() for each in result()])
    same = all(torch.allclose(mine, other, rtol=1e-4, atol=1e-6) for mine, other in zip(*results, strict=True))
    if not all(link.allgather(same)):
        raise MpiddlError(f"bench: the results of {what} differ between {' and '.join(contenders)}, so nothing was measured")
    measured = {name: contender for name, (contender, _) in contenders.items()}
    take_turns(link, measured, seconds)
    case = f"{what}, {size:.0e} float32, {neighbours(link).topology}".replace("e+0", "e")
    baseline = quantiles(measured[GLOO].seconds)[1]
    for name, contender in measured.items():
        low, median, high = quantiles(contender.seconds)
        yield {"case": case, "contender": name, "baseline": GLOO, "size_bytes": 4 * size, "seconds": median,
               "baseline_seconds": baseline, "ratio": baseline / median, "p10": low, "p90": high}
