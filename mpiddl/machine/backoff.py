"""Polling with backoff: the longer a thread has waited, the longer it sleeps between two looks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpiddl.machine.clock import now

SPINS = 200
"""Looks without a sleep between them: a message on one host comes within some of them."""

FIRST_S, LONGEST_S = 5e-5, 1e-3
"""Sleep between later looks: at first, and at most."""


def longer(pause_s: float, longest_s: float = LONGEST_S) -> float:
    """The next sleep."""
    return min(1.2 * pause_s, longest_s)


def poll(ask: Callable[[], bool], limit_s: float, longest_s: float = LONGEST_S) -> bool:
    """Ask until the answer is yes; False if it was not after ``limit_s``. A sleep lasts ``longest_s`` at most."""
    deadline, pause = now() + limit_s, FIRST_S
    for _ in range(SPINS):
        if ask():
            return True
        os.sched_yield()
    while not ask():
        if now() > deadline:
            return False
        time.sleep(pause)
        pause = longer(pause, longest_s)
    return True
