"""The error tree. Every message names the argument, what came, what was wanted and, where there is one, the remedy."""

from __future__ import annotations


class MpiddlError(Exception):
    """Root of every error that mpiddl raises on purpose.

    ``exit_code`` is what the commands exit with: 2 for a mistake in how they were called, 1 for a run that failed.
    """

    exit_code = 1


class UsageError(MpiddlError, ValueError):
    """An argument, flag or job-file key that cannot be taken as it came."""

    exit_code = 2


class ShapeError(UsageError):
    """Arrays whose shapes or dtypes do not fit together."""


class PlacementError(UsageError):
    """Shards that cannot be dealt to the ranks as asked."""


class DataError(MpiddlError, ValueError):
    """A data file that is missing, damaged or holds values outside what it promises."""


class OutputError(MpiddlError):
    """A file of a run, or the folder for compiled kernels, that cannot be written."""


class CheckpointError(MpiddlError):
    """A checkpoint that cannot be read or written."""


class CommError(MpiddlError, RuntimeError):
    """Communication that cannot start or go on."""


class DecodeError(CommError):
    """A coded message that no rank of the job has sent, or that is not one of its code."""


class MismatchError(CommError):
    """Ranks that were given different things where the same was wanted; the message lists them."""

    exit_code = 2


class TransportError(CommError):
    """A way of moving messages that does not work on these hosts; raised on all ranks."""


class SharedMemoryError(CommError):
    """Ranks of a node that cannot have memory in common; raised on all of them."""


DIVERGED = "training has diverged"
"""Text of errors that are caused by the settings of the job, not by the machine."""


class ConvergenceError(MpiddlError):
    """An iteration that did not reach its tolerance; ``best`` carries the best result so far."""

    def __init__(self, message: str, best: object = None):
        super().__init__(message)
        self.best = best
