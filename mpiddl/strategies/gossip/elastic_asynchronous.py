"""Asynchronous elastic averaging: rank 0 keeps the centre and trains like the others.

A rank sends its parameters w and continues. Rank 0 answers between two steps of its own: it moves the centre c by
alpha (w - c) and returns this difference. When the answer arrives, the rank moves by as much in the other direction.
Laws: a completed exchange keeps the sum of the centre and all ranks' parameters; the model is the centre.
Cost: V bytes and V back for each exchange, all through rank 0. Memory: 2 V; on rank 0, V for each asking rank.
Source: EASGD, Zhang, Choromanska and LeCun, NIPS 2015, arXiv:1412.6651, algorithm 1 [departures: the rank with the centre
trains as well; no rank waits for it; the difference refers to the parameters at the time of asking].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.strategies.gossip.asynchronous import ANSWER, OwnPace, Rounds
from mpiddl.strategies.gossip.mailbox import Letter
from mpiddl.transport.comm import Comm


class Centred(Rounds):
    """The exchanges of a rank with the centre on rank 0."""

    def ask(self) -> bool:
        if self._comm.rank:
            return super().ask()
        self.params -= self._draw(self.params.copy())
        self._taken()
        return True

    def _answer(self, asked: Letter) -> None:
        self._mail.send(-self._draw(asked.array), asked.source, ANSWER)

    def _draw(self, params: np.ndarray) -> np.ndarray:
        """Move the centre towards ``params``. Returns the move, in the array ``params``."""
        params -= self.state["centre"]
        params *= self._rule.share(self.state["trainers"])
        self.state["centre"] += params
        return params


@dataclass(frozen=True)
class ElasticOwnPace(OwnPace):
    """Asynchronous elastic averaging. ``rule``, a `mpiddl.strategies.Elastic`, decides when a rank exchanges."""

    kind = Centred

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        centre: np.ndarray = state["centre"]
        comm.Bcast(centre)
        return centre
