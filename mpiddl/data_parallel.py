"""A training loop in numpy on many ranks: each rank computes the gradient of its rows, all get the mean.

The loop stays the program's own. It asks which rows of a batch are this rank's, and for the mean of the gradients.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mpiddl.errors import ShapeError, UsageError
from mpiddl.layout import block
from mpiddl.strategies import of_programs
from mpiddl.strategies.summed_arrays import SummedArrays
from mpiddl.transport.comm import AnyComm
from mpiddl.transport.mpi import connect

CHANGED = -1e15
"""Stands for the rows of a rank whose arrays have other shapes than before: no sum of rows outweighs it."""

Kinds = list[tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and dtypes."""


class DataParallel:
    """The ranks of a training loop. Construction is collective.

    Parameters
    ----------
    strategy : str
        How gradients are summed (`mpiddl.strategies`): one that sums them in every step, such as ``"auto"`` or ``"two-step"``.
    comm : mpi4py.MPI.Intracomm or Comm, optional
        The ranks; None means ``MPI.COMM_WORLD``.

    Attributes
    ----------
    rank, size : int

    Raises
    ------
    UsageError
        Another strategy. On every rank.

    Examples
    --------
    >>> import numpy as np
    >>> x, y, weights = np.eye(4), np.arange(4.0), np.zeros(4)
    >>> with DataParallel() as parallel:
    ...     for _ in range(300):
    ...         mine = parallel.rows(len(x))
    ...         error = x[mine] @ weights - y[mine]
    ...         (gradient,) = parallel.mean([x[mine].T @ error / len(error)], len(error))
    ...         weights -= 0.5 * gradient
    >>> weights.round(6)
    array([0., 1., 2., 3.])
    """

    def __init__(self, strategy: str = "auto", comm: AnyComm | None = None):
        self._comm = connect(comm, os.environ if comm is None else None)
        self.rank, self.size = self._comm.rank, self._comm.size
        chosen = of_programs.resolved(strategy, self._comm)
        if not chosen.sums_gradients:
            raise UsageError(f"strategy: got {strategy!r}, expected one that sums the gradients in every step, such as auto")
        self._sums = SummedArrays(self._comm.Dup(), chosen)
        self._kinds: Kinds | None = None

    def rows(self, n: int) -> slice:
        """This rank's rows of a batch of ``n``. All ranks have about the same number; some have none if ``n`` is small."""
        mine = block(n, self.size, self.rank)
        return slice(mine.start, mine.stop)

    def broadcast(self, arrays: Sequence[np.ndarray]) -> None:
        """Give all ranks the values that ``arrays`` have on rank 0, in place: C-contiguous, any numeric dtype. Collective.

        Communication
        -------------
        One broadcast for each array.
        """
        for array in arrays:
            if not (array.flags.c_contiguous and array.flags.writeable) or array.dtype.hasobject:
                raise UsageError(f"arrays: got an array of {array.dtype} and shape {array.shape} that is not C-contiguous, is "
                                 "read-only or holds objects; expected numbers that can be overwritten")
            self._comm.Bcast(array.reshape(-1).view(np.uint8))

    def mean(self, gradients: Sequence[np.ndarray], rows: int) -> list[np.ndarray]:
        """The mean over the rows of all ranks of gradients that are means over ``rows`` rows of this rank. Collective.

        Parameters
        ----------
        gradients : sequence of ndarray
            Of real numbers, with the same shapes on every rank. With 0 rows their values are ignored.
        rows : int
            Rows of this rank in the batch.

        Returns
        -------
        list of ndarray
            New arrays with the shapes and dtypes of ``gradients``, float64 for integers; zeros if no rank has rows.

        Raises
        ------
        UsageError
            Numbers that are not real; fewer than 0 rows.
        ShapeError
            Shapes or dtypes differ between ranks. On every rank.

        Communication
        -------------
        The strategy's, for all gradients as one array. The first call, and one in which a rank has other shapes or dtypes than
        before, compares them.
        """
        given = [np.asarray(each) for each in gradients]
        if wrong := [str(each.dtype) for each in given if each.dtype.kind not in "fiub"]:
            raise UsageError(f"gradients: got an array of {wrong[0]}, expected real numbers")
        if rows < 0:
            raise UsageError(f"rows: got {rows}, expected 0 or more")
        arrays = [each.astype(np.float32 if each.dtype.kind == "f" and each.dtype.itemsize <= 4 else np.float64, copy=False)
                  for each in given]
        kinds = [(each.shape, each.dtype) for each in arrays]
        *sums, total = self._summed(arrays, rows, self._kinds if self._kinds is not None else self._agreed(kinds))
        if total[0] < 0:
            *sums, total = self._summed(arrays, rows, self._agreed(kinds))
        count = total[0] or 1
        return [(each / each.dtype.type(count)).astype(its.dtype if its.dtype.kind == "f" else each.dtype, copy=False)
                for each, its in zip(sums, given, strict=True)]

    def _summed(self, arrays: list[np.ndarray], rows: int, kinds: Kinds) -> list[np.ndarray]:
        """The sums of arrays of these ``kinds``, times ``rows``, and of the rows; these are negative if a rank has others."""
        changed = [(each.shape, each.dtype) for each in arrays] != kinds
        if changed or not rows:
            arrays = [np.zeros(shape, dtype) for shape, dtype in kinds]
        kind: Any = np.float64 if any(each.dtype.itemsize == 8 for each in arrays) else np.float32
        return self._sums([*arrays, np.full(1, CHANGED if changed else 1, kind)], 1 if changed else rows)

    def _agreed(self, kinds: Kinds) -> Kinds:
        """Those of all ranks. Collective."""
        every = self._comm.allgather([(shape, str(dtype)) for shape, dtype in kinds])
        if any(each != every[0] for each in every):
            raise ShapeError(f"gradients: got the shapes and types {every[:8]} on ranks 0 to {min(self.size, 8) - 1}, expected "
                             "the same on every rank")
        self._kinds = kinds
        return kinds

    def Free(self) -> None:
        """Give the memory back. Collective."""
        self._sums.Free()
        self._comm.Free()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:  # others may be elsewhere
            self.Free()
