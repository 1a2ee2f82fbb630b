"""Runs the tests part by part and adds up what came of them: ``make test`` is this program without arguments.

    python tests/run.py                                        both MPI libraries, 1 to 4 ranks
    python tests/run.py --mpi mpich --sizes 1,3 -- -k gossip   one of them, some sizes, some tests
    python tests/run.py --mpi openmpi=/my/venv/bin/python      with an environment of your own

A part is one MPI library at one world size. On one rank it runs all tests that do not need more, on several
those with the mpi mark. All parts share one cache of compiled kernels; the first, a single process, fills it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from harness import jobs

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
PYTHONS = {"openmpi": ROOT / ".venv" / "bin" / "python", "mpich": ROOT / ".venv-mpich" / "bin" / "python"}

NOTHING_FAILED = (0, 5)  # pytest's exit codes for: all passed, nothing to run
PASSED, SKIPPED, END = ("passed", "xfailed"), ("skipped",), ("end",)  # kinds of records
COLUMNS = "{:<20} {:>7} {:>7} {:>8} {:>8}"


class Part(NamedTuple):
    """One MPI library at one world size, and what came of it."""

    name: str
    passed: int
    failures: list[str]
    skipped: int
    seconds: float


def main() -> int:
    options = _options()
    BUILD.mkdir(parents=True, exist_ok=True)
    parts = [run_part(name, size, options) for name in options.mpi for size in options.sizes]
    summary = summarise(parts)
    (BUILD / "summary.txt").write_text(summary)
    print(summary, end="", flush=True)
    return int(any(part.failures for part in parts))


def run_part(mpi: str, size: int, options: argparse.Namespace) -> Part:
    """Run pytest once, on ``size`` ranks, with its output passed through."""
    name = f"{mpi}, {size} rank{'s' if size > 1 else ''}"
    print(f"\n{name}", flush=True)
    record = BUILD / f"{mpi}-{size}.jsonl"
    record.write_text("")
    since = time.monotonic()
    ended = _pytest(options.mpi[mpi], size, [f"--record={record}", *options.pytest], options.part_limit)
    outcomes = [json.loads(line) for line in record.read_text().splitlines()]
    failures = [f"{test}  {reason}" for kind, test, reason in outcomes if kind not in PASSED + SKIPPED + END]
    if outcomes[-1:] != [[*END, "", ""]] or (ended not in NOTHING_FAILED and not failures):
        failures.append(f"pytest did not reach its end ({ended})")
    counts = [sum(kind in kinds for kind, _, _ in outcomes) for kinds in (PASSED, SKIPPED)]
    return Part(name, counts[0], failures, counts[1], time.monotonic() - since)


def _pytest(python: Path, size: int, args: list[str], limit_s: float) -> int | str:
    """Run it; its exit code, or why there is none."""
    env = jobs.environment(str(python))
    env["NUMBA_CACHE_DIR"] = str(ROOT / "build" / "numba")
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *args]
    if size > 1:
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the ranks already fill the cores
        command = jobs.mpi_command(size, command, env)
    with jobs.started(command, env, cwd=ROOT) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:g} s"


def summarise(parts: list[Part]) -> str:
    """A table of the parts, what failed in them, and the closing line."""
    lines = ["", COLUMNS.format("part", "passed", "failed", "skipped", "seconds")]
    for name, passed, failures, skipped, seconds in parts:
        lines.append(COLUMNS.format(name, passed, len(failures), skipped, f"{seconds:.1f}"))
    lines += [f"FAILED {part.name}: {failure}" for part in parts for failure in part.failures]
    failed = sum(len(part.failures) for part in parts)
    passed, skipped, seconds = (
        sum(getattr(part, field) for part in parts) for field in ("passed", "skipped", "seconds")
    )
    closing = f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s"
    return "\n".join([*lines, "", closing, ""])


def _options() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--mpi", default="openmpi,mpich", type=_pythons, help="NAME or NAME=PYTHON, by commas")
    add("--sizes", default="1,2,3,4", type=_sizes, help="numbers of ranks, by commas")
    add("--part-limit", default=900.0, type=float, metavar="SECONDS", help="end a part after so long")
    add("pytest", nargs="*", help="arguments for pytest, after --")
    return parser.parse_args()


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _pythons(text: str) -> dict[str, Path]:
    found = {}
    for entry in text.split(","):
        name, _, path = entry.partition("=")
        if not path and name not in PYTHONS:
            raise argparse.ArgumentTypeError(f"got {name!r}, wanted {' or '.join(PYTHONS)}, or NAME=PYTHON")
        found[name] = Path(path or PYTHONS[name]).absolute()
        if not os.access(found[name], os.X_OK):
            raise argparse.ArgumentTypeError(f"{found[name]}: no such program; `make test` makes it")
    return found


if __name__ == "__main__":
    sys.exit(main())
