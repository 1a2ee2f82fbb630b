"""Elastic averaging of ranks that take their steps each at its own pace: rank 0 keeps the centre, and trains as they do.

A rank sends its parameters w and goes on. Rank 0 answers between two steps of its own: it sends the centre c as it is, and then
c <- c + alpha (w - c). When that has come, the rank takes its part of the same exchange, with the w that it had sent:
w_i <- w_i + alpha (c - w).
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
        centre = self.state["centre"].copy()
        self._draw(self.params.copy())
        self._follow(centre, self.params.copy())
        return True

    def _answer(self, asked: Letter) -> None:
        self._mail.send(self.state["centre"].copy(), asked.source, ANSWER)
        self._draw(asked.array)

    def _answered(self, answer: Letter) -> None:
        self._follow(answer.array, self._given.pop(answer.source))

    def _draw(self, given: np.ndarray) -> None:
        """Move the centre to what a rank has ``given``, which is overwritten."""
        given -= self.state["centre"]
        given *= self._rule.share(self._comm.size)
        self.state["centre"] += given

    def _follow(self, centre: np.ndarray, given: np.ndarray) -> None:
        """Move this rank's parameters to the ``centre``, which is overwritten, as far as from where they were ``given``."""
        centre -= given
        centre *= self._rule.share(self._comm.size)
        self.params += centre
        self._taken()


@dataclass(frozen=True)
class ElasticOwnPace(OwnPace):
    """Elastic averaging by ``rule``, a `mpiddl.strategies.Elastic`, which says when a rank exchanges."""

    kind = Centred

    def model(self, comm: Comm, state: Any, params: np.ndarray) -> np.ndarray:
        centre: np.ndarray = state["centre"]
        comm.Bcast(centre)
        return centre
