"""Composition of strategies: each one processes the gradient, and then the parameters, left by the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Placement, Replica, Step, Strategy, describe
from mpiddl.transport.comm import Comm


class Chain(Strategy):
    """``chain(a, b)`` behaves as a, then b. The first member places shards and gradient; any of them may stop the rank."""

    def __init__(self, *members: Strategy):
        for member in members[:-1]:
            if member.guesses:
                raise UsageError(f"chain: got {describe(member)} before other strategies, which would mix its provisional "
                                 "parameters; expected it as the last strategy, or ahead=0")
        summing = [describe(member) for member in members if member.sums]
        if len(summing) > 1:
            raise UsageError(f"chain: got {' and '.join(summing)}, which each sum the gradients of several ranks, expected one "
                             "of them")
        self.members = members
        self.replicated = all(member.replicated for member in members)
        for member in members[1:]:
            kind = type(member)
            if kind is not Chain and (kind.blocks, kind.needs_gradient) != (Strategy.blocks, Strategy.needs_gradient):
                raise UsageError(f"chain: got {describe(member)} after another strategy, expected it as the first one")
        self.lockstep = all(member.lockstep for member in members)
        self.guesses = members[-1].guesses
        self.sums = bool(summing)
        self.by_shard = members[0].by_shard
        self.even = members[0].even
        self.optimisers = next((member.optimisers for member in members if member.optimisers), ())

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.members))})"

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        found = [member.resolve(comm) for member in self.members]
        for strategy, _ in found:
            if not strategy.lockstep:  # other strategies would deadlock with it, or receive its messages
                raise UsageError(f"chain: got the asynchronous strategy {describe(strategy)} together with others; "
                                 "expected it without other strategies")
        return Chain(*(strategy for strategy, _ in found)), "; ".join(filter(None, (said for _, said in found)))

    def calibrate(self, comm: Comm, trial: Any) -> tuple[Strategy, str]:
        found = [member.calibrate(comm, trial) for member in self.members]
        return Chain(*(strategy for strategy, _ in found)), "; ".join(filter(None, (said for _, said in found)))

    @property
    def undecided(self) -> str:
        return " and ".join(filter(None, (member.undecided for member in self.members)))

    def check(self, size: int) -> None:
        for member in self.members:
            member.check(size)

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        return self.members[0].placement(shards, rank, size)

    def shards(self, size: int) -> int:
        return self.members[0].shards(size)

    def blocks(self, shards: int, rank: int, size: int) -> Sequence[Sequence[int]] | None:
        return self.members[0].blocks(shards, rank, size)

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        return self.members[0].memory(comm, size, dtype)

    def placed(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        return self.members[0].placed(comm, size, dtype)

    def served_from(self, comm: Comm, state: Any, replica: Replica) -> str:
        return "; ".join(filter(None, (member.served_from(comm, its, replica)
                                       for member, its in zip(self.members, state, strict=True))))

    def warm(self, size: int, dtype: np.dtype) -> None:
        for member in self.members:
            member.warm(size, dtype)

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        return "; ".join(filter(None, (member.note(comm, size, dtype) for member in self.members)))

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        found = [member.figures(comm, its, replica) for member, its in zip(self.members, state, strict=True)]
        return {name: value for part in found for name, value in part.items()}

    def init(self, comm: Comm, replica: Replica) -> Any:
        return [member.init(comm, replica) for member in self.members]

    def needs_gradient(self, comm: Comm, state: Any, replica: Replica, step: Step) -> bool:
        return self.members[0].needs_gradient(comm, state[0], replica, step)

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        first = self.members[0].start(comm, state[0], grad, part, step)  # the other members see the gradient in `combine`
        return [first, *state[1:]]

    def combine_block(self, comm: Comm, state: Any, grad: np.ndarray, number: int, step: Step) -> Any:
        return [self.members[0].combine_block(comm, state[0], grad, number, step), *state[1:]]

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        states, stop, meet, updates, rate, summed = list[Any](), False, False, 0, 1.0, False
        for member, its in zip(self.members, state, strict=True):
            combined = member.combine(comm, its, grad, replica, step)
            if not summed:  # the rate belongs to the rank's own samples
                summed = member.sums or combined.count != step.count
                rate = combined.rate if summed else rate * combined.rate
            grad, step = combined.grad, replace(step, count=combined.count)
            states.append(combined.state)
            stop, meet, updates = stop or combined.stop, meet or combined.meet, updates + combined.updates
        return Combined(grad, step.count, states, stop, updates, meet, rate)

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        return [member.mix(comm, its, replica, step) for member, its in zip(self.members, state, strict=True)]

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray | None:
        told = (member.model(comm, its, params) for member, its in zip(self.members, state, strict=True))
        return next((found for found in told if found is not None), None)

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        for member, its in zip(self.members, state, strict=True):
            member.finish(comm, its, replica)


def chain(*members: Strategy) -> Strategy:
    """Compose strategies, first to last."""
    return members[0] if len(members) == 1 else Chain(*members)
