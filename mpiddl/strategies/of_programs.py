"""Strategies for programs that compute one gradient for each batch, with a model of their own."""

from __future__ import annotations

from mpiddl.errors import UsageError
from mpiddl.strategies import Strategy, make_strategy
from mpiddl.transport.comm import Comm


def named(name: str) -> Strategy:
    """The strategy of that name.

    Raises
    ------
    UsageError
        There is none; or it needs more than one gradient for each batch.
    """
    strategy = make_strategy(name)
    if strategy.by_shard or type(strategy).blocks is not Strategy.blocks or type(strategy).shards is not Strategy.shards:
        raise UsageError(f"strategy: got {strategy!r}, which needs the gradients of single blocks of rows; a program computes "
                         "one gradient for each batch. Expected another one, such as auto or multicast-allreduce")
    return strategy


def resolved(name: str, comm: Comm) -> Strategy:
    """The strategy of that name, for these ranks.

    Raises
    ------
    UsageError
        As `named`; or it does not fit these ranks, or needs ranks that only serve. On every rank.

    Communication
    -------------
    Collective.
    """
    strategy = named(name)
    if comm.size == 1:
        return strategy
    strategy.check(comm.size)
    strategy, _ = strategy.resolve(comm)
    if any(strategy.placement(comm.size, rank, comm.size).serves for rank in range(comm.size)):
        raise UsageError(f"strategy: got {name!r}, which needs ranks that only serve; expected a strategy in which every rank "
                         "runs the program, such as one with communication=one-sided")
    return strategy
