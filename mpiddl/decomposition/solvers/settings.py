"""The settings of the solver ``vr``."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from mpiddl.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """Options of the solver ``vr``. None means that the value is chosen from the data.

    Attributes
    ----------
    fraction : float
        Share of the rows of a rank that the mini-batches between two snapshots use.
    batch : int or None
        Rows in a mini-batch.
    step : float
        Factor of the automatic step size.
    sync_every : int or None
        Steps between two averages over the ranks. None means one average at the end.
    sync_delay : int
        Number of averages by which each average is delayed.
    snapshot : float
        Share of the rows that a snapshot (W~ and R) is computed from. Later snapshots use all rows.
    """

    fraction: float = 0.125
    batch: int | None = None
    step: float = 1.0
    sync_every: int | None = None
    sync_delay: int = 0
    snapshot: float = 1.0

    def check(self) -> None:
        """Raise a `UsageError` for what makes no sense."""
        whole = {"batch_size": (self.batch, 1), "sync_every": (self.sync_every, 1), "sync_delay": (self.sync_delay, 0)}
        for name, (value, least) in whole.items():
            if value is None and name != "sync_delay":
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name}: got {value!r}, expected a whole number from {least}")
        if not isinstance(self.snapshot, Real) or isinstance(self.snapshot, bool) or not 0 < self.snapshot <= 1:
            raise UsageError(f"snapshot_fraction: got {self.snapshot!r}, expected a number above 0 and at most 1")
        for name, number in {"vr_fraction": self.fraction, "step_size": self.step}.items():
            if isinstance(number, bool) or not isinstance(number, Real) or not 0 < number < float("inf"):
                raise UsageError(f"{name}: got {number!r}, expected a number above 0")
