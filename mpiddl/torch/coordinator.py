"""The steps of a program on all ranks: what is exchanged, and when.

A program is the same on every rank. Its events - an epoch begins, a batch comes, a gradient is complete, an optimiser steps,
the program is over - come in the same order, but not always in the same number: a rank may leave a loop because of its own
loss. At each event that communicates, ranks first meet (`mpiddl.torch.meeting`). Those that are ahead take part without
samples, and get the parameters that the others' steps lead to, so that all replicas stay equal.

Cost: a meeting for each gradient, and the strategy's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from mpiddl.errors import MismatchError
from mpiddl.strategies.base import Strategy
from mpiddl.torch.backward_pass import BackwardPass
from mpiddl.torch.closures import called_first
from mpiddl.torch.facts import Facts
from mpiddl.torch.meeting import LAST, Event, Passing, Row, behind, different, drawn, meet, parted, weights
from mpiddl.torch.other_parameters import OtherParameters
from mpiddl.torch.parameter_set import ParameterSet
from mpiddl.torch.parameter_sets import ParameterSets
from mpiddl.torch.strategy_state import SUFFIX
from mpiddl.transport.comm import Comm

T = TypeVar("T")

ALONE = "there were gradients of parameters that belong to no optimiser"

UNKNOWN = "an error that the program has caught"
"""Words for the error of a backward pass that is noticed when something else begins."""


class Coordinator:
    """What the ranks of one program agree on.

    Parameters
    ----------
    comm : Comm
        For this alone.
    strategy : Strategy
        Resolved for these ranks.
    steps : int
        Steps of the whole run, for strategies that plan; 0 if not known.

    Attributes
    ----------
    sets : ParameterSets
    facts : Facts
        What was found in the program, and what was done.
    least : int
        Samples that a rank needs at least, if it has any in a batch.
    share : float
        Of this rank in the samples of a forward pass, where ranks have different ones.
    over : bool
        The program is over on all ranks: nothing is exchanged any more.
    """

    def __init__(self, comm: Comm, strategy: Strategy, steps: int = 0):
        self.comm, self.strategy, self.facts = comm, strategy, Facts()
        self.sets, self._others = ParameterSets(comm, strategy), OtherParameters()
        self._steps, self._epoch, self._batch = steps, 0, 0
        self._samples, self._sums = 0, False
        self._pass, self._after, self._passes = BackwardPass(), 0.0, False
        self._overlapped: ParameterSet | None = None
        self._sharded, self._used = 0, False
        self._postponed: list[Callable[[], None]] = []
        self._summed, self._differs = False, False
        self._loaded: str | None = None
        self._total, self.least, self._ranks, self.share = comm.size, 1, 1, 1 / comm.size
        self.over = False

    # What the program does

    def add(self, optimiser: torch.optim.Optimizer) -> None:
        """Take part in the steps of an optimiser. What it needs is built with the next event."""
        self.sets.add(optimiser, self.seen)

    def look(self, modules: Iterable[torch.nn.Module]) -> None:
        """Also sum gradients of parameters of ``modules`` that belong to no optimiser, if they get some in a divided loader."""
        self._others.look(modules, self.sets, self._seen_without_optimiser)

    def find(self, optimiser: Any) -> ParameterSet | None:
        """The set of an optimiser, if there is one."""
        return next((each for each in self.sets if each.optimiser is optimiser), None)

    def epoch_begins(self, draw: Callable[[], T]) -> T:
        """Return what ``draw`` returns on rank 0: the batches of an epoch. Collective."""
        if self.over:
            return draw()
        self._catch_up_postponed()
        self._epoch, self._batch, self._used = self._epoch + 1, -1, True
        self.start()
        self.sets.hide_common()
        _, active = self._arrive(Event.EPOCH)
        self._sharded += 1
        return drawn(self.comm, active[0], draw)

    def batch(self, samples: int, number: int, ranks: int) -> None:
        """Batch ``number`` of an epoch has come, divided over ``ranks`` ranks, with ``samples`` that count for this one."""
        self._ranks = ranks
        self._others.updated()
        self.sets.hide_common()
        for each in self.sets:
            each.exchanged = False
        self._batch = max(self._batch + 1, number)
        self._samples = samples if self._used else self._samples + samples
        self._used = False

    def epoch_left(self, ended: bool) -> None:
        """The batches of an epoch are used up, or the program has left its loop before. In the first case, and in lockstep, it
        returns when all ranks are here."""
        self._sharded = max(0, self._sharded - 1)
        self._others.updated()
        if ended and not self.over and self.strategy.lockstep:
            self._batch = LAST
            self._arrive(Event.EPOCH_END)
            self.sets.show_common()

    def postpone(self, call: Callable[[], None]) -> None:
        """Call it when the batch that the program has read last was used: after its step, or when the next epoch begins."""
        self._postponed.append(call)

    def _catch_up_postponed(self) -> None:
        while self._postponed:
            self._postponed.pop(0)()

    def failed(self, error: Exception) -> None:
        """A backward pass has raised an error."""
        self._end_overlap(failure=f"{type(error).__name__}: {error}")
        self._pass.running = self._summed = False

    def loss(self, sums: bool) -> None:
        """A backward pass begins, of a loss that is a sum over samples or their mean."""
        self._sums, self._summed = sums and bool(self._sharded), False
        scaled = self._sums and not self.over and self.strategy.sums_gradients
        taken: set[int] = set()
        for each in self.sets:
            each.scale_incoming(self._ranks if scaled else 1, taken)

    def seen(self, parameters: ParameterSet, tensor: torch.Tensor) -> None:
        """A gradient of a set was accumulated."""
        parameters.touched = True
        if self._pass.begins():
            self._pass.at_end(self._gradient)
            self._overlap(parameters)
        if self._overlapped is not None:
            parameters.final(tensor)

    def _seen_without_optimiser(self, number: int) -> None:
        """A gradient of a parameter was accumulated that may be in no set."""
        if self.over or not self._sharded or not self._others.finds(number, self.sets):
            return
        if not self.strategy.sums_gradients:
            self.facts.note(f"{ALONE}: each rank has those of its own samples")
        elif self._overlapped is not None:
            self.facts.note(f"{ALONE} that came late: in their first batch, each rank has those of its own samples")
        elif self._pass.begins():
            self._pass.at_end(self._gradient)

    def _overlap(self, parameters: ParameterSet) -> None:
        """Exchange the gradients of the pass that begins while it runs, if they are all of one set and all ranks do so.

        Not where passes may be divided, which sum gradients themselves.
        """
        self._end_overlap(failure=UNKNOWN, dropped=True)  # an earlier pass
        alone = [each for each in self.sets if not each.retired] == [parameters]
        divided = self._passes and not self._sharded
        others = self._others.possible or self._others.found
        if self.over or divided or others or not alone or not parameters.overlaps() or parameters.changed():
            return
        rows, active = self._arrive(Event.OVERLAP)
        if len(active) == self.comm.size:
            self._same_settings(rows, active)
            before, self._after = weights(rows, active, self.comm.rank)
            self._total, self._overlapped = sum(row.samples for row in rows) or self.comm.size, parameters
            parameters.begin(before)

    def _end_overlap(self, failure: str = "", dropped: bool = False) -> None:
        """The backward pass is over, or has raised ``failure``. Collective if its gradients are exchanged while it runs."""
        if self._overlapped is None:
            return
        parameters, self._overlapped = self._overlapped, None
        failures = self.comm.allgather(failure) if parameters.end(self._after, bool(failure), dropped) else []
        if dropped:
            return
        parameters.exchanged = True
        self._exchanged()
        if failures and not failure:
            rank, words = next((rank, words) for rank, words in enumerate(failures) if words)
            raise MismatchError(f"program: a backward pass raised an error on rank {rank} ({words}), expected the same on all "
                                "ranks")

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, something else divides batches: forward passes are left alone."""
        self._sharded += 1
        try:
            yield
        finally:
            self._sharded -= 1

    def in_batch(self) -> bool:
        """Whether this rank computes its part of a batch of a divided loader."""
        return not self.over and bool(self._sharded)

    def divides_passes(self) -> bool:
        """Whether forward passes are divided over ranks now: not inside a loader whose batches are divided."""
        return not self.over and not self._sharded

    def pass_begins(self, checksum: int) -> Passing:
        """A forward pass with samples of this ``checksum`` is next. Collective."""
        self.start()
        self._passes = True
        rows, active = self._arrive(Event.FORWARD, checksum)
        self._batch += 1
        if len(active) < self.comm.size:
            return Passing.ALONE
        total = sum(row.samples for row in rows) if all(row.samples for row in rows) else 0
        self.share = self._samples / total if total else 1 / self.comm.size
        return Passing.SAME if len({row.settings for row in rows}) == 1 else Passing.DIFFERENT

    def pass_differs(self) -> None:
        """The gradients of the pass are this rank's own: they are exchanged after the backward pass."""
        self._differs = True

    def pass_differentiated(self) -> None:
        """All ranks differentiate a pass whose gradients are summed before they are accumulated. Collective.

        Raises
        ------
        MismatchError
            Other ranks do something else. On all ranks.
        """
        rows, active = self._arrive(Event.BACKWARD)
        if len(active) < self.comm.size:
            raise parted(rows, active)
        self._summed = True

    def _gradient(self) -> None:
        """A backward pass is over."""
        self._pass.running = False
        if self._overlapped is not None:
            self._end_overlap()
            return
        if self._summed and not self._differs:
            self._untouched()
            return
        self._differs = False
        if self.over or not self.strategy.sums_gradients:
            return
        self.start()
        self._exchange_or_idle()

    def _exchange_or_idle(self) -> None:
        if not self.strategy.sums_gradients:
            if self.strategy.lockstep:
                self._untouched()
                rows, active = self._arrive(Event.STEP)
                self.sets.join_step([rows[rank] for rank in active], self._sums)
            return
        rows, active = self._arrive(Event.GRADIENT)
        self._exchange(rows, active)
        self._exchanged()

    def _exchanged(self) -> None:
        self._untouched()
        self._used = True
        if not self._sharded:
            self._batch += 1

    def _untouched(self) -> None:
        for each in self.sets:
            each.touched = False

    def _exchange(self, rows: list[Row], active: list[int]) -> None:
        touched, (before, after) = 0, weights(rows, active, self.comm.rank)
        for rank in active:
            touched |= rows[rank].touched
        exchanged = [each for number, each in enumerate(self.sets) if touched >> number & 1]
        if any(rows[rank].others for rank in active) and self._others_join() and self._others not in exchanged:
            exchanged.append(self._others)
        self._others.possible = False
        for each in exchanged:
            each.exchange(before, after)
            each.exchanged = True
        if self._others in exchanged and self.comm.rank in active:
            self._others.used()
        self._total = sum(rows[rank].samples for rank in active) or self.comm.size

    def _others_join(self) -> bool:
        """Parameters without an optimiser become a set. Returns whether they are the same on all ranks. Collective."""
        joined = self._others.join(self.comm, self.strategy, self.sets, self.seen, self._ranks if self._sums else 1)
        self.facts.note(f"{ALONE}: they were summed over ranks as well" if joined else
                        f"{ALONE}, and differ between ranks: each rank has those of its own samples")
        return joined

    # Meetings

    def _row(self, event: Event, checksum: int | None = None) -> Row:
        settings = self.sets.checksum_of_settings() if checksum is None else checksum
        return Row(event, self._epoch, self._batch, self._samples, self.sets.touched(), settings, int(self._sums),
                   int(bool(self._others.found)), tuple(each.steps for each in self.sets))

    def _arrive(self, event: Event, checksum: int | None = None) -> tuple[list[Row], list[int]]:
        """Meet until this rank is among those that act. Returns the rows of all ranks, and who acts."""
        self._end_overlap(failure=UNKNOWN, dropped=True)  # its pass has raised an error
        while True:
            rows = meet(self.comm, self._row(event, checksum))
            active = behind(rows)
            self.sets.catch_up(rows, active[0])
            if self.comm.rank in active:
                self.sets.put_back()
                if event in (Event.GRADIENT, Event.STEP):
                    self._same_settings(rows, active)
                return rows, active
            self._take_part(rows, active)

    def _take_part(self, rows: list[Row], active: list[int]) -> None:
        """Do what the active ranks do, without samples."""
        event = Event(rows[active[0]].event)
        if event == Event.START:
            raise different(rows, active)
        if event == Event.BACKWARD:
            raise parted(rows, active)
        if event == Event.EPOCH:
            drawn(self.comm, active[0], None)
        if event == Event.SAVE:
            self._write(None)
        if event == Event.EPOCH_END:
            self.sets.common()
        if event == Event.GRADIENT:
            self.sets.set_aside()
            self._same_settings(rows, active)
            self._exchange(rows, active)
        if event == Event.STEP:
            self.sets.set_aside()
            self._same_settings(rows, active)
            self.sets.join_step([rows[rank] for rank in active], self._sums)

    def _same_settings(self, rows: list[Row], active: list[int]) -> None:
        if self.sets.same_settings(rows, active):
            self.facts.note("the learning rates or other settings of an optimiser differed between ranks: those of rank "
                            f"{active[0]} were used")

    def start(self) -> None:
        """Build what new or changed sets need, with the values of rank 0 in their parameters. Collective if there are any."""
        if self.over or not any(each.wanted() for each in self.sets.waiting()):
            return
        rows, active = self._arrive(Event.START)
        self.sets.build(self.seen, self._steps, rows, active)
        if self.strategy.lockstep and (sentence := self.sets.read_state(self._loaded)):
            self.facts.note(sentence)
        self._loaded = None

    # Steps of optimisers

    def step_begins(self, each: ParameterSet, args: Any, options: dict[str, Any]) -> Any:
        """The optimiser of a set is about to step, with these arguments. Returns others, or None for the same."""
        if self.over or each.replaying:
            return None
        if not each.exchanged and (not each.started or each.changed()):  # an exchange has looked at it
            self.start()
        if self.strategy.sums_gradients:
            if self._sharded and not each.exchanged and not each.retired:  # no backward pass has given its gradients
                each.touched = True
                self._exchange_or_idle()
            return None
        self.sets.hide_common()
        changed = called_first(args, options)
        samples = self._own_samples()
        total = samples * self.comm.size
        self._untouched()
        each.touched = True
        if self.strategy.lockstep:
            rows, active = self._arrive(Event.STEP)
            total = sum(rows[rank].samples for rank in active) or self.comm.size
        self._total = total
        for part in each.local:
            part.before_step(samples, total, self._sums)
        return changed

    def step_ends(self, each: ParameterSet) -> None:
        """The optimiser of a set has stepped."""
        if self.over or each.replaying:
            return
        each.steps += 1
        each.exchanged = False
        self.facts.step(each.fact)
        for part in each.local:
            part.after_step(self._own_samples(), self._total)
        self._used = True
        optimisers = [other for other in self.sets if not other.retired and other is not self._others]
        if len({other.steps for other in optimisers}) == 1:  # all optimisers have stepped
            self._catch_up_postponed()

    def _own_samples(self) -> int:
        return self._samples if self._sharded else self._samples or 1

    # Checkpoints of the program

    def saved(self, content: Any, path: str) -> None:
        """The program has written ``content`` to a file. If parameters are in it, write the strategy's state. Collective."""
        self._catch_up_postponed()
        if not self.over and self.strategy.lockstep and self.sets.in_checkpoint(content):
            _, active = self._arrive(Event.SAVE)
            self._write(path if 0 in active else None)

    def _write(self, path: str | None) -> None:
        if trouble := self.sets.write_state(path):
            self.facts.note(trouble)

    def loaded(self, path: str) -> None:
        """The program has read a file. With the next `start`, the strategy continues from it if it is a checkpoint."""
        if os.path.exists(path + SUFFIX):
            self._loaded = path

    def finish(self) -> None:
        """The program is over on this rank. Returns when it is over on all ranks. Collective."""
        self._catch_up_postponed()
        self._others.updated()
        self._arrive(Event.END)
        self.sets.hide_common()
        self.sets.clean_up()
        for each in self.sets:
            for part in each.local:
                part.finish()
        self.over = True
        if self.strategy.sums_gradients and len(set(self.comm.allgather(tuple(each.checksum() for each in self.sets)))) > 1:
            self.facts.note("at the end the parameters differ between ranks: results are those of rank 0")
