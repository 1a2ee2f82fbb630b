"""Strategies that mix parameters, without a model: random walks instead of gradients."""

from __future__ import annotations

import numpy as np

from mpiddl.strategies import Replica, Step
from mpiddl.transport import virtual

SIZE = 40


def mixed(strategy, size, steps, given, tensors=(), moments=()):
    """Of each rank: parameters after each step, the last ones, model, state, meter; updates are ``given(r, t)``."""

    def program(comm):
        replica = Replica(given(comm.rank, 0), {name: given(comm.rank, 0) for name in moments}, tensors=tensors)
        state, seen = strategy.init(comm, replica), []
        for index in range(steps):
            replica.params += given(comm.rank, index + 1)
            state = strategy.mix(comm, state, replica, Step(index, 1, size, 0.1 / (1 + index), steps))
            seen.append(replica.params.copy())
        model = strategy.model(comm, state, replica.params)
        strategy.finish(comm, state, replica)
        return np.array(seen), replica.params.copy(), model, state, comm.meter

    return virtual.run(size, program)


def walks(seed=0, scale=0.1):
    return lambda rank, step: np.random.default_rng([seed, rank, step]).standard_normal(SIZE) * (scale if step else 1)
