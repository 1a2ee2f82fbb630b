"""The folder of a comparison: its finished cells, its settings, and its report.

    runs/demo/
        cells.jsonl       a line for each finished run (`mpiddl.study.journal`); cells-2-of-8.jsonl: those of a part
        compare.json      what was compared last
        failed/           the output of failed runs
        report.html, report.md, report.json, *.png

Each part of a grid has a file of its own, so that parts may run at the same time, also on disks without locks.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.machine.disk import lock, writing
from mpiddl.study.journal import Journal

WANTED = ("wall",)
"""What every line has: how long the run took. In addition it has an ``error``, or the outcome of `mpiddl.compare.run_cell`."""

HOST = {"sent": (int, float), "received": (int, float)}
PHASES = {"compute": (int, float), "communication": (int, float), "waiting": (int, float)}
RESULT = {"accuracy": (int, float), "seconds": (int, float), "bytes": (int, float), "samples": (int, float), "curve": (list,)}
"""What every result has, and its types."""

POINT = {"seconds": (int, float), "bytes": (int, float), "samples": (int, float), "accuracy": (int, float, NoneType),
         "distance": (int, float, NoneType)}  # fmt: skip
"""What every point of a ``curve`` has, and its types."""


class Store:
    """Outcomes by the settings of their cells.

    Parameters
    ----------
    folder : Path
    part : (int, int)
        The part of the grid that is run here, and the number of parts; (1, 1) for the whole grid.
    say : callable
        Prints a line; used for damaged lines.
    whole : callable, optional
        Whether an outcome has all that a report needs; by default, of `mpiddl.compare.run_cell`.
    """

    def __init__(self, folder: Path, part: tuple[int, int], say: Callable[[str], None],
                 whole: Callable[[Mapping[str, Any]], bool] | None = None):
        self.folder, self._part, self._say, self._whole = folder, part, say, whole or _whole
        self._lock: int | None = None
        self._own: Journal | None = None
        self._others: dict[Path, Journal] = {}

    def take(self) -> None:
        """Make the folder, and lock this part of it until the process ends.

        Raises
        ------
        UsageError
            The folder cannot be written, or another process works on this part.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.folder / f".lock{self.suffix}")
        except OSError as error:
            raise UsageError(f"out: got {self.folder}, which cannot be written ({error.strerror}), expected a writable "
                             "folder") from None
        if self._lock is None:
            raise UsageError(f"out: another comparison is running in {self.folder}. Wait until it ends, or choose another "
                             "--out")
        if not os.access(self.folder, os.W_OK):
            raise UsageError(f"out: got {self.folder}, which cannot be written (permission denied), expected a writable folder")

    def open(self) -> None:
        """Read the finished cells."""
        self._own = Journal(self.folder / f"cells{self.suffix}.jsonl", self._say, WANTED)
        self.refresh()

    def close(self) -> None:
        """Let another process take the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def refresh(self) -> None:
        """Read what other parts have added."""
        for path in sorted(self.folder.glob("cells*.jsonl")):
            if path != self._journal.path and path not in self._others:
                self._others[path] = Journal(path, self._say, WANTED)
        for journal in (self._journal, *self._others.values()):
            journal.refresh()

    def __len__(self) -> int:
        return sum(map(len, (self._journal, *self._others.values())))

    def find(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The outcome of a cell, preferably one that did not fail; None if there is none, or none that is complete."""
        journals = {self._journal.path: self._journal, **self._others}  # in an order that is the same for all parts
        found = [outcome for _, journal in sorted(journals.items())
                 if (outcome := journal.find(settings)) and self._whole(outcome)]  # fmt: skip
        return next((outcome for outcome in found if not outcome.get("error")), found[0] if found else None)

    def add(self, settings: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        """Keep the outcome of a cell."""
        self._journal.add(settings, outcome)

    def keep_words(self, name: str, text: str) -> Path:
        """Write the output of a failed run to a file."""
        path = self.folder / "failed" / f"{name}.txt"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return path

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file of the folder, replaced in one piece."""
        path = self.folder / name
        aside = path.with_name(f".{name}.{uuid.uuid4().hex}")  # several may write at once, from several machines
        with writing(path):
            try:
                aside.write_bytes(content.encode() if isinstance(content, str) else content)
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        return path

    def before(self) -> dict[str, Any]:
        """The settings of the last comparison here; empty if there was none, or they cannot be read."""
        try:
            found = json.loads((self.folder / "compare.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def mark(self) -> str:
        """The mark by which processes of this part are found."""
        path = f"{os.path.realpath(self.folder)}{self.suffix}"
        return f"compare-{hashlib.sha256(path.encode()).hexdigest()[:16]}"

    @property
    def suffix(self) -> str:
        """How names of this part's files end."""
        number, count = self._part
        return f"-{number}-of-{count}" if count > 1 else ""

    @property
    def _journal(self) -> Journal:
        if self._own is None:
            self.open()
        assert self._own is not None
        return self._own


def _whole(outcome: Mapping[str, Any]) -> bool:
    """Whether a report can be made of it. The file may have been edited, or written by a version without these figures."""
    if outcome.get("error") or outcome.get("diverged"):
        return True
    if not _typed(outcome, RESULT):
        return False
    curve = outcome["curve"]
    points = bool(curve) and all(isinstance(point, dict) and _typed(point, POINT) for point in curve)
    return points and isinstance(curve[-1]["accuracy"], int | float) and _finite(outcome) and _further(outcome)


def _typed(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> bool:
    """Whether all of these are there, and of their types."""
    return all(name in values and isinstance(values[name], kind) for name, kind in kinds.items())


def _further(outcome: Mapping[str, Any]) -> bool:
    """Whether the figures that some runs have make sense: hosts, phases, staleness."""
    hosts, phases, late = (outcome.get(name) for name in ("hosts", "phases", "staleness"))
    return (
        (not hosts or (isinstance(hosts, list) and all(isinstance(host, dict) and _typed(host, HOST) for host in hosts)))
        and (not phases or (isinstance(phases, dict) and _typed(phases, PHASES)))
        and (not late or (isinstance(late, dict) and isinstance(found := late.get("histogram"), dict)
             and all(delay.isdecimal() and isinstance(count, int) for delay, count in found.items())))
    )  # fmt: skip


def _finite(value: Any) -> bool:
    """Whether all numbers in plain values are finite: JSON of Python may hold others."""
    if isinstance(value, dict | list):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or isfinite(value)
