"""An arena: named flat buffers in private memory, or in memory that the ranks of a node share.

Gradients are then produced where a collective reads them, and results are read where it wrote them: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpiddl.errors import ShapeError, UsageError
from mpiddl.memory import aligned_zeros
from mpiddl.node.topology import neighbours
from mpiddl.transport.comm import Comm


class Arena:
    """The named buffers of one rank, freed together, or by name.

    Parameters
    ----------
    comm : Comm
        Shared buffers are shared by those of its ranks that are on one node.

    Examples
    --------
    >>> from mpiddl.transport import virtual
    >>> def program(comm):
    ...     with Arena(comm) as arena:
    ...         mine = arena.shared("gradient", 4, "float32")
    ...         mine[:] = comm.rank
    ...         arena.meet("gradient").Wait()
    ...         return [float(array[0]) for array in arena.peers("gradient")]
    >>> virtual.run(3, program, nodes=[0, 0, 1])
    [[0.0, 1.0], [0.0, 1.0], [2.0]]
    """

    def __init__(self, comm: Comm):
        self._local = neighbours(comm).local
        self._private: dict[str, np.ndarray] = {}
        self._peers: dict[str, list[np.ndarray]] = {}
        self._memory: dict[str, Any] = {}

    def private(self, name: str, size: int, dtype: DTypeLike) -> np.ndarray:
        """Zeros of this rank's own, shape ``(size,)``, on a cache line. Local."""
        self._new(name, size)
        self._private[name] = aligned_zeros(size, dtype)
        return self._private[name]

    def shared(self, name: str, size: int, dtype: DTypeLike) -> np.ndarray:
        """Zeros of this rank's own that its neighbours see, shape ``(size,)``; sizes may differ between ranks.

        Raises
        ------
        CommError
            On all ranks of the node: not enough room for shared memory there.

        Communication
        -------------
        Collective over the ranks of the node.
        """
        self._new(name, size)
        kind = np.dtype(dtype)
        memory = self._local.share(int(size) * kind.itemsize)
        self._memory[name] = memory
        self._peers[name] = [segment.view(kind) for segment in memory.segments]
        return self._peers[name][self._local.rank]

    def common(self, name: str, size: int, dtype: DTypeLike) -> np.ndarray:
        """One array of zeros for the whole node, the same memory on each of its ranks. Collective as `shared`."""
        leader = self._local.rank == 0
        self.shared(name, size if leader else 0, dtype)
        return self._peers[name][0]

    def peers(self, name: str) -> list[np.ndarray]:
        """The shared buffer ``name`` of every rank of the node, in rank order."""
        return self._find(self._peers, name)

    def meet(self, name: str) -> Any:
        """A barrier of the node's ranks in the memory of ``name``, a request: what each wrote before, all see after."""
        return self._find(self._memory, name).meet()

    def barrier(self, name: str) -> tuple[Any, ...]:
        """The same barrier for a kernel that waits by itself (`mpiddl.kernels.node.meet`); () where there is none."""
        return self._find(self._memory, name).barrier

    def free(self, name: str) -> None:
        """Give one buffer back; collective over the node if it is shared. Views of it must not be touched afterwards."""
        if self._private.pop(name, None) is None:
            memory = self._find(self._memory, name)
            del self._memory[name], self._peers[name]
            memory.Free()

    def Free(self) -> None:
        """Give everything back."""
        for name in [*self._private, *reversed(self._memory)]:
            self.free(name)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Give everything back if the block ends with an exception, one on each rank of the node. Collective then."""
        try:
            yield
        except Exception:
            self.Free()
            raise

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:  # ranks that failed alone would wait here for ever; the communicator frees what is left
            self.Free()

    def _new(self, name: str, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ShapeError(f"size: got {size!r}, expected a whole number of elements, 0 or more")
        if name in self._private or name in self._memory:
            raise UsageError(f"name: got {name!r}, expected a new name, because this arena already has a buffer {name!r}")

    def _find(self, where: dict[str, Any], name: str) -> Any:
        if name not in where:
            raise UsageError(f"name: got {name!r}, expected the name of a shared buffer: "
                             f"{', '.join(where) or 'there are none'}")
        return where[name]
