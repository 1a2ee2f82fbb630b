"""Who owns what: rows to shards, shards to ranks, positions of an epoch to batches. Integers only.

Rows are cut into S contiguous *virtual shards*, whatever the number of ranks, and everything random or
rounded (the validation split, the shuffling, the batches) is defined over shards. A rank merely holds a run
of them, so the samples of a step are the same on 1 rank and on 24.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .errors import PlacementError, UsageError

DEFAULT_SHARDS = 16  # divides evenly among 1, 2, 4, 8 and 16 ranks


def shard_count(size: int, shards: int | None = None) -> int:
    """Return how many virtual shards ``size`` ranks share.

    Parameters
    ----------
    size : int
        Number of ranks.
    shards : int, optional
        The user's own number, kept as it is. By default 16 up to 16 ranks and above that the next multiple of
        ``size``.

    Raises
    ------
    PlacementError
        If ``shards`` is below 1 or below ``size``; the same on every rank.

    Examples
    --------
    >>> shard_count(3), shard_count(17), shard_count(3, 6)
    (16, 17, 6)
    """
    if shards is None:
        return DEFAULT_SHARDS if size <= DEFAULT_SHARDS else size
    if shards < 1:
        raise PlacementError(f"shards: got {shards}, expected 1 or more")
    if shards < size:
        raise PlacementError(
            f"shards: got {shards} for {size} ranks, expected {size} or more, one a rank; or start at most {shards} ranks"
        )
    return shards


def check_branches(shards: int, size: int) -> None:
    """Refuse numbers with which a rank would not hold a whole branch of the binary tree over the shards.

    Raises
    ------
    PlacementError
        Unless ``shards`` is a power of two that ``size`` divides; the same on every rank.

    Examples
    --------
    >>> check_branches(16, 4)
    >>> check_branches(16, 3)
    Traceback (most recent call last):
        ...
    mpiddl.errors.PlacementError: reproducible: got 16 shards on 3 ranks, expected a divisor of the shards: 1, 2, 4, 8 or 16
    """
    if shards & (shards - 1):
        below = 1 << shards.bit_length() - 1
        raise PlacementError(f"reproducible: got {shards} shards, expected a power of two, such as {below} or {2 * below}")
    if shards % size:
        fitting = [str(1 << level) for level in range(shards.bit_length())]
        more = ", or more shards (of which come other bits)" if size > shards else ""
        wanted = " or ".join(filter(None, [", ".join(fitting[:-1]), fitting[-1]]))
        raise PlacementError(
            f"reproducible: got {shards} shards on {size} ranks, expected a divisor of the shards: {wanted}{more}"
        )


def block_size(n: int, parts: int, part: int) -> int:
    """Return how many of ``n`` items part ``part`` of ``parts`` gets: ceil((n - part) / parts)."""
    return (n - part + parts - 1) // parts if part < n else 0


def block(n: int, parts: int, part: int) -> range:
    """Return the contiguous items that part ``part`` of ``parts`` gets; sizes differ by at most one.

    Examples
    --------
    >>> [block(5, 3, part) for part in range(3)]
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    start = part * (n // parts) + min(part, n % parts)
    return range(start, start + block_size(n, parts, part))


def rank_shards(shards: int, size: int, rank: int) -> range:
    """Return the contiguous run of shards that ``rank`` of ``size`` holds: none if there are too few.

    A checkpoint written with 16 shards may thus be resumed on 24 ranks, eight of which hold none.
    """
    return block(shards, size, rank)


def check_batch(batch: int, train_rows: int) -> None:
    """Refuse a global batch that the training rows cannot fill once.

    Raises
    ------
    UsageError
        If ``batch`` is below 1 or above ``train_rows``; the same on every rank.
    """
    if batch < 1:
        raise UsageError(f"batch: got {batch}, expected 1 or more")
    if batch > train_rows:
        raise UsageError(
            f"batch: got {batch}, expected at most {train_rows}, the rows to train on"
        )


@dataclass(frozen=True)
class Layout:
    """How ``rows`` rows are cut into shards, split for validation and walked in batches.

    Position g of an epoch belongs to shard g % S, at index g // S of that shard's permutation of the epoch.
    So a batch holds exactly ``batch`` rows, but for a ragged last one, spread over the shards as evenly as
    integers allow, and every training row is drawn once an epoch.

    Parameters
    ----------
    rows : int
        Rows in all, N.
    shards : int
        Virtual shards, S (see `shard_count`).
    batch : int
        Rows of a global batch, B.
    validation : float
        Fraction of the rows held back from training, in [0, 1); at least one row is left to train on.

    Raises
    ------
    UsageError
        If an argument is outside its range; the same on every rank.

    Examples
    --------
    >>> layout = Layout(rows=10, shards=4, batch=4)
    >>> layout.steps_per_epoch
    3
    >>> [layout.step_range(2, shard) for shard in range(4)]  # the ragged last batch: two rows
    [range(2, 3), range(2, 3), range(2, 2), range(2, 2)]
    """

    rows: int
    shards: int
    batch: int = 1
    validation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rows", "shards", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected 1 or more")
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation: got {self.validation}, expected a fraction from 0 to below 1")

    @cached_property
    def validation_rows(self) -> int:
        """Rows held back from training, over all shards."""
        return min(round(self.validation * self.rows), self.rows - 1)

    @cached_property
    def train_rows(self) -> int:
        """Rows drawn once an epoch, over all shards."""
        return self.rows - self.validation_rows

    @property
    def steps_per_epoch(self) -> int:
        """Global batches an epoch, the ragged last one included."""
        return -(-self.train_rows // self.batch)

    def shard_rows(self, shard: int) -> range:
        """Return the rows of the source that make up ``shard``: a contiguous block."""
        return block(self.rows, self.shards, shard)

    def train_count(self, shard: int) -> int:
        """Return how many rows of ``shard`` are trained on; the rest of its rows are for validation."""
        return block_size(self.train_rows, self.shards, shard)

    def batch_rows(self, step: int) -> int:
        """Return the number of rows in the global batch of ``step``, counted from 0 within the epoch."""
        return min((step + 1) * self.batch, self.train_rows) - step * self.batch

    def step_range(self, step: int, shard: int) -> range:
        """Return which indices of ``shard``'s permutation of the epoch the global batch of ``step`` takes."""
        low = step * self.batch
        high = min(low + self.batch, self.train_rows)
        return range(block_size(low, self.shards, shard), block_size(high, self.shards, shard))

    def max_batch_rows(self, shards: Iterable[int]) -> int:
        """Return the most rows that a holder of ``shards`` can meet in one batch: the size of its buffers."""
        held = list(shards)
        fair = len(held) * -(-self.batch // self.shards)
        return min(fair, self.batch, sum(self.train_count(shard) for shard in held))

    def check_shards(self, shards: Iterable[int]) -> list[int]:
        """Return ``shards`` in ascending order.

        Raises
        ------
        PlacementError
            If a shard is outside 0..S-1 or named twice; on the ranks that were given it.
        """
        held = sorted(shards)
        if held and not 0 <= held[0] <= held[-1] < self.shards:
            raise PlacementError(f"shards: got {held}, expected numbers from 0 to {self.shards - 1}")
        if len(set(held)) < len(held):
            raise PlacementError(f"shards: got {held}, expected each once")
        return held
