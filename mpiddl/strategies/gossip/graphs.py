"""Communication graphs of gossip: the mixing matrix of each round, and a rank's part of it.

The matrix W of a round has shape (P, P). After the round the parameters of rank i are the sum of W[i, j] times those of rank j.
Rows and columns add up to 1 (doubly stochastic), which keeps the mean. Over its rounds a graph connects all ranks.

==============  ==================================  =============================================
graph           symmetric: pairs average            directed: rank i receives from
==============  ==================================  =============================================
ring            neighbours, alternating             i - 1
exponential     i and i xor 2^k, k alternating      i - 2^k
matching        random pairs                        its random partner
complete        all ranks                           the previous rank in a random circle
==============  ==================================  =============================================

A rank without a partner skips the round. ``matching`` needs an even number of ranks.
Communication: none; every rank computes the same rounds.
Sources: the exponential graph, one peer a round, Assran et al., ICML 2019, arXiv:1811.10792, section 3 and appendix A; the
exact mean after one cycle with a power of two of ranks, Ying et al., NeurIPS 2021, arXiv:2110.13363; doubly
stochastic weights, Lian et al., NIPS 2017, arXiv:1705.09056, section 3.
"""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

import numpy as np

from mpiddl.data.draws import permutation
from mpiddl.errors import UsageError

GRAPHS = RING, EXPONENTIAL, MATCHING, COMPLETE = "ring", "exponential", "matching", "complete"
DIRECTIONS = SYMMETRIC, PULL, PUSH = "symmetric", "pull", "push"

ORDER = 20
"""Purpose of the generator that draws orders of ranks (`mpiddl.data.draws`)."""

EXACT = 1e-9
"""Tolerance for the sum of a row or column of weights, which must be 1."""


class Hood(NamedTuple):
    """A rank's part of a round.

    own : the weight of its own parameters.
    sources : weight of each rank that this rank receives from.
    targets : weight of each rank that this rank sends to.
    uniform : number of ranks that take the mean of theirs, the first ones; 0: the other fields tell the weights.
    """

    own: float
    sources: dict[int, float]
    targets: dict[int, float]
    uniform: int = 0


def hood(weights: np.ndarray, rank: int, symmetric: bool) -> Hood:
    """The part of ``rank`` in a round with the mixing matrix ``weights``.

    Examples
    --------
    >>> hood(np.array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]), 0, symmetric=True)
    Hood(own=0.5, sources={1: 0.5}, targets={1: 0.5}, uniform=0)
    """
    if symmetric and (weights == weights[0, 0]).all():
        return everybody(len(weights))
    sources, targets = ({other: weight for other, weight in enumerate(line.tolist()) if weight and other != rank}
                        for line in (weights[rank], weights[:, rank]))  # fmt: skip
    return Hood(float(weights[rank, rank]), sources, targets)


def everybody(size: int) -> Hood:
    """A round in which all ranks take the mean of the first ``size`` ranks."""
    return Hood(1 / size, {}, {}, size)


def weights(graph: Any, size: int, number: int, symmetric: bool = True, seed: int = 0) -> np.ndarray:
    """The mixing matrix of round ``number``.

    Parameters
    ----------
    graph : str or array_like
        One of `GRAPHS`, or matrices of shape (size, size) or (rounds, size, size); successive rounds use them cyclically.
    size, number : int
        Number of ranks, and number of the round.
    symmetric : bool
        True: pairs of a named graph average; False: each rank receives from one rank and sends to another one.
    seed : int
        Seed of the random orders.

    Returns
    -------
    ndarray, shape (size, size), float64

    Examples
    --------
    >>> weights("exponential", 4, 1, symmetric=False)
    array([[0.5, 0. , 0.5, 0. ],
           [0. , 0.5, 0. , 0.5],
           [0.5, 0. , 0.5, 0. ],
           [0. , 0.5, 0. , 0.5]])
    """
    if not isinstance(graph, str):
        rounds = rounds_of(graph)
        return rounds[number % len(rounds)]
    if size == 1 or (graph == COMPLETE and symmetric):
        return np.full((size, size), 1 / size)
    heard = _peers(graph, size, number, symmetric, seed)
    mixing = np.eye(size) * 0.5
    mixing[np.arange(size), heard] += 0.5
    return mixing


