"""Where the runs of a comparison take place: on the simulated clock, on MPI ranks, on a testbed.

Each run is a process, or a job of mpiexec, of its own, so a failure affects one run only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mpiddl.compare.grid import Cell, ranks_beside
from mpiddl.compare.processes import Ended, run
from mpiddl.compare.run_cell import WITH_PARENT
from mpiddl.errors import UsageError
from mpiddl.layout import block_size
from mpiddl.machine.threads import cores
from mpiddl.testbed import Testbed
from mpiddl.testbed import mpi as mpis
from mpiddl.testbed.plan import make_plan, show_rate

LIBRARIES = {"openmpi": "Open MPI", "mpich": "MPICH"}
PROGRAM = (sys.executable, "-m", "mpiddl.compare.run_cell")


class Place(Protocol):
    """Somewhere to run cells.

    jobs : how many at a time.
    about : what outcomes depend on.
    sessions : where launchers keep folders whose names begin with the mark of `run` and a dot; None if they keep none.
    """

    jobs: int
    about: dict[str, Any]
    sessions: Path | None

    def words(self) -> str:
        """The place, for a sentence."""
        ...

    def ranks(self, cell: Cell) -> int:
        """How many ranks ``cell`` takes, including ranks that only serve."""
        ...

    def settings(self, cell: Cell) -> dict[str, Any]:
        """The settings of `mpiddl.train` for this place."""
        ...

    def run(self, cell: Cell, files: Sequence[str], mark: str, limit_s: float) -> Ended:
        """Run `mpiddl.compare.run_cell` with these ``files``."""
        ...

    def __enter__(self) -> Place: ...

    def __exit__(self, *_: object) -> None: ...


class _Plain:
    """What places share."""

    def __init__(self, jobs: int, about: dict[str, Any], env: Mapping[str, str]):
        self.jobs, self.about, self._env = jobs, about, env

    sessions: Path | None = None

    def ranks(self, cell: Cell) -> int:
        return cell.workers

    def settings(self, cell: Cell) -> dict[str, Any]:
        return {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...


class Simulated(_Plain):
    """Virtual ranks on a simulated clock: every run has the same outcome. Ranks that only serve are added to the workers."""

    def __init__(self, jobs: int, env: Mapping[str, str]):
        super().__init__(jobs or len(cores().ids), {"place": "simulated"}, env)

    def words(self) -> str:
        return "on the simulated clock"

    def ranks(self, cell: Cell) -> int:
        return cell.workers + ranks_beside(cell.contender.strategy, cell.workers)

    def settings(self, cell: Cell) -> dict[str, Any]:
        return {"simulate": self.ranks(cell)}

    def run(self, cell: Cell, files: Sequence[str], mark: str, limit_s: float) -> Ended:
        return run([*PROGRAM, *files, WITH_PARENT], self._env, mark, limit_s)


class Here(_Plain):
    """Ranks of mpiexec, or of another launcher with ``-n``. One run at a time, because runs are timed."""

    def __init__(self, launch: str, mpi: str | None, env: Mapping[str, str]):
        if launch:
            self._launch, about = _words(launch, env), launch
        else:
            found = mpis.find_launcher(mpi, env)
            self._launch, about = [found.path], found.family
        super().__init__(1, {"place": "ranks", "launcher": about}, env)
        self.sessions = Path(env.get(mpis.SESSIONS) or tempfile.gettempdir())

    def words(self) -> str:
        return f"on MPI ranks started by {self.about['launcher']}"

    def run(self, cell: Cell, files: Sequence[str], mark: str, limit_s: float) -> Ended:
        return self.launch(cell.workers, [*PROGRAM, *files], mark, limit_s)

    def launch(self, ranks: int, command: Sequence[str], mark: str, limit_s: float) -> Ended:
        """Run ``command`` on so many ranks."""
        crowded = ranks > len(cores().ids) and "SLURM_JOB_ID" not in self._env  # in a job, ranks go to several nodes
        # Open MPI's launcher names its folder by its process number, leaves it if killed, and fails if the folder exists.
        with tempfile.TemporaryDirectory(prefix=f"{mark}.", dir=self.sessions, ignore_cleanup_errors=True) as folder:
            env = mpis.willing(self._env, crowded) | {mpis.SESSIONS: folder}
            return run([*self._launch, "-n", str(ranks), *command], env, mark, limit_s, launcher=True)


class OnTestbed(_Plain):
    """A cluster made of network namespaces of this machine, with shaped links, up inside the block. One run at a time."""

    def __init__(self, text: str, mpi: str | None, env: Mapping[str, str]):
        hosts, rate = _hosts(text)
        family = mpis.find_launcher(mpi, env).family
        super().__init__(1, {"place": "testbed", "hosts": hosts, "rate": show_rate(rate), "launcher": family}, env)
        self.hosts, self._mpi = hosts, mpi
        self._bed = Testbed(hosts, show_rate(rate))

    def __enter__(self) -> Any:
        self._bed.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._bed.close()

    def words(self) -> str:
        rate = self.about["rate"]
        links = "links of unlimited speed" if rate == "none" else f"links of {_rate(rate)} each way"
        library = LIBRARIES[self.about["launcher"]]
        return f"on {self.hosts} testbed hosts on one machine, with {links}, with {library}"

    def run(self, cell: Cell, files: Sequence[str], mark: str, limit_s: float) -> Ended:
        return self.launch(cell.workers, [*PROGRAM, *files], mark, limit_s)

    def launch(self, ranks: int, command: Sequence[str], mark: str, limit_s: float) -> Ended:
        """Run ``command`` on so many ranks, dealt evenly to the hosts."""
        per_host = [block_size(ranks, self.hosts, host) for host in range(self.hosts)]
        ended = self._bed.run([*command], ranks_per_host=per_host, mpi=self._mpi, timeout_s=limit_s, env=self._env)
        return Ended(ended.returncode, ended.output)


def _rate(text: str) -> str:
    """A rate for a sentence.

    Examples
    --------
    >>> _rate("200mbit"), _rate("1.5gbit"), _rate("64kbit")
    ('200 Mbit/s', '1.5 Gbit/s', '64 kbit/s')
    """
    number = text.rstrip("bgikmt")
    return f"{number} {text.removeprefix(number).replace('m', 'M').replace('g', 'G')}/s"


def check_shared(folder: Path) -> None:
    """Raise a `UsageError` for a folder that the hosts of a testbed do not share."""
    if f"{os.path.realpath(folder)}/".startswith(("/run/", "/dev/shm/")):
        raise UsageError(f"out: got {folder}, expected a folder that all hosts share, because each host has its own "
                         "/run and /dev/shm")


def _hosts(text: str) -> tuple[int, int | None]:
    """``8:200mbit`` as a number and bits per second."""
    number, _, rate = text.partition(":")
    if not number.isdecimal():
        raise UsageError(f"testbed: got {text!r}, expected HOSTS:RATE, such as 8:200mbit")
    plan = make_plan(int(number), rate or None)
    return plan.hosts, plan.rate


def _words(text: str, env: Mapping[str, str]) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"launch: got {text!r}, expected a command with correct shell quotes ({error})") from None
    if not words or not shutil.which(words[0], path=env.get("PATH", os.defpath)):
        raise UsageError(f"launch: got {text!r}, expected the name of a program in PATH, and its arguments")
    return words
