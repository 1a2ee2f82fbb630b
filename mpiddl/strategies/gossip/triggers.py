"""Triggers of adaptive exchanges: the rule that a model has changed enough.

The change is d = ||w - w_last|| / ||w_last||, where w_last is the model after the last exchange. A rank wants an exchange if d
reaches a threshold, or after ``silence`` steps without an exchange. The threshold is one of

fixed       theta
rate        theta times the learning rate, relative to the largest learning rate so far
slope       theta times the growth of d per step, measured before the last exchange
calibrated  adapts so that exchanges take place in a given share of the steps: it starts with the first d after 1 / share steps,
            rises after each exchange and falls after each step without one, by the exchanges and steps that are left

Communication: none. Memory: V.
Sources: Ho, Wu and Liu, CCGRID 2018, for d [interpretation: the relative change of the whole model, in the 2-norm];
EventGraD, Ghosh and Gupta, MLHPC 2020, and Ghosh, Aquino and Gupta 2021, arXiv:2103.07454, for ``slope`` [interpretation: theta
is its horizon], which uses the change of the norm, | ||w|| - ||w_last|| |, of each tensor separately:
trigger=norm,threshold=slope,tensors=1.
Departures: the default is the norm of the change, because a model can change at constant norm; d is relative to ||w_last||, in
EventGraD it is absolute; ``slope`` uses one exchange, not the mean of several; the calibration is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from mpiddl.errors import UsageError
from mpiddl.strategies.base import Step

CHANGE, NORM = TRIGGERS = "change", "norm"
FIXED, RATE, SLOPE = THRESHOLDS = "fixed", "rate", "slope"

GAIN = 15
"""A calibrated threshold would rise by e to this power if all remaining exchanges took place at once."""

FEW = 4
"""The step of the calibration does not grow when fewer exchanges than this are left."""


@dataclass(frozen=True)
class Trigger:
    """The rule of a trigger. Its variables are part of the strategy's state (`state`).

    Parameters
    ----------
    theta : float
        The threshold, 0 or more.
    traffic : float
        Share of the steps with an exchange, up to 1; 0: no calibration, theta is used.
    trigger : str
        ``change``, the norm of the change; ``norm``, the change of the norm.
    threshold : str
        ``fixed``, ``rate`` or ``slope``.
    silence : int
        Largest number of steps without an exchange; 0: no limit.
    """

    theta: float
    traffic: float
    trigger: str
    threshold: str
    silence: int

    def __post_init__(self) -> None:
        if not 0 <= self.theta < inf:
            raise UsageError(f"theta: got {self.theta}, expected a relative change, 0 or more")
        if not 0 <= self.traffic <= 1:
            raise UsageError(f"traffic: got {self.traffic}, expected a share of the steps from 0 to 1 (0: use theta)")
        if self.trigger not in TRIGGERS:
            raise UsageError(f"trigger: got {self.trigger!r}, expected {' or '.join(TRIGGERS)}")
        if self.threshold not in THRESHOLDS:
            raise UsageError(f"threshold: got {self.threshold!r}, expected one of {', '.join(THRESHOLDS)}")
        if self.traffic and self.threshold != FIXED:
            raise UsageError(f"traffic: got {self.traffic} with threshold={self.threshold}, expected traffic=0 or "
                             f"threshold={FIXED}")
        if self.silence < 0:
            raise UsageError(f"silence: got {self.silence}, expected a number of steps, or 0 for no limit")

    def check(self, period: int) -> None:
        """Raise a `UsageError` if rounds every ``period`` steps are too few for ``traffic``."""
        if self.traffic * period > 1:
            raise UsageError(f"traffic: got {self.traffic} with period={period}, expected at most 1 / {period} of the steps")

    def state(self, params: np.ndarray, parts: Sequence[slice], begun: int = 0) -> dict[str, Any]:
        """Entries of a strategy's state after ``begun`` steps. Each of ``parts`` of the parameters has its own trigger."""
        return {"last": params.copy(), "at": np.full(len(parts), begun), "seen": np.full(len(parts), begun), "begun": begun,
                "changes": np.zeros(len(parts)), "thresholds": np.zeros(len(parts)), "moves": np.zeros(len(parts), np.int64),
                "peak": 0.0}

    def wants(self, state: dict[str, Any], params: np.ndarray, parts: Sequence[slice], step: Step) -> np.ndarray:
        """Parts of ``params`` (n,) that this rank wants to exchange after ``step``, bool (parts,)."""
        state["peak"] = max(state["peak"], step.rate)
        since = step.index + 1 - state["at"]
        changes = state["changes"]
        changes[:] = [self.change(params[part], state["last"][part]) for part in parts]
        state["seen"][:] = step.index + 1
        thresholds = self._thresholds(state, step)
        quiet = (since >= self.silence) & bool(self.silence)
        if not self.traffic:
            return quiet | (changes >= thresholds)
        fresh = (thresholds == 0) & (since * self.traffic >= 1)
        known = fresh & (changes < inf)
        thresholds[known] = changes[known]
        return quiet | fresh | ((changes >= thresholds) & (thresholds > 0))

    def change(self, params: np.ndarray, last: np.ndarray) -> float:
        """Distance of ``params`` from ``last``, divided by the norm of ``last``."""
        size = float(np.linalg.norm(last))
        far = float(np.linalg.norm(params - last)) if self.trigger == CHANGE else abs(float(np.linalg.norm(params)) - size)
        if not far:
            return 0.0
        return far / size if size else inf

    def taken(self, state: dict[str, Any], params: np.ndarray, part: slice, number: int, index: int) -> None:
        """After an exchange of part ``number``; ``index`` is the number of finished steps."""
        seen = state["seen"][number]
        if self.threshold == SLOPE and seen > state["at"][number] and state["changes"][number] < inf:
            state["thresholds"][number] = self.theta * state["changes"][number] / (seen - state["at"][number])
        state["last"][part] = params[part]
        state["at"][number] = index

    def calibrate(self, state: dict[str, Any], moved: np.ndarray, steps: int, left: int) -> None:
        """Adapt thresholds after a round: ``moved`` (parts,) exchanges in it, ``left`` more to come, ``steps`` in the run."""
        if not self.traffic:
            return
        state["moves"] += moved
        due = np.maximum(self.traffic * (steps - state["begun"]) - state["moves"], 0)
        share = np.minimum(due / max(left, 1), 1)
        state["thresholds"] *= np.exp(GAIN / np.maximum(due, FEW) * (moved - share))

    def _thresholds(self, state: dict[str, Any], step: Step) -> np.ndarray:
        if self.traffic or self.threshold == SLOPE:
            thresholds: np.ndarray = state["thresholds"]
            return thresholds
        scale = step.rate / (state["peak"] or 1.0) if self.threshold == RATE else 1.0
        return np.full(len(state["at"]), self.theta * scale)
