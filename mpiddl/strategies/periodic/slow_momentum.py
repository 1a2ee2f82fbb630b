"""Slow momentum: the change by local steps and an average is one step of an outer momentum.

u <- outer u + (x_0 - x), x <- x_0 - u, where x_0 are the parameters after the last such step. This equals x <- x - outer u with
the old u. If ranks do not all take the same mean, the update of u uses the parameters before the exchange, and the update of x
those after it. Otherwise the change by the exchange would become momentum too, and drive the ranks apart.
Cost: no communication; memory 2 V.
Source: Wang et al., ICLR 2020, arXiv:1910.00643, algorithm 1 with alpha = 1. Departure: u is in units of parameters, in the
source in units of gradients. If the learning rate falls, u keeps its size; in the source the step with u shrinks with the rate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.errors import UsageError


def check_outer(outer: float) -> None:
    """Raise a `UsageError` unless ``outer`` is at least 0 and below 1."""
    if not 0 <= outer < 1:
        raise UsageError(f"outer: got {outer}, expected a factor from 0 to below 1")


def slow_state(params: np.ndarray, outer: float) -> dict[str, Any]:
    """The entries of a strategy's state; none without an outer momentum."""
    return {"began": params.copy(), "slow": np.zeros_like(params)} if outer else {}


def slow_begin(state: dict[str, Any], params: np.ndarray, outer: float, part: slice = slice(None)) -> None:
    """First half of the step: add the change of ``part`` of ``params`` to the momentum. `slow_end` follows."""
    if outer:
        began, slow = state["began"][part], state["slow"][part]
        changed = began - params[part]
        slow *= outer
        began[:] = slow
        slow += changed


def slow_end(state: dict[str, Any], params: np.ndarray, outer: float, part: slice = slice(None)) -> None:
    """Second half of the step: change ``part`` of ``params`` in place."""
    if outer:
        began = state["began"][part]
        params[part] -= began
        began[:] = params[part]


def slow_step(state: dict[str, Any], params: np.ndarray, outer: float, part: slice = slice(None)) -> None:
    """Make the whole step with ``part`` of ``params``, in place."""
    slow_begin(state, params, outer, part)
    slow_end(state, params, outer, part)
