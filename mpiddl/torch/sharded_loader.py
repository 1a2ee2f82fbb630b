"""A `DataLoader` whose batches are divided over ranks: each rank loads and computes its part of every batch.

Rank 0 draws the order of an epoch, with the loader's own sampler, and tells the others. A loader of its own on each rank, with
the same data set, workers and functions, then loads this rank's part of each batch. A loader whose batches are not made of
indices (an iterable data set, or one that yields whole batches) is iterated whole on every rank, and each rank keeps its part
of the rows of every tensor; if tensors have no common number of rows, the batch stays whole.

A rank that has no part in a small batch gets its first rows, which count nothing: the program does the same on all ranks.
Strategies without lockstep do not need that: there, the rank leaves out the batch.

Cost: a broadcast of the indices of an epoch, 8 bytes a sample.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from mpiddl.layout import block_of_at_least, used_parts
from mpiddl.torch.coordinator import Coordinator

MOST_INDICES = 100_000_000
"""Samples of an epoch whose order is drawn in advance. A longer epoch is divided as an iterable data set is."""

AHEAD = ("accelerate",)
"""Packages that read one batch ahead, to know the last one of an epoch."""

COPIED = ("dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
          "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")
"""Arguments of a loader that its copy takes over, where the torch version has them."""


class Shares:
    """The batches of an epoch, as a batch sampler: what this rank computes of each."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Turns:
    """Tells the coordinator of a batch when its turn comes: when it is read, or one batch later if the loader is read ahead.

    A program that reads one batch ahead uses a batch when it has read the next one. ``wanted()`` is called when it wants the
    next one.
    """

    def __init__(self, coordinator: Coordinator, ahead: bool):
        self._coordinator, self._ahead, self._read = coordinator, ahead, False
        self._held: list[tuple[int, int, int]] = []

    def batch(self, samples: int, number: int, ranks: int) -> None:
        """A batch comes next: see `Coordinator.batch`."""
        self._held.append((samples, number, ranks))
        if not self._ahead:
            self.wanted()

    def wanted(self) -> None:
        """What the program has read before is used next."""
        held, self._held, self._read = self._held, [], True
        for each in held:
            self._coordinator.batch(*each)

    def left(self, ended: bool) -> None:
        """See `Coordinator.epoch_left`."""
        def leave() -> None:
            self.wanted()
            self._coordinator.epoch_left(ended)

        if self._ahead and self._read and ended:
            self._coordinator.postpone(leave)
        elif ended:
            leave()
        else:
            self._coordinator.epoch_left(ended)


