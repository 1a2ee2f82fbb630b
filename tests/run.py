"""Runs the tests part by part and adds up what came of them: ``make test`` is this program without arguments.

    python tests/run.py                                        both MPI libraries, 1 to 4 ranks
    python tests/run.py --tier more                            what `make test` leaves out: `make test-more`
    python tests/run.py --mpi mpich --sizes 1,3 -- -k gossip   one of them, some sizes, some tests
    python tests/run.py --mpi openmpi=/my/venv/bin/python      with an environment of your own

A part is one MPI library at one world size. On one rank it runs all tests that do not need more, on several
those with the mpi mark. The second tier runs all tests of the first library on four ranks, and of the other one on one rank,
which the first tier leaves out. Tests to which the library makes no difference (the mark no_mpi) run with the first one
only. As one rank is the longest by far, its files are dealt to several parts, by the seconds in ``tests/seconds.txt``,
unless pytest is given arguments; ``--keep-seconds`` writes that file anew. If the machine has an older Python 3.11 than the
environment, one more part of the second tier runs with that: one case of each test of one rank that starts no command or job.
First of all a single process fills the cache of compiled kernels that all parts share. Two parts run at a time, where
there are two cores, those of one rank first: three that start jobs take each other's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import jobs, pythons

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
BUILD = ROOT / "build" / "tests"
PYTHONS = {"openmpi": ROOT / ".venv" / "bin" / "python", "mpich": ROOT / ".venv-mpich" / "bin" / "python"}
OLDEST = ROOT / ".venv-oldest"

NOTHING_FAILED = ("exit code 0", "exit code 5")  # pytest's: all passed, nothing to run
PASSED, FAILED, SKIPPED = ("passed", "xfailed"), ("failed", "error", "xpassed"), ("skipped",)
COLUMNS = "{:<24} {:>7} {:>7} {:>8} {:>8}"
SECONDS = TESTS / "seconds.txt"
DEALS = 4
"""Parts of one rank."""
_LATER = {True: 4, False: 1}
"""Numbers of ranks that only `make test-more` runs, with the first library and with the other one."""

SLOWEST = 20

Deal = tuple[int, int]
"""Which one, from 1, of how many."""


@dataclass
class Part:
    """One MPI library at one world size, or some files of it, and what came of it."""

    mpi: str
    size: int
    deal: Deal = (1, 1)
    tests: list[str] = field(default_factory=list)  # the files in which it has tests, or its deal of them
    python: Path | None = None  # another one than that of the MPI library's environment
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    took: dict[str, float] = field(default_factory=dict)  # seconds, by test

    @property
    def name(self) -> str:
        ranks = f"{self.mpi}, {self.size} rank{'s' if self.size > 1 else ''}"
        return ranks if self.deal == (1, 1) else "{}, {} of {}".format(ranks, *self.deal)

    def file(self, suffix: str) -> Path:
        return BUILD / f"{self.mpi}-{self.size}-{self.deal[0]}.{suffix}"


def main() -> int:
    since = time.monotonic()
    options = _options()
    BUILD.mkdir(parents=True, exist_ok=True)
    parts = [part for size in options.sizes for mpi in options.mpi for part in parts_of(mpi, size, options)]
    first = next(iter(options.mpi.values()))
    with ThreadPoolExecutor(1) as pool:  # one environment is made while the other compiles
        older = options.tier != "test" and not options.pytest and 1 in options.sizes
        more = pool.submit(oldest, first) if older else None
        warm(first)
        parts += more.result() if more is not None else []
    workers = min(2, len(os.sched_getaffinity(0)))
    waiting = iter(sorted(parts, key=lambda part: (part.size > 1, -part.size)))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda worker: run(waiting, options, live=worker == 0), range(workers)))
    if options.keep_seconds:
        keep_seconds(parts, options.tier)
    summary = summarise(parts, time.monotonic() - since)
    (BUILD / f"summary-{options.tier}.txt").write_text(summary)
    print(summary, end="", flush=True)
    return int(any(part.failures for part in parts))


def parts_of(mpi: str, size: int, options: argparse.Namespace) -> list[Part]:
    """One part, or several of one rank, each with a deal of the files."""
    if options.pytest:
        return [Part(mpi, size, tests=options.pytest)]
    first = mpi == next(iter(options.mpi))
    if options.tier == "more" and size > 1 and not (first and size == 4):
        return []  # conftest.py leaves nothing for it
    if options.tier == "test" and size == _LATER[first]:
        return []
    alike = options.tier != "test" or size == (2 if first else 3)  # conftest.py leaves them out elsewhere
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if size == 1 or _for_ranks(path.read_text(), alike)]
    much = size == 1 and (first or options.tier != "test")
    dealt = deal(files, read_seconds(options.tier), DEALS if much else 1)
    return [Part(mpi, size, (number, len(dealt)), tests) for number, tests in enumerate(dealt, 1)]


def _for_ranks(text: str, alike: bool) -> bool:
    """Whether a file may have tests for several ranks; ``alike``: also such as no library makes a difference to."""
    return "mark.mpi" in text and (alike or not re.search("^pytestmark = .*no_mpi", text, re.M))


def deal(files: list[Path], seconds: dict[str, float], of: int) -> list[list[str]]:
    """The files as ``of`` lists that take about as long: the longest first, each to the list that is shortest so far."""
    lists: list[list[str]] = [[] for _ in range(of)]
    taken = [0.0] * of
    for path in sorted(files, key=lambda path: -seconds.get(_name(path), 0.0)):
        least = taken.index(min(taken))
        lists[least].append(str(path))
        taken[least] += seconds.get(_name(path), 0.0) + 0.1
    return [sorted(names) for names in lists]


def _name(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def read_seconds(tier: str) -> dict[str, float]:
    """What the files take on one rank, from ``tests/seconds.txt``: tier, seconds, file."""
    rows = [line.split() for line in SECONDS.read_text().splitlines() if line and not line.startswith("#")]
    return {name: float(seconds) for of, seconds, name in rows if of == tier}


def keep_seconds(parts: list[Part], tier: str) -> None:
    """Write those of this run into ``tests/seconds.txt``; what takes less than a second is left out."""
    head = "# What the test files take on one rank, by tier. Written by `python tests/run.py --keep-seconds`.\n"
    other = "more" if tier == "test" else "test"
    found = {other: read_seconds(other), tier: dict[str, float]()}
    for part in parts:
        for test, took in part.took.items() if part.size == 1 and part.python is None else ():
            name = test.partition("::")[0].removeprefix("tests/")
            found[tier][name] = found[tier].get(name, 0.0) + took
    rows = [f"{of} {took:6.1f} {name}\n" for of in sorted(found) for name, took in sorted(found[of].items()) if took >= 1]
    SECONDS.write_text(head + "".join(rows))


def oldest(python: Path) -> list[Part]:
    """The part with the oldest Python 3.11 of this machine, if that is older than ``python``; its environment is made."""
    found, ours = pythons.oldest(), pythons.ask(python)
    if found is None or ours is None or found.version >= ours.version:
        print(f"no older Python 3.11 here than {ours}: no part runs with one", flush=True)
        return []
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    done = subprocess.run(["make", "--silent", f"PYTHON={found.path}", f"{OLDEST.name}/.dev"], cwd=ROOT, env=env)
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py"))]
    part = Part(str(found), 1, tests=files, python=OLDEST / "bin" / "python")
    if done.returncode:
        part.failures.append(f"make PYTHON={found.path} {OLDEST.name}/.dev: exit code {done.returncode}")
    return [part]


def warm(python: Path) -> None:
    """Compile the kernels of a training in one process; what goes wrong here is for the tests to tell."""
    for dtype in ("float32", "float64"):
        command = [str(python), "-m", "mpiddl", "train", "--max-steps", "1", "--dtype", dtype]
        jobs.run(command, _environment(python), 300, ROOT)


def run(waiting: Iterator[Part], options: argparse.Namespace, live: bool) -> None:
    """Run pytest for the next part until none waits; the output comes as it is written, or when a part has ended.

    Workers share ``waiting``, a list's iterator: its `next` is one step, so no part is run twice.
    """
    for part in waiting:
        if part.failures:  # there is nothing to run it with
            continue
        with contextlib.ExitStack() as stack:
            output = None if live else stack.enter_context(open(part.file("txt"), "w"))
            if live:
                print(f"\n{part.name}", flush=True)
            _wait(part, stack.enter_context(_started(part, options, output)), options.part_limit)
        if not live:
            print(f"\n{part.name}\n{part.file('txt').read_text()}", flush=True)


def _started(part: Part, options: argparse.Namespace, output: Any) -> Any:
    python = part.python or options.mpi[part.mpi]
    env = _environment(python)
    part.file("jsonl").write_text("")
    others = [other for mpi, other in options.mpi.items() if mpi != part.mpi]
    if others:  # for the tests that start one library's program with the other's launcher
        env["MPIDDL_TEST_OTHER_PYTHON"] = str(others[0])
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider"]
    command += [f"--record={part.file('jsonl')}", f"--tier={tier_of(part, options)}"]
    if not sys.stdout.isatty():
        command.append("--color=no")  # Open MPI gives ranks a terminal of its own
    if part.python:
        command.append("--in-process")
    elif part.mpi != next(iter(options.mpi)):
        command.append("--again")
    if part.size > 1:
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the ranks already fill the cores
        command = jobs.mpi_command(part.size, command, env)
    return jobs.started([*command, *part.tests], env, cwd=ROOT, stdout=output, stderr=output)


def tier_of(part: Part, options: argparse.Namespace) -> str:
    """The second tier runs all tests of the parts that the first one leaves out."""
    later = part.size == _LATER[part.mpi == next(iter(options.mpi))] and part.python is None and not options.pytest
    return "all" if later and options.tier == "more" else options.tier


def _environment(python: Path) -> dict[str, str]:
    return jobs.environment(str(python)) | {"NUMBA_CACHE_DIR": str(ROOT / "build" / "numba")}


def _wait(part: Part, process: subprocess.Popen[str], limit_s: float) -> None:
    """Until the part has ended or has used up its time; its count is taken."""
    since = time.monotonic()
    try:
        ended = f"exit code {process.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        ended = f"stopped after {limit_s:g} s"
    part.seconds = time.monotonic() - since
    count(part, ended)


def count(part: Part, ended: str) -> None:
    """Take in the outcomes that the part has recorded."""
    outcomes = [json.loads(line) for line in part.file("jsonl").read_text().splitlines()]
    part.passed, part.skipped = (sum(kind in kinds for kind, *_ in outcomes) for kinds in (PASSED, SKIPPED))
    part.failures = [f"{test}  {reason}" for kind, test, reason, _ in outcomes if kind in FAILED]
    part.took = {test: seconds for kind, test, _, seconds in outcomes if kind == "took"}
    last, test, *_ = outcomes[-1] if outcomes else ("", "collection")
    in_order = last == "end" and (part.failures or ended in NOTHING_FAILED)
    if not in_order:
        part.failures.append(f"pytest did not reach its end ({ended}); it was at {test or 'the end'}")


def summarise(parts: list[Part], seconds: float) -> str:
    """A table of the parts, what failed in them, and the closing line."""
    lines = ["", COLUMNS.format("part", "passed", "failed", "skipped", "seconds")]
    for part in parts:
        counts = part.passed, len(part.failures), part.skipped
        lines.append(COLUMNS.format(part.name, *counts, f"{part.seconds:.1f}"))
    slowest = sorted(((took, part, test) for part in parts for test, took in part.took.items()), key=lambda one: -one[0])
    lines += ["", f"the {SLOWEST} slowest tests, with what they set up, in seconds"]
    lines += [f"{took:7.1f}  {part.name}: {test}" for took, part, test in slowest[:SLOWEST]]
    lines += [f"FAILED {part.name}: {failure}" for part in parts for failure in part.failures]
    passed, skipped = sum(part.passed for part in parts), sum(part.skipped for part in parts)
    failed = sum(len(part.failures) for part in parts)
    closing = f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s"
    return "\n".join([*lines, "", closing, ""])


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--mpi", default="openmpi,mpich", type=_pythons, help="NAME or NAME=PYTHON, by commas")
    add("--sizes", default="1,2,3,4", type=_sizes, help="numbers of ranks, by commas")
    add("--tier", choices=("test", "more", "all"), help="`make test`, what `make test-more` adds, or all; of chosen tests all")
    add("--keep-seconds", action="store_true", help="write tests/seconds.txt from what this run takes")
    add("--part-limit", default=3600.0, type=float, metavar="SECONDS", help="end a part after so long")
    add("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    options.tier = options.tier or ("all" if options.pytest else "test")
    return options


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _pythons(text: str) -> dict[str, Path]:
    found = {}
    for entry in text.split(","):
        name, _, path = entry.partition("=")
        if not path and name not in PYTHONS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected {' or '.join(PYTHONS)}, or NAME=PYTHON")
        found[name] = Path(path or PYTHONS[name]).absolute()
        if not os.access(found[name], os.X_OK):
            raise argparse.ArgumentTypeError(f"{found[name]}: no such program; `make test` makes it")
    return found


if __name__ == "__main__":
    sys.exit(main())
