"""Delayed gradients: a gradient computed in step t is applied in step t + delay; its all-reduce runs during the steps between.

With ``ahead=1``, a rank computes its gradient at predicted parameters: those after provisional updates with its own gradients
in flight (`mpiddl.strategies.periodic.lookahead`). With ``ahead=0`` it uses the parameters after the last sum that has arrived.
Cost per step: 2 (N-1)/N V sent by a node, N nodes, as `allreduce`, but a step takes the longer of computation and communication
instead of both; ``delay`` + 1 buffers of V bytes. Prediction needs ``delay`` more buffers, copies of parameters and moments,
and ``delay`` local updates.
Sources: Langford, Smola & Zinkevich, NIPS 2009, arXiv:0911.0491, algorithm 1; as a pipeline of all-reduces, Li et al., NeurIPS
2018, arXiv:1811.03619 (Pipe-SGD, whose K is delay + 1); the use of prediction here is ours.
Interpretation: the first ``delay`` steps update nothing, and the last ``delay`` gradients are discarded, as in the sources.
Laws: with delay 0 it is `allreduce`, bit for bit if that sums in the same order; on one rank with ``ahead=1`` it takes the
steps of `allreduce` except the last ``delay``, bit for bit at a constant learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import allreduce
from mpiddl.errors import UsageError
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.strategies.periodic.lookahead import ahead
from mpiddl.strategies.periodic.sums_in_flight import Late, late
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class Delayed(Strategy):
    """Apply sums of gradients ``delay`` steps late.

    State: the sums in flight, oldest first, each with its number of samples and this rank's part of it; with ``ahead=1`` also
    the parameters without provisional updates.

    Parameters
    ----------
    delay : int
        Steps from the computation of a gradient to its application.
    ahead : int
        1: compute gradients at predicted parameters; 0: do not.
    """

    delay: int = 1
    ahead: int = 1
    sums = True

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise UsageError(f"delay: got {self.delay}, expected a number of steps, 0 or more")
        if self.ahead not in (0, 1):
            raise UsageError(f"ahead: got {self.ahead}, expected 0 or 1")
        object.__setattr__(self, "guesses", bool(self.ahead and self.delay))

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        trouble = self._late(comm, size, dtype).trouble if self.delay else ""
        return trouble and f"delayed: {trouble}: the MPI library moves sums on, in the calls that it gets"

    def init(self, comm: Comm, replica: Replica) -> Any:
        return {"flight": []}

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        if self.delay:
            self._late(comm, grad.size, grad.dtype).move_on()
        return state

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        if not self.delay:
            allreduce(comm, IN_PLACE, grad)
            return Combined(grad, step.total, state)
        sums = self._late(comm, grad.size, grad.dtype)
        flying: dict[str, Any] = {"sum": sums.start(grad), "count": step.total}
        flight = [*state["flight"], flying]
        oldest = flight.pop(0) if len(flight) > self.delay else None
        if self.ahead:
            own = oldest["own"] if oldest else np.empty_like(grad)
            own[:] = grad
            flying |= {"own": own, "own count": step.count}
        if "params" in state:
            replica.params[:] = state["params"]
        state = {**state, "flight": flight}
        return Combined(sums.wait(oldest["sum"]), oldest["count"], state) if oldest else Combined(grad, 0, state)

    def mix(self, comm: Comm, state: Any, replica: Replica, step: Step) -> Any:
        if not self.guesses:
            return state
        if "params" not in state:
            state["params"] = np.empty_like(replica.params)
        state["params"][:] = replica.params
        own = [(flying["own"], flying["own count"]) for flying in state["flight"]]
        ahead(comm, replica.params.size, replica.params.dtype)(replica, own, step.rate)
        return state

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray | None:
        return state.get("params")

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        for flying in state["flight"]:
            flying["sum"].wait()
        if "params" in state:
            replica.params[:] = state["params"]
        if self.delay:
            self._late(comm, replica.params.size, replica.params.dtype).stop()

    def _late(self, comm: Comm, size: int, dtype: np.dtype) -> Late:
        return late(comm, self, size, dtype, self.delay + 1)
