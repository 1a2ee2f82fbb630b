"""What it costs to start: time and memory of short programs, each in new processes, on one rank and on several.

A row holds, beside what every bench's rows hold: ``cpu_seconds`` of a rank from its start to the end of its program and
``resident_MiB`` then, of the rank that has most. Each figure is the median of all rounds. A first round is not counted: it
compiles kernels and fills caches of files.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from mpiddl.errors import MpiddlError, UsageError
from mpiddl.machine.clock import now
from mpiddl.machine.launch_line import launch_line, this_machine

LIMIT_S = 600
"""A program that takes longer is ended."""

REPORT = """
import os, time
from pathlib import Path
pages = int(Path("/proc/self/statm").read_text().split()[1])
os.write(2, f"\\nstart: {time.process_time()} {pages * os.sysconf('SC_PAGE_SIZE')}\\n".encode())
"""
PLAIN = "from mpi4py import MPI\nimport numpy\n"
MADE = PLAIN + "import mpiddl\ncomm = mpiddl.Communicator(MPI.COMM_WORLD)\n"
REDUCED = MADE + "x = numpy.ones({}, numpy.float32)\ncomm.Allreduce(x, numpy.empty_like(x))\n"
COMMAND = "from mpiddl.cli import main\ntry:\n    main({})\nexcept SystemExit as ended:\n    assert not ended.code\n"

BASELINE = "mpi4py and numpy"


class _Cost(NamedTuple):
    """Of one start: seconds until all ranks have ended, CPU seconds and bytes of memory of the rank that has most."""

    seconds: float
    cpu_seconds: float
    resident_bytes: float


def run(env: Mapping[str, str], ranks: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows for each number of ranks and each program; ``say`` is told of each round. The programs take turns."""
    launchers = {count: _launcher(env, count) for count in ranks}
    with TemporaryDirectory(prefix="mpiddl-start-") as folder:
        programs = _programs(Path(folder))
        found: dict[tuple[int, str], list[_Cost]] = {(count, name): [] for count in ranks for name in programs}
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "a first round, which is not counted")
            for count, name in found:
                cost = _start([*launchers[count], sys.executable, "-c", programs[name] + REPORT], env, name)
                found[count, name] += [cost] if number else []
    medians = {key: _Cost(*map(median, zip(*costs, strict=True))) for key, costs in found.items()}
    return list(_rows(medians))


def _launcher(env: Mapping[str, str], ranks: int) -> list[str]:
    """The words before a program on so many ranks."""
    if ranks == 1:
        return []
    machine = this_machine(env)
    if not machine.mpiexec:
        raise UsageError(f"ranks: got {ranks}, expected 1, because there is no mpiexec in the PATH")
    return shlex.split(launch_line(machine, ranks))


def _programs(folder: Path) -> dict[str, str]:
    """The text of each program, by its name; what they read and write is in ``folder``."""
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((50, 450)))
    pca = ["pca", str(folder / "x.npy"), "-k", "5", "-o", str(folder / "out"), "--overwrite", "--quiet"]
    return {
        BASELINE: PLAIN,
        "Communicator, not used": MADE,
        "Allreduce of 64 B": REDUCED.format(16),
        "Allreduce of 1 MiB": REDUCED.format(1 << 18),
        "mpiddl pca, 50 x 450": COMMAND.format(pca),
        "mpiddl train, 1 step": COMMAND.format(["train", "--data", "digits", "--max-steps", "1", "--quiet"]),
    }


def _start(command: Sequence[str], env: Mapping[str, str], name: str) -> _Cost:
    begin = now()
    try:
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise MpiddlError(f"{name}: still running after {LIMIT_S} s") from None
    seconds = now() - begin
    if ended.returncode:
        raise MpiddlError(f"{name}: the program failed:\n{ended.stderr.strip()}")
    reports = [line.split()[1:] for line in ended.stderr.splitlines() if line.startswith("start: ")]
    cpu_seconds, resident = zip(*(map(float, report) for report in reports), strict=True)
    return _Cost(seconds, max(cpu_seconds), max(resident))


def _rows(medians: Mapping[tuple[int, str], _Cost]) -> Iterator[dict[str, Any]]:
    for (ranks, name), cost in medians.items():
        baseline = medians[ranks, BASELINE].seconds
        yield {
            "case": f"{ranks} rank{'s' * (ranks > 1)}", "contender": name, "baseline": BASELINE, "seconds": cost.seconds,
            "baseline_seconds": baseline, "ratio": baseline / cost.seconds, "cpu_seconds": cost.cpu_seconds,
            "resident_MiB": cost.resident_bytes / 2**20,
        }  # fmt: skip
