"""Training on a transport that only moves messages: all else is written once, above it."""

from __future__ import annotations

import numpy as np
import pytest
from harness import queue_transport

import mpiddl
from mpiddl.transport import virtual


@pytest.mark.parametrize("strategy", ["ring", "two-step", "auto", "local-sgd:period=4", "delayed", "gossip:graph=ring"])
def test_a_run_has_the_weights_of_virtual_ranks(strategy):
    def weights(comm):
        found = mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, max_steps=20, quiet=True)
        return np.concatenate([array.ravel() for array in found.params.values()])

    ours, virtually = queue_transport.run(3, weights), virtual.run(3, weights, [0, 1, 2])
    np.testing.assert_allclose(ours, virtually, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["asgd", "ddc-asgd", "gossip:pace=own"])
def test_ranks_at_their_own_pace(strategy):
    def accuracy(comm):
        return mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, epochs=3, quiet=True).summary["test_accuracy"]

    assert min(queue_transport.run(3, accuracy)) > 0.8
