"""Slow momentum: what local steps and an average have changed is one step of an outer momentum.

u <- outer u + (x_0 - x), x <- x_0 - u, x_0 being where the last such step has ended; that is x <- x - outer u, with the u of
before. Where ranks do not all take the same mean, x is, in u, what a rank has before it exchanges, and after it in the other:
else what draws ranks together would be momentum, too, and throw them apart.
Cost: no communication; memory 2 V.
Source: Wang et al., ICLR 2020, arXiv:1910.00643, algorithm 1 with alpha = 1 [interpretation: u is kept in units of
parameters, so that a changing rate needs no division].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.errors import UsageError


def check_outer(outer: float) -> None:
    """Raise a `UsageError` unless it is a factor of a momentum."""
    if not 0 <= outer < 1:
        raise UsageError(f"outer: got {outer}, expected a factor from 0 to below 1")


def slow_state(params: np.ndarray, outer: float) -> dict[str, Any]:
    """What a strategy's state has to hold: nothing, if there is no outer momentum."""
    return {"began": params.copy(), "slow": np.zeros_like(params)} if outer else {}


def slow_begin(state: dict[str, Any], params: np.ndarray, outer: float, part: slice = slice(None)) -> None:
    """First half of the step: take in what ``part`` of ``params`` has changed by; `slow_end` follows."""
    if outer:
        began, slow = state["began"][part], state["slow"][part]
        changed = began - params[part]
        slow *= outer
        began[:] = slow
        slow += changed


def slow_end(state: dict[str, Any], params: np.ndarray, outer: float, part: slice = slice(None)) -> None:
    """Second half: move ``part`` of ``params``, in place."""
    if outer:
        began = state["began"][part]
        params[part] -= began
        began[:] = params[part]


def slow_step(state: dict[str, Any], params: np.ndarray, outer: float, part: slice = slice(None)) -> None:
    """Take the step with ``part`` of ``params``, in place."""
    slow_begin(state, params, outer, part)
    slow_end(state, params, outer, part)
