"""Which backward pass a gradient belongs to.

PyTorch numbers backward passes. A pass that raises an error does not say so; it is noticed when the next one begins. A pass
inside another one, as checkpoints with ``use_reentrant=True`` make it, is a part of that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.autograd.graph import _engine_run_backward


class BackwardPass:
    """Tells gradients of one pass from those of the next.

    Attributes
    ----------
    running : bool
        A pass has begun and is not over.
    """

    def __init__(self) -> None:
        self.running, self._number = False, -1

    def begins(self) -> bool:
        """Whether the gradient that was just accumulated is the first one of its pass."""
        number = torch._C._current_graph_task_id()
        if self.running and (number == self._number or _nested()):
            return False
        self.running, self._number = True, number
        return True

    def at_end(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the pass that has just begun is over, unless it raises an error."""
        torch.autograd.Variable._execution_engine.queue_callback(call)


def _nested() -> bool:
    """Whether more than one backward pass runs in this thread."""
    frame, passes = sys._getframe(), 0
    while frame is not None:
        passes += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back  # type: ignore[assignment]
    return passes > 1
