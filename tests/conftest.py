"""Hooks and fixtures of all tests, on one MPI rank and on several. See docs/testing.md."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import pytest
import pytest_mpi
from harness import jobs
from harness.alarm import Alarm
from harness.outcomes import Outcomes
from mpi4py import MPI
from threadpoolctl import threadpool_limits

WORLD = MPI.COMM_WORLD
# Limits only end what hangs: far above what a test takes on a machine whose cores others keep busy.
LIMIT_S = 300.0
# A command has so much less time than its test, so that its output is seen before the alarm rings.
HEADROOM_S = 30.0

# By these a test comes to the MPI library.
OF_MPI = {"comm", "link"}

# By these it starts others.
STARTING = {"command", "mpirun", "namespaces", "bed", "guest_environment"}

# `make test`, `make test-more`, both.
TIERS = ("test", "more", "all")

ORDERLY = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)

ALARM = pytest.StashKey[Alarm]()
OUTCOMES = pytest.StashKey[Outcomes]()

# All ranks draw the same examples, every time; compiling a kernel may take longer than hypothesis' deadline.
hypothesis.settings.register_profile("mpiddl", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("mpiddl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="append the outcomes to this file, a JSON list a line")
    parser.addoption("--tier", choices=TIERS, default="all", help="what `make test` runs, what `make test-more` adds, or all")
    parser.addoption("--again", action="store_true", help="with a second MPI library: leave out tests marked no_mpi")
    parser.addoption("--in-process", action="store_true", help="start no jobs: one case of each test; tier all: every case")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # Parts run side by side: threads of many small products would wait for each other. What is not loaded is not limited.
    import scipy.linalg  # noqa: F401

    threadpool_limits(1, user_api="blas")
    config.addinivalue_line("markers", "limit(seconds): time for the test, 300 if not told; then all is ended")
    config.addinivalue_line("markers", "plots: draws what mpiddl draws; elsewhere matplotlib is hidden")
    config.addinivalue_line("markers", "no_mpi: any MPI library will do, but for tests with the mpi mark, comm or link")
    config.addinivalue_line("markers", "more: for `make test-more`: it takes long, or repeats what others test in another way")
    config.stash[ALARM] = Alarm(WORLD, sys.__stderr__.fileno())
    config.stash[OUTCOMES] = Outcomes(WORLD.Dup(), config.stash[ALARM])
    config.pluginmanager.register(config.stash[OUTCOMES], "outcomes")
    # After pytest-mpi has asked it whether to print all of mpi4py's settings, before it asks again.
    config.option.with_mpi = True
    if WORLD.rank:  # rank 0 tells the failures of all ranks
        config.pluginmanager.unregister(name="terminalreporter")
    elif config.option.record:
        config.pluginmanager.register(Record(config), "record")


def pytest_report_header() -> str:
    return f"mpi: world size {WORLD.size}, {MPI.Get_library_version().splitlines()[0].split(', package')[0]}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several ranks run what is marked for them, one rank runs all that does not need more."""
    chosen = {item: _is_chosen(item, config.option) for item in items}
    if config.option.in_process and config.option.tier != "all":  # with another Python: to that, the cases are alike
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items) if chosen[item]}
        chosen = dict.fromkeys(items, False) | dict.fromkeys(first.values(), True)
    if not all(chosen.values()):
        config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
        items[:] = [item for item in items if chosen[item]]
    if WORLD.size == 1:  # one rank is no MPI job, though pytest-mpi was told so for the sake of the mpi mark
        under_mpi = pytest_mpi.MPI_MARKERS["mpi_skip"].mark
        for item in items:
            item.own_markers = [mark for mark in item.own_markers if mark != under_mpi]


def _is_chosen(item: pytest.Item, option: Any) -> bool:
    if option.in_process:
        return _belongs(item) and STARTING.isdisjoint(getattr(item, "fixturenames", ()))
    return option.tier in (_tier(item, option.again), "all") and _belongs(item) and not (option.again and _is_alike(item))


def _tier(item: pytest.Item, again: bool) -> str:
    """A job that one rank starts is for one library. Cases to which the library makes no difference run on 2 ranks of one
    library or on 3 of the other, in turns, then on 4, and elsewhere only where they are asked for."""
    marks = {mark.name for mark in item.iter_markers()}
    starts = not STARTING.isdisjoint(getattr(item, "fixturenames", ()))
    other = _least_size(item) > 2 or crc32(item.nodeid.encode()) % 2
    if WORLD.size > 1 and "no_mpi" in marks and (WORLD.size, again) != ((3, True) if other else (2, False)):
        return "more" if WORLD.size == 4 and not again else "all"
    return "more" if "more" in marks or (again and starts) else "test"


def _belongs(item: pytest.Item) -> bool:
    return _least_size(item) <= WORLD.size if any(item.iter_markers("mpi")) else WORLD.size == 1


def _least_size(item: pytest.Item) -> int:
    return max((mark.kwargs.get("min_size") or 1 for mark in item.iter_markers("mpi")), default=1)


