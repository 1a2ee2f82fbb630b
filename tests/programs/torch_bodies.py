"""Runs the bodies of PyTorch's own distributed tests on MPI ranks, over mpiddl or gloo, and says how many pass.

    python tests/programs/torch_bodies.py mpiddl                   # on 3 ranks
    python tests/programs/torch_bodies.py gloo -k test_ddp -n 4
    python tests/programs/torch_bodies.py mpiddl --keep tests/with_torch/torch_bodies.txt

The bodies are `torch.testing._internal.distributed.distributed_test.DistributedTest._DistTestBase`. They decide by the name of
the backend what they skip: they are loaded as for gloo (then as for MPI, for those of all-to-all), and run with the other name.
A body that fails on one rank may leave others waiting: after LIMIT_S the job is ended, and the next one begins behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from typing import Any

LIMIT_S = 60.0

PASSED, SKIPPED, FAILED, HANGS = "passed", "skipped", "failed", "hangs"
WORST = (HANGS, FAILED, SKIPPED, PASSED)

RECORD = "@@"
"""Begins a line of a rank with an outcome."""


def worker(backend: str, like: str, names: list[str]) -> None:
    """One rank: every body, each with a default group of its own."""
    from mpi4py import MPI

    import mpiddl.torch  # noqa: F401

    world = MPI.COMM_WORLD
    temporary = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    os.environ |= {"BACKEND": like, "WORLD_SIZE": str(world.size), "TEMP_DIR": temporary, "RANK": str(world.rank)}
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_small_worldsize = lambda body: body  # 8 ranks; their groups are ranks 1 and 2
    from torch.testing._internal.distributed import distributed_test as bodies

    bodies.BACKEND = Alias(backend)
    if backend != like:  # names of events are gloo's own
        bodies.PROFILING_SUPPORTED_BACKENDS = bodies.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
    Bodies = _bodies(bodies, world)
    for name in names or sorted(name for name in dir(Bodies) if name.startswith("test_")):
        _say(world.rank, name, "", "begins")
        alarm = threading.Timer(LIMIT_S, lambda: os._exit(3))
        alarm.daemon = True
        alarm.start()
        for folder in ("barrier", "test_dir", "init_dir") if world.rank == 0 else ():
            Path(temporary, folder).mkdir(exist_ok=True)
        outcome, why = _outcome(bodies, Bodies, name, world, backend)
        _say(world.rank, name, outcome, why)
        if outcome == FAILED:
            os._exit(4)  # other ranks may be anywhere
        world.Barrier()
        alarm.cancel()


class Alias(str):
    """The name of a backend; bodies that ask for gloo get "yes"."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def _bodies(bodies: Any, world: Any) -> Any:
    class Bodies(bodies.TestDistBackend, bodies.DistributedTest._DistTestBase):
        """The bodies, on ranks that are there."""

        world_size = world.size

        def _barrier(self, *args: Any, **options: Any) -> None:
            world.Barrier()

        def setUp(self) -> None:
            pass

        def tearDown(self) -> None:
            pass

    return Bodies


def _outcome(bodies: Any, Bodies: Any, name: str, world: Any, backend: str) -> tuple[str, str]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    case = Bodies(name)
    case.rank, case.file_name, case.seed = world.rank, tempfile.mktemp(), 0
    torch.manual_seed(0)
    seconds = bodies.CUSTOM_PG_TIMEOUT.get(name, 300)
    dist.init_process_group(backend, init_method="mpi://", timeout=timedelta(seconds=seconds))
    world.Barrier()
    try:
        getattr(case, name)()
        found = PASSED, ""
    except unittest.SkipTest as skip:
        found = SKIPPED, str(skip)
    except SystemExit as code:
        reasons = {skip.exit_code: skip.message for skip in bodies.TEST_SKIPS.values()}
        found = (SKIPPED if code.code in reasons else FAILED), reasons.get(code.code, f"exit code {code.code}")
    except BaseException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        found = FAILED, f"{type(error).__name__}: {' '.join(lines)[:300]}"
        if os.environ.get("TRACEBACKS"):
            import traceback

            traceback.print_exc()
    if found[0] != FAILED:
        world.Barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def _say(rank: int, name: str, outcome: str, why: str) -> None:
    print(f"{RECORD}{json.dumps([rank, name, outcome, why])}", flush=True)


