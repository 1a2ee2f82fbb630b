"""Short trainings on the digits, on virtual ranks, and how far apart their results are."""

from __future__ import annotations

import numpy as np

import mpiddl
from mpiddl.transport import virtual

JOB = {"epochs": 3, "batch": 60, "rate": 0.02, "log_every": 7, "quiet": True, "dtype": "float64"}


def weights(result):
    return np.concatenate([array.ravel() for array in result.params.values()])


def on_virtual_ranks(size, strategy, **settings):
    return virtual.run(size, lambda comm: mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **{**JOB, **settings}))


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


RULES = ["asgd", "staleness-aware", "dc-asgd-c", "dc-asgd-a", "dc-asgd-momentum", "dana", "ddc-asgd",
         "ddc-asgd-literal"]


def settings(rule, **more):
    return {**JOB, "optimiser": "nesterov", "rate": 0.01, "strategy": rule, **more}