def _is_alike(item: pytest.Item) -> bool:
    """The same whatever the MPI library."""
    marks = {mark.name for mark in item.iter_markers()}
    return "no_mpi" in marks and "mpi" not in marks and OF_MPI.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks that collected different tests would wait for each other in different collectives."""
    alarm, outcomes = session.config.stash[ALARM], session.config.stash[OUTCOMES]
    alarm.set(LIMIT_S, "collecting the tests")
    mine = ([item.nodeid for item in session.items], session.testsfailed)
    differ = [rank for rank, theirs in enumerate(outcomes.gather(mine)) if theirs != mine]
    alarm.clear()
    if differ and not WORLD.rank:
        alarm.ring(f"ranks {differ} collected other tests than rank 0")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    alarm, outcomes = item.config.stash[ALARM], item.config.stash[OUTCOMES]
    if not item.config.option.usepdb:
        alarm.set(_limit(item), item.nodeid, lambda: outcomes.failure)
    try:
        return (yield)
    finally:
        alarm.clear()


def _limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("limit")
    return float(mark.args[0]) if mark else LIMIT_S


def pytest_unconfigure(config: pytest.Config) -> None:
    """Together: a rank that leaves with an exit code makes mpiexec kill those that are still writing."""
    sys.stdout.flush()
    outcomes = config.stash.get(OUTCOMES, None)
    if outcomes and WORLD.size > 1:
        config.stash[ALARM].set(LIMIT_S, "the end of the session")
        outcomes.failure = ""
        outcomes.gather(None)
        config.stash[ALARM].clear()


class Record:
    """Writes outcomes as they come, so that those before an abort are not lost.

    The file is open from first to last: a test may have replaced ``open`` by the time its outcome is written.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.file = open(config.option.record, "a", buffering=1)  # noqa: SIM115
        self.seconds = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds = 0.0
        self._write("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        category = self.config.hook.pytest_report_teststatus(report=report, config=self.config)[0]
        if category:
            self._write(category, report.nodeid, report.longrepr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("took", nodeid, seconds=self.seconds)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in ORDERLY:
            self._write("end")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("error", report.nodeid, report.longrepr)

    def _write(self, category: str, nodeid: str = "", trouble: Any = None, seconds: float = 0.0) -> None:
        crash = getattr(trouble, "reprcrash", None)
        reason = crash.message.partition("\n")[0] if crash else ""
        print(json.dumps([category, nodeid, reason, round(seconds, 3)]), file=self.file)


@pytest.fixture(autouse=True)
def without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the test's own process matplotlib is not to be had: to draw curves takes longer than most tests' training."""
    if request.node.get_closest_marker("plots") is None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """All ranks, on a communicator of the test's own."""
    own = WORLD.Dup()
    yield own
    own.Free()


@pytest.fixture
def link(comm: MPI.Intracomm) -> Iterator[Any]:
    """`comm` behind the interface of mpiddl's transports."""
    from mpiddl.transport.mpi import connect

    own = connect(comm)
    yield own
    own.Free()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a test that fail together on a busy machine may come to it far apart."""
    monkeypatch.setattr("mpiddl.transport.comm.GRACE_S", 100.0)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's time goes on by a hundredth of a second at each look, so that limits of time do not depend on the machine."""
    looks = itertools.count(1)
    monkeypatch.setattr("mpiddl.training.metrics.Metrics.session_s", property(lambda metrics: next(looks) / 100))


@pytest.fixture
def forced(comm: MPI.Intracomm) -> Iterator[Callable[..., Any]]:
    """``forced("ring")`` makes a `mpiddl.Communicator` that takes our algorithms whatever the size; freed afterwards."""
    from mpiddl.communicator import Communicator
    from mpiddl.tuning.rule import CANDIDATES

    others = {"reduce": "scatter", "bcast": "chain", "allgather": "ring", "reduce_scatter": "ring", "barrier": "dissemination"}
    made = []

    def make(name: str = "two-step", raw: MPI.Intracomm | None = None) -> Any:
        same = name if name in ("library", "read") else ""
        taken = {call: same if same in CANDIDATES[call] else other for call, other in others.items()} | {"allreduce": name}
        made.append(Communicator((comm if raw is None else raw).Dup(), algorithms=taken))
        return made[-1]

    yield make
    for one in made:
        if one != MPI.COMM_NULL:
            one.Free()


@pytest.fixture(scope="session")
def namespaces() -> None:
    """A machine on which hosts of a testbed can be made; skips where it gives no namespaces."""
    from mpiddl.testbed import TestbedError, rights

    try:
        rights.unshare_command(os.environ)
    except TestbedError as error:
        pytest.skip(f"{error}")


@pytest.fixture
def command(request: pytest.FixtureRequest) -> Callable[..., jobs.Finished]:
    """``command("mpiddl", "--version", env=..., cwd=..., timeout_s=...)`` runs it without mpiexec."""
    return functools.partial(_run, _limit(request.node) - HEADROOM_S, 0)


@pytest.fixture
def mpirun(request: pytest.FixtureRequest) -> Callable[..., jobs.Finished]:
    """``mpirun(4, "mpiddl", "train", env=..., cwd=..., timeout_s=...)`` runs it on 4 ranks."""
    if WORLD.size > 1:
        pytest.fail("mpirun starts ranks of its own: expected in tests without the mpi mark only")
    return functools.partial(_run, _limit(request.node) - HEADROOM_S)


def _run(
    limit_s: float, ranks: int, *args: Any, env: Any = None, cwd: Any = None, timeout_s: float | None = None
) -> jobs.Finished:
    """A variable given as None is taken out of the environment."""
    variables = jobs.environment(sys.executable) | (env or {})
    variables = {name: value for name, value in variables.items() if value is not None}
    words = [str(word) for word in args]
    words = jobs.mpi_command(ranks, words, variables) if ranks else words
    return jobs.run(words, variables, timeout_s or limit_s, cwd)
