"""Runs the tests part by part and adds up what came of them: ``make test`` is this program without arguments.

    python tests/run.py                                        both MPI libraries, 1 to 4 ranks
    python tests/run.py --mpi mpich --sizes 1,3 -- -k gossip   one of them, some sizes, some tests
    python tests/run.py --mpi openmpi=/my/venv/bin/python      with an environment of your own

A part is one MPI library at one world size. On one rank it runs all tests that do not need more, on several those
with the mpi mark. All parts share one cache of compiled kernels; the first to come, a single process, fills it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from harness import jobs

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
PYTHONS = {"openmpi": ROOT / ".venv" / "bin" / "python", "mpich": ROOT / ".venv-mpich" / "bin" / "python"}

# pytest's exit codes (pytest.ExitCode) for a run in which nothing failed: all passed, nothing to run.
NOTHING_FAILED = (0, 5)
KINDS = {
    "passed": "passed", "xfailed": "passed", "failed": "failed", "error": "failed", "xpassed": "failed", "skipped": "skipped",
}  # fmt: skip


class Part(NamedTuple):
    """One MPI library at one world size, and what came of it."""

    name: str
    counts: Counter[str]
    failures: list[str]
    seconds: float


def main() -> int:
    options = _options()
    BUILD.mkdir(parents=True, exist_ok=True)
    parts = [
        run_part(name, python, size, options)
        for name, python in options.mpi.items()
        for size in options.sizes
    ]
    summary = summarise(parts)
    (BUILD / "summary.txt").write_text(summary)
    print(summary, end="", flush=True)
    return int(any(part.counts["failed"] for part in parts))


def run_part(name: str, python: Path, size: int, options: argparse.Namespace) -> Part:
    """Run pytest once, on ``size`` ranks, with its output passed through."""
    title = f"{name}, {size} rank{'s' if size > 1 else ''}"
    print(f"\n{title}", flush=True)
    record = BUILD / f"{name}-{size}.jsonl"
    record.write_text("")
    since = time.monotonic()
    trouble = _pytest(python, size, ["--record", str(record), *options.pytest], options.part_limit)
    outcomes = [json.loads(line) for line in record.read_text().splitlines()]
    counts = Counter(KINDS[category] for category, _, _ in outcomes)
    failures = [f"{title}: {name}  {reason}" for category, name, reason in outcomes if KINDS[category] == "failed"]
    if trouble and not failures:
        failures = [f"{title}: {trouble}"]
    elif trouble not in ("", "pytest ended with exit code 1"):
        failures.append(f"{title}: {trouble}")
    counts["failed"] = len(failures)
    return Part(title, counts, failures, time.monotonic() - since)


def _pytest(python: Path, size: int, args: list[str], limit_s: float) -> str:
    """Empty, or why the part failed as a whole."""
    env = jobs.environment(str(python))
    env["NUMBA_CACHE_DIR"] = str(ROOT / "build" / "numba")
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *args]
    if size > 1:
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the ranks already fill the cores
        command = jobs.mpi_command(size, command, env)
    with jobs.started(command, env, cwd=ROOT) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"no end within {limit_s:g} s"
    return "" if code in NOTHING_FAILED else f"pytest ended with exit code {code}"


def summarise(parts: list[Part]) -> str:
    """A table of the parts, what failed in them, and the closing line."""
    total = sum((part.counts for part in parts), Counter())
    lines = ["", f"{'part':<20} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}"]
    for name, counts, _, seconds in parts:
        lines.append(f"{name:<20} {counts['passed']:>7} {counts['failed']:>7} {counts['skipped']:>8} {seconds:>8.1f}")
    lines += [f"FAILED {failure}" for part in parts for failure in part.failures]
    seconds = sum(part.seconds for part in parts)
    lines += ["", f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped in {seconds:.0f} s"]
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", default="openmpi,mpich", type=_pythons, help="NAME or NAME=PYTHON, by commas")
    parser.add_argument("--sizes", default="1,2,3,4", type=_sizes, help="numbers of ranks, by commas")
    parser.add_argument("--part-limit", default=900.0, type=float, metavar="SECONDS", help="end a part after so long")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
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
            raise argparse.ArgumentTypeError(f"{found[name]} is no program; `make test` makes the environments")
    return found


if __name__ == "__main__":
    sys.exit(main())
