"""When a model has changed enough to be exchanged.

d = ||w - w_last|| / ||w_last||, w_last being the model after the last exchange; an exchange is wanted if d reaches a
threshold, and at the latest after so many steps of silence. The threshold is one of

fixed       theta
rate        theta times the learning rate, as a part of its largest so far
slope       theta times what d has grown by in a step, on average, up to the last exchange
calibrated  what leads to a given share of the steps: the first d after as many steps as that means, then more where a run is
            ahead of the share, less where it is behind

Communication: none. Memory: V.
Sources: Ho, Wu and Liu, CCGRID 2018, for d [interpretation: the relative change of the whole model, in the 2-norm];
EventGraD, Ghosh et al., MLHPC 2020, arXiv:2103.07454, for ``slope`` [interpretation: theta is its horizon], which takes the
change of the norm, | ||w|| - ||w_last|| |, of each tensor for itself: trigger=norm,threshold=slope,tensors=1.
Departures: the norm of the change is the default, since a model can turn at the same norm; the calibration is ours.
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
"""By what power of e a calibrated threshold is higher for being ahead by all the exchanges that a run shall have."""


@dataclass(frozen=True)
class Trigger:
    """The rule; a strategy's state holds what it has to remember (`state`).

    Parameters
    ----------
    theta : float
        0 or more.
    traffic : float
        Share of the steps that an exchange is wanted in, up to 1; 0: theta is not calibrated.
    trigger : str
        ``change``, the norm of the change; ``norm``, the change of the norm.
    threshold : str
        ``fixed``, ``rate`` or ``slope``.
    silence : int
        Longest, in steps; 0: any.
    """

    theta: float
    traffic: float
    trigger: str
    threshold: str
    silence: int

    def __post_init__(self) -> None:
        if not 0 <= self.theta < inf:
            raise UsageError(f"theta: got {self.theta}, wanted a relative change, 0 or more")
        if not 0 <= self.traffic <= 1:
            raise UsageError(f"traffic: got {self.traffic}, wanted a share of the steps, up to 1, or 0 for a given theta")
        if self.trigger not in TRIGGERS:
            raise UsageError(f"trigger: got {self.trigger!r}, wanted {', '.join(TRIGGERS)}")
        if self.threshold not in THRESHOLDS:
            raise UsageError(f"threshold: got {self.threshold!r}, wanted {', '.join(THRESHOLDS)}")
        if self.traffic and self.threshold != FIXED:
            raise UsageError(f"traffic: got {self.traffic} beside threshold={self.threshold}, wanted one of them")
        if self.silence < 0:
            raise UsageError(f"silence: got {self.silence}, wanted a number of steps, or 0 for any")

    def state(self, params: np.ndarray, parts: Sequence[slice]) -> dict[str, Any]:
        """Of a strategy, before the first step; ``parts`` of the parameters are looked at each for itself."""
        return {"last": params.copy(), "at": np.zeros(len(parts), np.int64), "changes": np.zeros(len(parts)),
                "thresholds": np.zeros(len(parts)), "peak": 0.0}

    def wants(self, state: dict[str, Any], params: np.ndarray, parts: Sequence[slice], step: Step) -> np.ndarray:
        """Which parts of ``params`` (n,) this rank wants to exchange after ``step``, bool (parts,)."""
        state["peak"] = max(state["peak"], step.rate)
        since = step.index + 1 - state["at"]
        changes = state["changes"]
        changes[:] = [self.change(params[part], state["last"][part]) for part in parts]
        thresholds = self._thresholds(state, step)
        quiet = (since >= self.silence) & bool(self.silence)
        if not self.traffic:
            return quiet | (changes >= thresholds)
        fresh = (thresholds == 0) & (since * self.traffic >= 1)
        known = fresh & (changes < inf)
        thresholds[known] = changes[known]
        return quiet | fresh | ((changes >= thresholds) & (thresholds > 0))

    def change(self, params: np.ndarray, last: np.ndarray) -> float:
        """How far ``params`` are from ``last``, in norms of ``last``."""
        size = float(np.linalg.norm(last))
        far = float(np.linalg.norm(params - last)) if self.trigger == CHANGE else abs(float(np.linalg.norm(params)) - size)
        if not far:
            return 0.0
        return far / size if size else inf

    def taken(self, state: dict[str, Any], params: np.ndarray, part: slice, number: int, index: int) -> None:
        """Part ``number`` has been exchanged, ``index`` steps having been done."""
        if self.threshold == SLOPE and index > state["at"][number] and state["changes"][number] < inf:
            state["thresholds"][number] = self.theta * state["changes"][number] / (index - state["at"][number])
        state["last"][part] = params[part]
        state["at"][number] = index

    def calibrate(self, state: dict[str, Any], moved: np.ndarray, steps: int) -> None:
        """After one of ``steps`` steps, in which the parts ``moved``, bool (parts,), were exchanged."""
        if self.traffic:
            state["thresholds"] *= np.exp(GAIN / max(self.traffic * steps, GAIN) * (moved - self.traffic))

    def _thresholds(self, state: dict[str, Any], step: Step) -> np.ndarray:
        if self.traffic or self.threshold == SLOPE:
            thresholds: np.ndarray = state["thresholds"]
            return thresholds
        scale = step.rate / (state["peak"] or 1.0) if self.threshold == RATE else 1.0
        return np.full(len(state["at"]), self.theta * scale)
