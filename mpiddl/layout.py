"""Distribution of rows to shards, shards to ranks, and rows of an epoch to batches. Integers only.

Rows are divided into S contiguous *virtual shards*, for any number of ranks. Everything random or rounded (validation split,
shuffling, batches) is defined per shard. A rank holds a contiguous range of shards, so the samples of a step are the same on 1
rank and on 24.
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
        Number that the user asks for. The default is 16 for up to 16 ranks, and ``size`` above that.

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
            f"shards: got {shards} for {size} ranks, expected {size} or more, one per rank; or start at most {shards} ranks"
        )
    return shards


def check_branches(shards: int, size: int) -> None:
    """Raise a `PlacementError` unless each rank can hold a complete branch of the binary tree over the shards.

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
    mpiddl.errors.PlacementError: reproducible: got 16 shards on 3 ranks, expected 1, 2, 4, 8 or 16 ranks
    """
    if shards & (shards - 1):
        below = 1 << shards.bit_length() - 1
        raise PlacementError(f"reproducible: got {shards} shards, expected a power of two, such as {below} or {2 * below}")
    if shards % size:
        fitting = [str(1 << level) for level in range(shards.bit_length())]
        more = ", or more `shards`, which give other bits" if size > shards else ""
        wanted = " or ".join(filter(None, [", ".join(fitting[:-1]), fitting[-1]]))
        raise PlacementError(
            f"reproducible: got {shards} shards on {size} ranks, expected {wanted} ranks{more}"
        )


def block_bounds(n: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of part ``part`` of ``n`` elements in ``parts`` contiguous parts whose sizes differ by one at most.

    Examples
    --------
    >>> [block_bounds(7, 3, part) for part in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    whole, rest = divmod(n, parts)
    return part * whole + min(part, rest), (part + 1) * whole + min(part + 1, rest)


def ceil_div(n: int, parts: int) -> int:
    """n / parts, rounded up."""
    return -(-n // parts)


def pieces(n: int, most: int) -> list[slice]:
    """``n`` elements in order, ``most`` at a time.

    Examples
    --------
    >>> pieces(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(begin, min(begin + most, n)) for begin in range(0, n, most)]


def block(n: int, parts: int, part: int) -> range:
    """Return the contiguous items that part ``part`` of ``parts`` gets (`block_bounds`).

    Examples
    --------
    >>> [block(5, 3, part) for part in range(3)]
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return range(*block_bounds(n, parts, part))


def used_parts(n: int, parts: int, least: int) -> int:
    """The number of parts, up to ``parts``, so that each of ``n`` items in them has ``least`` or more; 1 if there are fewer."""
    return min(parts, max(n // least, 1))


def block_of_at_least(n: int, parts: int, part: int, least: int) -> range:
    """Return the contiguous items that part ``part`` gets: ``least`` or more, or none, unless there are fewer.

    Examples
    --------
    >>> [block_of_at_least(3, 2, part, 1) for part in range(2)], [block_of_at_least(3, 2, part, 2) for part in range(2)]
    ([range(0, 2), range(2, 3)], [range(0, 3), range(3, 3)])
    """
    used = used_parts(n, parts, least)
    return block(n, used, part) if part < used else range(n, n)


def block_size(n: int, parts: int, part: int) -> int:
    """Return how many of ``n`` items part ``part`` of ``parts`` gets."""
    return len(block(n, parts, part))


def rank_shards(shards: int, size: int, rank: int) -> range:
    """Return the contiguous range of shards that ``rank`` of ``size`` holds; empty if there are too few shards.

    A checkpoint written with 16 shards may be resumed on 24 ranks; eight of them then hold no shard.
    """
    return block(shards, size, rank)


def check_batch(batch: int, train_rows: int) -> None:
    """Raise a `UsageError` if the global batch is larger than the number of training rows.

    Raises
    ------
    UsageError
        If ``batch`` is below 1 or above ``train_rows``; the same on every rank.
    """
    if batch < 1:
        raise UsageError(f"batch: got {batch}, expected 1 or more")
    if batch > train_rows:
        raise UsageError(
            f"batch: got {batch}, expected at most {train_rows}, the number of training rows"
        )


@dataclass(frozen=True)
class Layout:
    """Division of rows into shards, validation rows and batches.

    Position g of an epoch is index g // S in the permutation of shard g % S. Every batch has ``batch`` rows, except the last
    one of an epoch, distributed evenly over the shards. Every training row is used once per epoch.

    Parameters
    ----------
    rows : int
        Number of rows, N.
    shards : int
        Number of virtual shards, S (see `shard_count`).
    batch : int
        Number of rows in a global batch, B.
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
        """Number of validation rows, over all shards."""
        return min(round(self.validation * self.rows), self.rows - 1)

    @cached_property
    def train_rows(self) -> int:
        """Number of training rows, over all shards."""
        return self.rows - self.validation_rows

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in an epoch, including a smaller last one."""
        return -(-self.train_rows // self.batch)

    def shard_rows(self, shard: int) -> range:
        """Return the rows of the source that make up ``shard``: a contiguous block."""
        return block(self.rows, self.shards, shard)

    def train_count(self, shard: int) -> int:
        """Return the number of training rows of ``shard``; its other rows are for validation."""
        return block_size(self.train_rows, self.shards, shard)

    def batch_rows(self, step: int) -> int:
        """Return the number of rows in the global batch of ``step``, counted from 0 within the epoch."""
        return min((step + 1) * self.batch, self.train_rows) - step * self.batch

    def step_range(self, step: int, shard: int) -> range:
        """Return the indices of ``shard``'s permutation that belong to the global batch of ``step``."""
        low = step * self.batch
        high = min(low + self.batch, self.train_rows)
        return range(block_size(low, self.shards, shard), block_size(high, self.shards, shard))

    def filled_steps(self, shards: Iterable[int]) -> list[int]:
        """Return the steps of an epoch, counted from 0, in which ``shards`` have rows.

        Examples
        --------
        >>> Layout(rows=10, shards=4, batch=2).filled_steps([0, 1])
        [0, 2, 4]
        """
        held, steps = list(shards), self.steps_per_epoch
        full = steps - 1 if held and self.batch >= self.shards else 0  # every shard has rows in these
        return [*range(full), *(step for step in range(full, steps) if any(map(len, (self.step_range(step, s) for s in held))))]

    def max_batch_rows(self, shards: Iterable[int]) -> int:
        """Return the largest number of rows of ``shards`` in one batch: the size of the rank's buffers."""
        held = list(shards)
        fair = len(held) * -(-self.batch // self.shards)
        return min(fair, self.batch, sum(self.train_count(shard) for shard in held))

    def check_shards(self, shards: Iterable[int]) -> list[int]:
        """Return ``shards`` in ascending order.

        Raises
        ------
        PlacementError
            If a shard is outside 0..S-1 or given twice; on the ranks with this shard.
        """
        held = sorted(shards)
        if held and not 0 <= held[0] <= held[-1] < self.shards:
            raise PlacementError(f"shards: got {held}, expected shard numbers from 0 to {self.shards - 1}")
        if len(set(held)) < len(held):
            raise PlacementError(f"shards: got {held}, expected each once")
        return held