def drive(backend: str, like: str, ranks: int, names: list[str]) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each body: jobs until all have had their turn."""
    found: dict[str, tuple[str, str]] = {}
    while True:
        left = [name for name in names if name not in found]
        if not left:
            return found
        command = ["mpiexec", "-n", str(ranks), sys.executable, __file__, backend, "--worker", like, *left]
        outcomes: dict[str, list[tuple[str, str]]] = {}
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors,
                                                                     text=True) as job:
            assert job.stdout is not None
            lines = [line for line in map(_shown, job.stdout) if RECORD in line]
            job.wait()
            errors.seek(0)
            stderr = errors.read()
        for line in lines:
            at = line.find(RECORD)
            if at >= 0:
                with_rank = _parsed(line[at + len(RECORD) :])
                if with_rank:
                    _, name, outcome, why = with_rank
                    outcomes.setdefault(name, [])
                    if outcome:
                        outcomes[name].append((outcome, why))
        if not outcomes:
            raise SystemExit(f"no body ran: {stderr[-2000:]}")
        for name, its in outcomes.items():
            if len(its) < ranks and not any(outcome == FAILED for outcome, _ in its):
                tail = [line for line in stderr.splitlines() if "Error" in line or "error:" in line]
                its.append((HANGS, tail[0][:300] if tail else "no end"))
            found[name] = min(its, key=lambda each: WORST.index(each[0]))
        print(f"{len(found)} of {len(names)}", file=sys.stderr, flush=True)


def _shown(line: str) -> str:
    """The line; failures are shown at once."""
    if f'"{FAILED}"' in line:
        print(line, end="", file=sys.stderr, flush=True)
    return line


def _parsed(text: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        return None


def all_names() -> list[str]:
    """Of all bodies, asked in a process of its own: loading them reads the environment."""
    code = ("from torch.testing._internal.distributed.distributed_test import DistributedTest as D;"
            "print(*sorted(n for n in dir(D._DistTestBase) if n.startswith('test_')))")
    told = subprocess.run([sys.executable, "-c", code], env=os.environ | {"BACKEND": "gloo", "WORLD_SIZE": "3"},
                          capture_output=True, text=True, check=True)
    return told.stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--worker", metavar="LIKE")
    parser.add_argument("-n", type=int, default=3, help="MPI ranks")
    parser.add_argument("-k", default="", help="only bodies with this in their name")
    parser.add_argument("--like", choices=("gloo", "mpi"), default="gloo", help="which backend's bodies are not skipped")
    parser.add_argument("--keep", type=Path, help="write the names of those that pass into this file")
    options = parser.parse_intermixed_args()
    if options.worker:
        worker(options.backend, options.worker, options.names)
        return
    since = time.monotonic()
    names = options.names or [name for name in all_names() if options.k in name]
    found = drive(options.backend, options.like, options.n, names)
    for outcome in (SKIPPED, FAILED, HANGS, PASSED):
        for name in (name for name in names if found[name][0] == outcome):
            print(f"{outcome:8} {name} {found[name][1]}")
    counts = {outcome: sum(its[0] == outcome for its in found.values()) for outcome in reversed(WORST)}
    print(f"{options.backend}, {options.n} ranks: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
          f"in {time.monotonic() - since:.0f} s")
    if options.keep:
        options.keep.write_text("".join(f"{name}\n" for name in names if found[name][0] == PASSED))


if __name__ == "__main__":
    main()
