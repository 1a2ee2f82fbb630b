"""What a run measures: loss, accuracy, bytes, and where each rank's seconds went.

Seconds are split in three. *Waiting* is the time from a rank's own arrival at a collective to the last rank's arrival, all on
rank 0's clock (`mpiddl.transport.clock_offset`); for a message received, the time until it was there. *Communication* is the
rest of the time inside communication calls. *Compute* is all other time of the loop, without validation and checkpoints.

Arrivals are noted on the spot and compared only when a line is written, so that measuring adds no message to a step.

Communication of a line: two all-gathers of short objects and one all-reduce of 8 bytes a collective call since the last line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from mpiddl.machine.disk import reading, writing
from mpiddl.models.base import Score
from mpiddl.training.link_traffic import Traffic
from mpiddl.transport.base import MAX
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import Meter


class Split(NamedTuple):
    """Seconds of one rank by phase, and what it sent."""

    compute: float = 0.0
    communication: float = 0.0
    waiting: float = 0.0
    bytes: int = 0
    messages: int = 0

    def plus(self, other: Split) -> Split:
        return Split(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


class Lines:
    """A file of JSON lines, flushed line by line; None writes nothing.

    Lines of an earlier session stay up to step ``keep_steps``; damaged ones are left out, and ``note`` says so.
    """

    def __init__(self, path: Path | None, keep_steps: int = 0):
        self._path, self.note = path, ""
        self._file: TextIO | None = None
        if path is not None:
            with writing(path):
                lines, damaged = read_lines(path)
                self._begin(path, [line for line in lines if line["step"] <= keep_steps])
            if damaged:
                where = f"line {damaged[0]} is" if len(damaged) == 1 else f"{len(damaged)} lines from line {damaged[0]} on are"
                self.note = f"{path}: {where} damaged, expected a line of metrics; left out of the file and of the curves"

    def _begin(self, path: Path, lines: Iterable[dict[str, Any]]) -> None:
        """A file of these lines, open for more; in one piece."""
        aside = path.with_name(f".{path.name}")
        aside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        aside.replace(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def keep(self, lines: Iterable[dict[str, Any]]) -> bool:
        """Write ``lines``, those of this session, into a new file if another process removed the file; returns whether so."""
        if self._path is None or self._file is None:
            return False
        with reading(self._path), suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return False
        self.close()
        with writing(self._path):
            self._begin(self._path, lines)
        return True

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None and self._path is not None:
            with writing(self._path):
                print(json.dumps(line), file=self._file, flush=True)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # each line was flushed; what a full disk refused was told then
                self._file.close()


class Metrics:
    """Collects one rank's figures and, where ranks go in lockstep, puts them together line by line.

    Parameters
    ----------
    comm : Comm
        Apart from the strategy's, so that figures about the traffic are not traffic themselves.
    meter : Meter
        Of the strategy's communicator.
    offset : float
        Seconds from this rank's clock to rank 0's.
    lines : Lines
        Where lines go: on rank 0 if in lockstep, else on every rank.
    lockstep : bool
        Whether ranks write lines together.

    Attributes
    ----------
    aside_s : float
        Seconds of this session that were no part of training.
    traffic : Traffic
        What the hosts' links carry from now on. Made collectively.
    """

    def __init__(self, comm: Comm, meter: Meter, offset: float, lines: Lines, lockstep: bool, earlier_s: float = 0.0,
                 earlier_bytes: int = 0):
        self.comm, self.meter, self.offset, self.lines, self.lockstep = comm, meter, offset, lines, lockstep
        self.splits = [Split() for _ in range(comm.size if lockstep else 1)]
        self.earlier_bytes = earlier_bytes
        self._earlier_s = earlier_s
        self._began = comm.now()
        self.session_steps = 0
        self._seen = (meter.bytes, meter.messages)
        meter.spans.clear()
        meter.moving = meter.waiting = 0.0
        self._loss, self._count = 0.0, 0
        self._correct: int | None = 0
        self._entered, self._aside = self.comm.now(), 0.0
        self.aside_s = 0.0
        self.traffic = Traffic(comm)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, earlier sessions of a resumed run included."""
        return self._earlier_s + self.session_s

    @property
    def session_s(self) -> float:
        """Seconds since this session began."""
        return self.comm.now() - self._began

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent so far, by all ranks where lines are written together, else by this rank."""
        return self.earlier_bytes + sum(split.bytes for split in self.splits)

    def add(self, score: Score, count: int) -> None:
        """Count the outcome of one step."""
        self.session_steps += 1
        self._loss += score.loss
        self._count += count
        self._correct = None if score.correct is None or self._correct is None else self._correct + score.correct

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time spent in the block is no part of training."""
        entered = self.comm.now()
        try:
            yield
        finally:
            spent = self.comm.now() - entered
            self._aside += spent
            self.aside_s += spent

    def line(self, step: int, epoch: float, rate: float) -> dict[str, Any]:
        """Close the interval since the last line, write it, and return it on every rank. Collective if in lockstep."""
        split = self._split()
        mine = (split, self._loss, self._correct, self._count)
        everyone = self.comm.allgather(mine) if self.lockstep else [mine]
        self.splits = [total.plus(part[0]) for total, part in zip(self.splits, everyone, strict=True)]
        count = sum(part[3] for part in everyone)
        correct = [part[2] for part in everyone if part[2] is not None]
        line = {
            "step": step,
            "epoch": round(epoch, 4),
            "loss": finite(sum(part[1] for part in everyone) / max(count, 1)),
            "accuracy": sum(correct) / max(count, 1) if len(correct) == len(everyone) else None,
            "rate": rate,
            "seconds": {
                name: round(float(np.mean([getattr(part[0], name) for part in everyone])), 6)
                for name in ("compute", "communication", "waiting")
            },
            "elapsed": round(self.elapsed_s, 4),
            "bytes": self.bytes_sent,
        }
        self.lines.write(line)
        self._fresh()
        return line

    def all_bytes(self) -> int:
        """Payload bytes sent so far by all ranks, to the last message. Collective."""
        return self.earlier_bytes + sum(self.comm.allgather(self.meter.bytes))

    def finish(self) -> list[Split]:
        """Every rank's figures for the whole session, what its strategy's `finish` did included. Collective."""
        mine = self._split()
        parts = self.comm.allgather(mine)
        if self.lockstep:
            self.splits = [total.plus(part) for total, part in zip(self.splits, parts, strict=True)]
        else:
            self.splits = self.comm.allgather(self.splits[0].plus(mine))
        return self.splits

    def _fresh(self) -> None:
        self._loss, self._correct, self._count = 0.0, 0, 0
        self._entered, self._aside = self.comm.now(), 0.0

    def _split(self) -> Split:
        """This rank's seconds and bytes since the last line; empties the meter's spans."""
        inside = self.comm.now() - self._entered - self._aside
        moving, waiting = self.meter.moving, self.meter.waiting
        spans = np.array(self.meter.spans, dtype=float).reshape(-1, 3)
        arrived, entered, left = spans.T
        late = np.clip(self._last_arrivals(arrived) - entered, 0, left - entered)
        waiting += float(late.sum())
        moving += float((left - entered - late).sum())
        self.meter.spans.clear()
        self.meter.moving = self.meter.waiting = 0.0
        sent, self._seen = self._seen, (self.meter.bytes, self.meter.messages)
        compute = max(inside - moving - waiting, 0.0)
        return Split(compute, moving, waiting, self._seen[0] - sent[0], self._seen[1] - sent[1])

    def _last_arrivals(self, arrived: np.ndarray) -> np.ndarray:
        """When the last rank arrived at each collective, on this rank's clock; its own arrivals where calls do not match."""
        if not self.lockstep or len(set(self.comm.allgather(len(arrived)))) > 1:
            return arrived
        aligned = arrived + self.offset
        last = np.empty_like(aligned)
        self.comm.Allreduce(aligned, last, MAX)
        return last - self.offset


def finite(value: float) -> float | None:
    """The value, or None for what JSON has no word for."""
    return value if isfinite(value) else None


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The lines of a file of metrics, and the numbers of those that are damaged.

    The last line does not count as damaged if a killed run left it without its end.
    """
    if not path.exists():
        return [], []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = [_line(text) for text in texts]
    damaged = [number for number, line in enumerate(lines[:-1], 1) if line is None]
    return [line for line in lines if line is not None], damaged


def _line(text: str) -> dict[str, Any] | None:
    """A line of training or of a validation as `Metrics` and `mpiddl.training.watch` write them; None for anything else."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    prefix = "validation_" if "validation_loss" in line or "validation_accuracy" in line else ""
    needed = [line.get("elapsed"), line.get("bytes")]
    scores = [line.get(f"{prefix}{name}", "missing") for name in ("loss", "accuracy")]
    whole = all(map(_is_number, needed)) and all(score is None or _is_number(score) for score in scores)
    return line if whole else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)