class Sharded:
    """A user's loader, divided over the ranks of ``coordinator``. Iterate it once an epoch."""

    def __init__(self, loader: DataLoader[Any], coordinator: Coordinator):
        self.loader, self._coordinator = loader, coordinator
        self._shares, self._seeded = Shares(), False
        self._copy: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self.epoch()

    def epoch(self, reader: str = "") -> Iterator[Any]:
        """This rank's parts of the batches of an epoch, for a module of the name ``reader``."""
        return self._epoch(reader, self._drawn_early() if self._indexed() and _in_main_thread() else None)

    def _drawn_early(self) -> list[Any] | None:
        """Draw what torch draws in ``iter(loader)``: a seed for the workers, unless they live on, and with workers the batches,
        which are returned."""
        if not self._seeded:
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        self._seeded = self.loader.persistent_workers
        return list(self.loader.batch_sampler or ()) if self.loader.num_workers else None

    def _epoch(self, reader: str, drawn: list[Any] | None) -> Iterator[Any]:
        turns = Turns(self._coordinator, ahead=reader.partition(".")[0] in AHEAD)
        if not _in_main_thread():  # ranks would meet in no common order
            self._coordinator.facts.note("a loader that was iterated in a thread was not divided: every rank got all its "
                                         "batches")
            return (yield from original_iter(self.loader))
        yield from self._by_index(turns, drawn) if self._indexed() else self._by_rows(turns)

    def _indexed(self) -> bool:
        """Whether batches are made of indices that are known before the epoch."""
        sampler: Any = self.loader.batch_sampler
        if isinstance(self.loader.dataset, IterableDataset) or sampler is None:
            return False
        try:
            return len(sampler) * (self.loader.batch_size or 1) <= MOST_INDICES
        except TypeError:
            return False

    def _by_index(self, turns: Turns, drawn: list[Any] | None) -> Iterator[Any]:
        coordinator, size, rank = self._coordinator, self._coordinator.comm.size, self._coordinator.comm.rank
        after = self._state()
        batches, state = coordinator.epoch_begins(lambda: (_packed(drawn or self._drawn(after)), after.numpy()))
        least, shares = coordinator.least, []
        for batch in _unpacked(batches):
            own = part(batch, size, rank, least)
            shares.append((own or batch[: self._stand_in()], len(own), used_parts(len(batch), size, least)))
        self._shares.batches = [share for share, _, _ in shares if share]
        loaded = iter(self._plain())
        self._generator().set_state(torch.from_numpy(state))
        ended = False
        try:
            for number, (share, samples, ranks) in enumerate(shares):
                turns.batch(samples, number, ranks)
                if share:
                    yield next(loaded)
                    turns.wanted()
            ended = True
        finally:
            turns.left(ended)

    def _stand_in(self) -> int:
        """Rows of a batch that a rank without a part of it computes."""
        return self._coordinator.least if self._coordinator.strategy.lockstep else 0

    def _generator(self) -> torch.Generator:
        return self.loader.generator or torch.default_generator

    def _state(self) -> torch.Tensor:
        return self._generator().get_state()

    def _drawn(self, after: torch.Tensor) -> list[Any]:
        """The batches of an epoch, from the random numbers that the loader itself would take.

        The generator is as before the call when it returns; ``after`` gets its state as the loader would leave it.
        """
        before, sampler = after.clone(), self.loader.batch_sampler
        assert sampler is not None
        found = list(sampler)
        after.copy_(self._state())
        self._generator().set_state(before)
        return found

    def _by_rows(self, turns: Turns) -> Iterator[Any]:
        coordinator = self._coordinator
        coordinator.epoch_begins(lambda: None)
        ended = False
        try:
            for number, batch in enumerate(original_iter(self.loader)):
                rows = common_rows(batch)
                if rows is None:
                    coordinator.facts.note(f"a batch of type {type(batch).__name__} has no common number of rows: it was not "
                                           "divided, all ranks computed it")
                    turns.batch(1, number, 1)
                    yield batch
                    turns.wanted()
                    continue
                kept = block_of_at_least(rows, coordinator.comm.size, coordinator.comm.rank, coordinator.least)
                turns.batch(len(kept), number, used_parts(rows, coordinator.comm.size, coordinator.least))
                share = slice(kept.start, kept.stop) if kept else slice(0, self._stand_in())
                if share.stop:
                    yield cut(batch, rows, share)
                    turns.wanted()
            ended = True
        finally:
            turns.left(ended)

    def _plain(self) -> DataLoader[Any]:
        """The loader of this rank's parts; it is kept, and with it the workers that live on."""
        if self._copy is None:
            given = {name: getattr(self.loader, name) for name in COPIED if hasattr(self.loader, name)}
            self._copy = PlainLoader(batch_sampler=self._shares, **given)
        return self._copy


class PlainLoader(DataLoader[Any]):
    """A loader of ours, which nothing divides once more."""


original_iter = DataLoader.__iter__
"""As torch defines it."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def part(batch: Sequence[Any], size: int, rank: int, least: int = 1) -> list[Any]:
    """The part of a batch that a rank computes: parts are contiguous, and their lengths differ by one at most.

    A part has ``least`` samples or more, or none, unless the batch has fewer.

    Examples
    --------
    >>> [part([7, 3, 5], 2, rank) for rank in range(2)]
    [[7, 3], [5]]
    """
    kept = block_of_at_least(len(batch), size, rank, least)
    return list(batch[kept.start : kept.stop])


def _packed(batches: list[Any]) -> Any:
    """Batches of integers as one tensor, which travels faster than many lists."""
    try:
        flat = torch.tensor([index for batch in batches for index in batch], dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        return batches
    if any(type(index) is not int for batch in batches[:1] for index in batch):
        return batches
    return flat.numpy(), [len(batch) for batch in batches]


def _unpacked(packed: Any) -> list[Any]:
    if isinstance(packed, list):
        return packed
    flat, lengths = packed
    numbers, begin, found = flat.tolist(), 0, []
    for length in lengths:
        found.append(numbers[begin : begin + length])
        begin += length
    return found


def common_rows(batch: Any) -> int | None:
    """The length of the first dimension that all tensors in nested lists, tuples and dicts have; None if there is none."""
    lengths = {leaf.shape[0] if leaf.ndim else None for leaf in _leaves(batch)}
    return lengths.pop() if len(lengths) == 1 else None


def _leaves(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)


def cut(batch: Any, rows: int, kept: slice) -> Any:
    """Rows ``kept`` of all tensors in a batch, and of lists that have one entry a row."""
    if isinstance(batch, torch.Tensor):
        return batch[kept]
    if isinstance(batch, dict):
        return type(batch)({name: cut(value, rows, kept) for name, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cut(value, rows, kept) for value in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == rows and not any(True for _ in _leaves(batch)):
            return batch[kept]
        return type(batch)(cut(value, rows, kept) for value in batch)
    return batch
