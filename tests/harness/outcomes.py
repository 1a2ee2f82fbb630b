"""One outcome for all ranks: a test that fails on one fails on all, so that they never part ways."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

from harness.alarm import Alarm

# A rank that failed waits so long for the others to end the test too. A failure usually leaves them in a
# collective for ever, and nobody wants to wait for the alarm to see it.
GRACE_S = 100.0

GRAVITY = "passed", "skipped", "failed"


class Outcomes:
    """A plugin that compares the reports of all ranks after each phase of each test."""

    def __init__(self, comm: Any, alarm: Alarm):
        self.comm, self.alarm = comm, alarm
        self.failure = ""  # what this rank has to tell while it waits for the others

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: after pytest has dealt with expected failures
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        self.failure = report.longreprtext if report.failed else ""
        if self.comm.size > 1:
            self._share(report)
        return report

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value on every rank."""
        self._wait(self.comm.Ibarrier())
        return self.comm.allgather(mine)

    def _wait(self, request: Any) -> None:
        """Asleep, so that busy ranks have the cores."""
        since, pause = time.monotonic(), 5e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.001)
            if self.failure and time.monotonic() - since > GRACE_S:
                said = f"failed, and not all other ranks ended the test within {GRACE_S:g} s"
                self.alarm.ring(f"{self.alarm.rank} {said}", self.failure)

    def _share(self, report: pytest.TestReport) -> None:
        """Fail everywhere what failed somewhere, or was skipped on some ranks only."""
        mine = GRAVITY.index(report.outcome)
        extremes = np.array([mine, -mine])
        self._wait(self.comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX))
        gravest, mildest = extremes[0], -extremes[1]
        if GRAVITY[gravest] == "failed" or gravest != mildest:
            told = self.comm.allgather((_trouble(report), report.sections))
            troubled = [rank for rank, (trouble, _) in enumerate(told) if trouble]
            self._spread(report, troubled, told)

    def _spread(self, report: pytest.TestReport, troubled: list[int], told: list[Any]) -> None:
        ranks = f"[rank {','.join(map(str, troubled))}/{self.comm.size}]"
        report.outcome = "failed"
        path, line, name = report.location
        report.location = (path, line, f"{name} {ranks}")
        report.longrepr = Trouble([(self._label(rank), told[rank][0]) for rank in troubled])
        report.sections = [
            (f"{self._label(rank)} {title}", text) for rank, (_, parts) in enumerate(told) for title, text in parts
        ]

    def _label(self, rank: int) -> str:
        return f"[rank {rank}/{self.comm.size}]"


class Line(NamedTuple):
    """A failure on one line."""

    message: str

    def __str__(self) -> str:
        return self.message


class Trouble:
    """What went wrong on which ranks, in the form in which pytest shows a failure."""

    def __init__(self, texts: list[tuple[str, str]]):
        self.texts = texts
        label, text = texts[0]
        lines = text.splitlines() or [""]
        reason = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[0])
        self.reprcrash = Line(f"{label} {reason}")

    def toterminal(self, writer: Any) -> None:
        for label, text in self.texts:
            writer.line(label, bold=True)
            writer.line(text)

    def __str__(self) -> str:
        return "\n".join(f"{label}\n{text}" for label, text in self.texts)


def _trouble(report: pytest.TestReport) -> str:
    """What is wrong with this rank's report, empty if passed; skips come here only where ranks disagree."""
    if report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        return f"E   skipped here and not on every rank ({why}); a skip must be decided alike on all"
    return report.longreprtext if report.failed else ""
