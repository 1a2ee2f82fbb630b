"""Scores over rows that no single rank need hold: each rank scores its share, the sums are added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.memory import FlatBuffer
from mpiddl.models.base import Score, as_score
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm


@dataclass(frozen=True)
class Evaluation:
    """Means over ``count`` rows; ``accuracy`` is None where there are no classes, ``loss`` NaN where there are no rows."""

    loss: float
    accuracy: float | None
    count: int


def evaluate_rows(comm: Comm, model: Any, params: FlatBuffer, chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> Evaluation:
    """Mean loss and accuracy of ``model`` over the rows of all ranks.

    Parameters
    ----------
    comm : Comm
        Ranks that hold rows.
    model : Model
        Its ``score`` is used if it has one, else its ``gradient`` into a scratch buffer.
    params : FlatBuffer
        The model's parameters, the same on every rank.
    chunks : iterable of (x, y)
        This rank's rows, any number, in pieces that fit in memory.

    Communication
    -------------
    Collective: one all-reduce of 32 bytes.
    """
    sums = np.zeros(4)  # loss, rows, correct rows, rows that have classes
    for x, y in chunks:
        score = _score(model, params, x, y)
        sums += (score.loss, len(x), score.correct or 0, len(x) if score.correct is not None else 0)
    comm.Allreduce(IN_PLACE, sums)
    loss, count, correct, classed = sums.tolist()
    return Evaluation(
        loss / count if count else float("nan"), correct / classed if classed else None, int(count)
    )


def _score(model: Any, params: FlatBuffer, x: np.ndarray, y: np.ndarray) -> Score:
    if hasattr(model, "score"):
        score = model.score(params.views, x, y)
    else:
        score = model.gradient(params.views, x, y, FlatBuffer(model.shapes, params.dtype).views)
    return as_score(score)
