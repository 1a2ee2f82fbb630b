"""A program run to its end on a cluster: in time, counted, and with nothing of it left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mpiddl.machine.link_counters import Link
from mpiddl.testbed import noise
from mpiddl.testbed.cluster import Cluster
from mpiddl.testbed.plan import LOGIN
from mpiddl.testbed.rights import with_tools

# What timeout(1) exits with.
OUT_OF_TIME = 124
# Every process of a run inherits it. Sessions and process groups tell nothing: mpiexec gives each rank its own.
MARK = "MPIDDL_TESTBED_RUN"
_LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Result:
    """How a program ended on a cluster, and what its messages cost.

    ``returncode`` is 124 if it did not end in time. ``links`` holds, for each host, what its link carried meanwhile;
    ``lost`` are the hosts that went down meanwhile.
    """

    returncode: int
    seconds: float
    links: dict[str, Link] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    stdout: str = ""
    stderr: str = ""

    @property
    def output(self) -> str:
        """All that was printed, standard output first."""
        return self.stdout + self.stderr


def run(cluster: Cluster, command: Sequence[str], env: Mapping[str, str], *, host: str = LOGIN, cwd: str | None = None,
        timeout_s: float | None = None, capture: bool = True, quiet: bool = False) -> Result:  # fmt: skip
    """Run a command on a host of the cluster.

    Without ``capture`` it has our streams, but for standard error if ``quiet`` asks to take `noise` out of it.
    """
    mark = uuid.uuid4().hex
    whole, marked = cluster.enter(command, host, cwd), with_tools(env) | {MARK: mark}
    # Files, not pipes: a process that outlives the command would hold a pipe open.
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2))
        errors = subprocess.PIPE if quiet and not capture else err
        up, before, since = _up(cluster), cluster.links(), time.monotonic()
        process = subprocess.Popen(whole, env=marked, stdin=subprocess.DEVNULL if capture else None, stdout=out, stderr=errors)
        copied = noise.copy(process.stderr, sys.stderr.fileno()) if process.stderr else None
        try:
            code = _code(process, timeout_s)
            seconds, after = time.monotonic() - since, cluster.links()
        finally:
            sweep(mark)
            process.wait()
            if copied:
                copied.join(_LAST_WORDS_S)
        moved = {name: after[name].since(before[name]) for name in after}
        lost = tuple(name for name in up if name not in _up(cluster))
        return Result(code, seconds, moved, lost, _text(out), _text(err))


def _up(cluster: Cluster) -> list[str]:
    return [name for name in cluster.plan.names if cluster.is_up(name)]


def _code(process: subprocess.Popen[bytes], timeout_s: float | None) -> int:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    return code if code >= 0 else 128 - code  # as a shell tells of a signal


def _text(page: IO[bytes] | None) -> str:
    if page is None:
        return ""
    page.seek(0)
    return noise.without_noise(page.read()).decode(errors="replace")


def sweep(mark: str) -> None:
    """End whatever is left of a run."""
    while left := _marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if wanted in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
