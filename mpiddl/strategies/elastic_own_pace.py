"""Elastic averaging of ranks that take their steps each at its own pace: rank 0 keeps the centre, and trains as they do.

A rank sends its parameters w and goes on. Rank 0 answers between two steps of its own: the centre c goes by alpha (w - c), and
when that has come, the rank goes by as much the other way.
Laws: the sum of all ranks' parameters and the centre does not change by an exchange that is over; the model is the centre.
Cost: V bytes and V back for an exchange of a rank, all of them through rank 0. Memory: 2 V; on rank 0 V for each that asks.
Source: EASGD, Zhang, Choromanska and LeCun, NIPS 2015, arXiv:1412.6651, algorithm 1 [departures: who keeps the centre works,
too; nobody waits for it, and what a rank takes is of the parameters it had when it asked].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.strategies.mailbox import Letter
from mpiddl.strategies.own_pace import ANSWER, OwnPace, Rounds
from mpiddl.transport.base import Comm


class Centred(Rounds):
    """What a rank has under way with the centre, which is rank 0's."""

    def ask(self) -> bool:
        if self._comm.rank:
            return super().ask()
        self.params -= self._draw(self.params.copy())
        self._taken()
        return True

    def _answer(self, asked: Letter) -> None:
        self._mail.send(-self._draw(asked.array), asked.source, ANSWER)

    def _draw(self, params: np.ndarray) -> np.ndarray:
        """Move the centre to ``params``, which become what it has moved by."""
        params -= self.state["centre"]
        params *= self._rule.share(self._comm.size)
        self.state["centre"] += params
        return params


@dataclass(frozen=True)
class ElasticOwnPace(OwnPace):
    """Elastic averaging by ``rule``, a `mpiddl.strategies.Elastic`, which says when a rank exchanges."""

    kind = Centred

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        centre: np.ndarray = state["centre"]
        comm.Bcast(centre)
        return centre
