"""The sets of parameters of a program, one for each optimiser, and what keeps them equal on all ranks."""

from __future__ import annotations

import contextlib
import gc
import os

import torch

from mpiddl.strategies.base import Strategy
from mpiddl.torch import strategy_state
from mpiddl.torch.local_update import LocalUpdate
from mpiddl.torch.meeting import Row, different
from mpiddl.torch.parameter_set import ParameterSet, Seen, broadcast
from mpiddl.transport.comm import Comm

KEPT = 4
"""With more sets than this, those whose optimisers are gone are looked for."""


class ParameterSets(list[ParameterSet]):
    """In the order in which the program made its optimisers, which is the same on all ranks."""

    def __init__(self, comm: Comm, strategy: Strategy):
        super().__init__()
        self._comm, self._strategy = comm, strategy
        self._aside: list[list[torch.Tensor | None]] | None = None
        self._written: set[str] = set()

    def add(self, optimiser: torch.optim.Optimizer, seen: Seen) -> None:
        """A set for an optimiser, not yet built. ``seen``: as in `ParameterSet.watch`."""
        added = ParameterSet(optimiser)
        if self._strategy.sums_gradients:
            for each in self:
                if each.tensors and {*map(id, each.tensors)} == {*map(id, added.wanted())}:
                    each.retire()
        self.append(added)
        added.watch(seen)

    # Building

    def waiting(self) -> list[ParameterSet]:
        """Those that have to be built, or built again."""
        return [each for each in self if not each.retired and (not each.started or each.changed())]

    def build(self, seen: Seen, steps: int, rows: list[Row], active: list[int]) -> None:
        """Build those that are `waiting`, with the values of rank 0, and drop those whose optimisers are gone on a rank.

        Collective.

        Raises
        ------
        MismatchError
            Only the ranks in ``active`` have something to build, or other parameters. On all ranks.
        """
        if len(self) > KEPT:
            gc.collect()  # an optimiser and its scheduler hold each other
        gone = [each.optimiser is None for each in self]
        theirs = self._comm.allgather((
            [[(str(tensor.dtype), tuple(tensor.shape)) for tensor in each.wanted()] for each in self.waiting()], gone))
        others = [rank for rank, (shapes, _) in enumerate(theirs) if shapes != theirs[0][0]]
        if len(active) < self._comm.size or others or len({len(gone) for _, gone in theirs}) > 1:
            raise different(rows, active if len(active) < self._comm.size else others)
        dead = [each for each, ranks in zip(self, zip(*(gone for _, gone in theirs), strict=True), strict=True) if any(ranks)]
        living = {id(tensor) for each in self if each not in dead for tensor in each.wanted()}
        for each in dead:
            self._equal([tensor for tensor in each.tensors if id(tensor) not in living])
            each.retire()
            each.free()
            self.remove(each)
        for each in self.waiting():
            self._equal([tensor for tensor in each.tensors if not tensor.requires_grad])
            broadcast(self._comm, each.wanted())
            each.start(self._comm, self._strategy, seen, steps)

    def grow(self, grown: ParameterSet, added: list[torch.Tensor]) -> None:
        """Make ``grown`` one of the sets, after those that are built, which all ranks have; it gets the tensors ``added``."""
        if grown not in self:
            number = 1 + max((number for number, each in enumerate(self) if each.started), default=-1)
            self.insert(number, grown)
            if self._aside is not None:
                self._aside.insert(number, [])
        if self._aside is not None:
            for tensor in added:
                self._aside[self.index(grown)].append(None if tensor.grad is None else tensor.grad.detach().clone())
                tensor.grad = None

    # Equal replicas

    def _equal(self, tensors: list[torch.Tensor]) -> None:
        """Give all ranks the values of rank 0 in parameters that are not trained any more, if ranks differ. Collective."""
        if not self._strategy.sums_gradients:
            broadcast(self._comm, tensors)

    def catch_up(self, rows: list[Row], source: int) -> None:
        """Give ranks that took part in steps without samples the parameters and gradients of rank ``source``. Collective if any
        did.

        They cannot make these steps themselves: the program may have changed the gradients in between, by clipping for example.
        """
        for number, each in enumerate(self[: min(len(row.steps) for row in rows)]):
            newest = rows[source].steps[number]
            if not self._strategy.sums_gradients or all(row.steps[number] == newest for row in rows):
                continue
            optimiser = each.optimiser
            state = optimiser.state_dict() if self._comm.rank == source and optimiser is not None else None
            broadcast(self._comm, each.tensors, source)
            state = self._comm.bcast(state, source)
            grads = self._grads(each, source)
            if each.steps != newest:
                if state is not None and optimiser is not None:
                    optimiser.load_state_dict(state)
                each.restore(grads)  # a program that does not reset its gradients adds the next ones to them
            each.steps = newest

    def _grads(self, each: ParameterSet, source: int) -> list[torch.Tensor | None]:
        """Copies of the gradients that rank ``source`` has, without sparse ones. Collective."""
        there = self._comm.bcast([tensor.grad is not None and tensor.grad.layout == torch.strided for tensor in each.tensors],
                                 source)
        grads = [torch.zeros_like(tensor) if found else None for tensor, found in zip(each.tensors, there, strict=True)]
        if self._comm.rank == source:
            grads = [tensor.grad if found else None for tensor, found in zip(each.tensors, there, strict=True)]
        broadcast(self._comm, [grad for grad in grads if grad is not None], source)
        return grads

    def checksum_of_settings(self) -> int:
        """Of the optimisers' settings."""
        return hash(tuple(each.settings() for each in self if each.started)) & 0xFFFFFFFF

    def same_settings(self, rows: list[Row], active: list[int]) -> bool:
        """Take over the optimisers' settings of the first active rank where they differ. Returns whether they do.

        Collective if they do.

        Raises
        ------
        MismatchError
            Ranks have other optimisers. On all ranks.
        """
        if len({row.settings for row in rows}) == 1:
            return False
        started = [each for each in self if each.started]
        theirs = self._comm.allgather([each.plain_settings() for each in started])
        if any([len(each) for each in one] != [len(each) for each in theirs[0]] for one in theirs):
            raise different(rows, active)
        for each, groups in zip(started, theirs[active[0]], strict=True):
            each.take_settings(groups)
        return True

    def join_step(self, rows: list[Row], sums: bool) -> None:
        """Take part in the steps that ``rows`` are about to make, without samples. Collective."""
        self.hide_common()
        total = sum(row.samples for row in rows) or self._comm.size
        for number, each in enumerate(self):
            if any(row.touched >> number & 1 for row in rows):
                for part in each.local:
                    part.before_step(0, total, sums)
                each.replay()
                for part in each.local:
                    part.after_step(0, total)

    # Gradients

    def touched(self) -> int:
        """Bit i: set i has a gradient of this rank."""
        return sum(each.touched << number for number, each in enumerate(self))

    def set_aside(self) -> None:
        """Keep gradients of this rank that the active ranks' exchange would overwrite."""
        if self._aside is None:
            self._aside = [each.set_aside() for each in self]
            for each in self:
                each.restore([None] * len(each.tensors))

    def put_back(self) -> None:
        """Undo `set_aside`."""
        if self._aside is not None:
            for each, grads in zip(self, self._aside, strict=True):
                each.restore(grads)
            self._aside = None

    # The common model of strategies that keep a model on each rank

    def common(self) -> None:
        """Take part in `show_common` of other ranks. Collective."""
        for part in self.parts():
            part.common()

    def show_common(self) -> None:
        """Put the common model of all ranks into the parameters, until `hide_common`. Collective."""
        for part in self.parts():
            part.show_common()

    def hide_common(self) -> None:
        """Put the parameters of this rank back, unless the program has changed them since `show_common`."""
        for part in self.parts():
            part.hide_common()

    def parts(self) -> list[LocalUpdate]:
        """What the strategy updates, over all sets."""
        return [part for each in self for part in each.local]

    # The state of the strategy beside the program's checkpoints

    def in_checkpoint(self, content: object) -> bool:
        """Whether parameters are in what the program saves, and the strategy has more than that."""
        return bool(self.parts()) and strategy_state.holds(content, {
            tensor.data_ptr() for each in self for tensor in each.tensors})

    def write_state(self, path: str | None) -> str:
        """`strategy_state.write`. Collective."""
        self.clean_up()
        if path is not None and self._comm.rank == 0:
            self._written.add(path)
        return strategy_state.write(self._comm, self._strategy, self.parts(), path)

    def clean_up(self) -> None:
        """Remove files of states whose checkpoints the program has removed."""
        for path in [path for path in self._written if not os.path.exists(path)]:
            self._written.remove(path)
            with contextlib.suppress(OSError):
                os.remove(path + strategy_state.SUFFIX)

    def read_state(self, path: str | None) -> str:
        """`strategy_state.read`. Collective."""
        return strategy_state.read(self._comm, self._strategy, self.parts(), path) if self.parts() else ""