def _peers(graph: str, size: int, number: int, symmetric: bool, seed: int) -> np.ndarray:
    """The rank that each rank receives from, itself if it skips the round: a permutation, int64 (size,)."""
    ranks = np.arange(size)
    if graph in (MATCHING, COMPLETE):
        order = permutation(size, seed, ORDER, epoch=number)
        places = np.argsort(order)
        return order[np.where(places ^ 1 < size, places ^ 1, places)] if graph == MATCHING else order[places - 1]
    if graph == RING and symmetric:
        first = np.where((size % 2 == 1) & (ranks == size - 1), 2, ranks % 2)  # colours of pairs (i, i + 1)
        begins = (first == number % (2 + size % 2)) & (size > 1)
        return np.where(begins, (ranks + 1) % size, np.where(np.roll(begins, 1), ranks - 1, ranks)) % size
    step = 1 if graph == RING else 1 << number % max((size - 1).bit_length(), 1)
    return np.where(ranks ^ step < size, ranks ^ step, ranks) if symmetric else (ranks - step) % size


def check(graph: Any, size: int, symmetric: bool = True) -> None:
    """Raise a `UsageError` unless ``graph`` is valid for ``size`` ranks.

    Raises
    ------
    UsageError
        An unknown name; a matching of an odd number of ranks; matrices of a wrong shape, matrices that are not doubly
        stochastic, not symmetric with ``symmetric``, or that do not connect all ranks.

    Examples
    --------
    >>> check(np.eye(2), 2)
    Traceback (most recent call last):
        ...
    mpiddl.errors.UsageError: graph: got weights that do not connect rank 0 with ranks 1, expected all ranks to be connected
    """
    if isinstance(graph, str):
        check_name(graph)
        if graph == MATCHING and size % 2 and size > 1:
            raise UsageError(f"graph: got matching on {size} ranks, expected an even number of ranks, or another graph")
        return
    rounds = rounds_of(graph)
    if rounds.shape[1:] != (size, size):
        raise UsageError(f"graph: got weights of shape {rounds.shape}, expected (rounds, {size}, {size}) for {size} ranks")
    for number, mixing in enumerate(rounds):
        _check_stochastic(mixing, number, symmetric)
    _check_connected((rounds > 0).any(axis=0))


def check_name(graph: str) -> None:
    """Raise a `UsageError` unless ``graph`` is in `GRAPHS`."""
    if graph not in GRAPHS:
        close = difflib.get_close_matches(graph, GRAPHS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"graph: got {graph!r}, expected one of {', '.join(GRAPHS)}, or an array of weights{hint}")


def _check_stochastic(mixing: np.ndarray, number: int, symmetric: bool) -> None:
    sums = np.concatenate([mixing.sum(axis=0), mixing.sum(axis=1)])
    if not (mixing >= 0).all() or not (abs(sums - 1) <= EXACT).all():  # written so that NaN fails as well
        off = sums[np.argmax(abs(sums - 1))]
        raise UsageError(f"graph: got weights that are not doubly stochastic in round {number} (smallest weight "
                         f"{mixing.min():g}, one sum {off:.9g}), expected weights of 0 or more, and a sum of 1 in each row "
                         f"and column, within {EXACT:g}")
    if symmetric and not np.array_equal(mixing, mixing.T):
        raise UsageError(f"graph: got weights that are not symmetric in round {number}, expected symmetric weights, or "
                         "direction=pull or push")


def _check_connected(linked: Any) -> None:
    """With doubly stochastic weights, the direction of the links makes no difference for connectedness."""
    near = linked | linked.T
    reached = np.arange(len(near)) == 0
    while (more := reached | near[reached].any(axis=0)).sum() > reached.sum():
        reached = more
    if not reached.all():
        lost = ", ".join(map(str, np.flatnonzero(~reached)[:8]))
        raise UsageError(f"graph: got weights that do not connect rank 0 with ranks {lost}, expected all ranks to be connected")


def rounds_of(graph: Any) -> np.ndarray:
    """Matrices of rounds, shape (rounds, size, size)."""
    try:
        rounds = np.asarray(graph)
        if not np.can_cast(rounds.dtype, np.float64, "same_kind") and rounds.dtype != object:  # no complex, no strings
            raise TypeError
        rounds = rounds.astype(np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"graph: got {type(graph).__name__}, expected one of {', '.join(GRAPHS)}, or an array of "
                         "weights") from None
    rounds = rounds[None] if rounds.ndim == 2 else rounds
    if rounds.ndim != 3 or not rounds.size:
        raise UsageError(f"graph: got weights of shape {rounds.shape}, expected (rounds, ranks, ranks)")
    return rounds
