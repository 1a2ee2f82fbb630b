"""Random numbers that belong to a shard and an epoch, never to a rank.

A generator is made anew from (seed, purpose, shard, epoch) whenever it is wanted: no state to save for a
resume, and whoever holds a shard draws the same numbers.
"""

from __future__ import annotations

import numpy as np

from ..errors import UsageError

SHUFFLE, SPLIT, HOLD_OUT = range(3)
"""Purposes used by the data layer; a strategy or a model that draws takes a number from 16 up."""


def _bits(seed: int, purpose: int, shard: int, epoch: int) -> np.random.Philox:
    """Return the bit stream of (seed, purpose, shard, epoch)."""
    if seed < 0:
        raise UsageError(f"seed: got {seed}, expected 0 or more")
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=(purpose, shard, epoch)))


def generator(seed: int, purpose: int, shard: int = 0, epoch: int = 0) -> np.random.Generator:
    """Return the generator that belongs to a shard and an epoch.

    Parameters
    ----------
    seed : int
        The run's seed, at least 0.
    purpose : int
        What the numbers are for, so that two uses never share a stream; the data layer takes 0 to 15.
    shard, epoch : int
        What the numbers belong to.

    Raises
    ------
    UsageError
        If ``seed`` is negative; the same on every rank.
    """
    return np.random.Generator(_bits(seed, purpose, shard, epoch))


def permutation(n: int, seed: int, purpose: int, shard: int = 0, epoch: int = 0) -> np.ndarray:
    """Return a random order of 0..n-1, int64 (n,), for the same arguments as `generator`."""
    # By sorting raw 64-bit draws: numpy promises the bits of a bit generator for good, but not those of
    # Generator.permutation, so a run resumed under another numpy still draws the same batches.
    return np.argsort(_bits(seed, purpose, shard, epoch).random_raw(n)).astype(np.int64, copy=False)
