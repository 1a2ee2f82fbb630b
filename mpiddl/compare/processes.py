"""A command of a cell, run to its end: in time, its words kept, and with nothing of it left."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from mpiddl.testbed.program import MARK, OUT_OF_TIME, sweep

GRACE_S = 10.0
MOST_WORDS = 300
PR_SET_PDEATHSIG = 1  # linux/prctl.h


# With the rank before it, where a launcher tells that.
_ERROR = re.compile(r"^(?:\[[^\]]*\] ?)?(?:[a-z_]+\.)*\w*(?:Error|Exception): (.+)$", re.MULTILINE)
_GONE = (  # Open MPI 5 (what its launcher saw; what a peer saw), MPICH 5, Slurm 22.05
    (re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)"),
     "rank {} on {} was ended by signal {}"),
    (re.compile(r"peer process has unexpectedly disconnected.*?Peer host:\s*(\S+)", re.DOTALL),
     "a rank on {} was killed or crashed"),
    (re.compile(r"PID \d+ RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)"), "a rank on {} ended with code {}"),
    (re.compile(r"srun: error: (\S+): (tasks? [\d,-]+: .+)"), "on {}, {}"),
)
"""What launchers say when a rank is gone, amid much that says nothing."""

_JOB_OVER = re.compile(r"\*\*\* STEP .* DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE|NODE FAILURE)|"
                       r"Unable to create step .*already completing")  # fmt: skip
"""What Slurm 22.05 says of a run when the job around it is at its end: to a run that is going on, and to the next ones."""


class Ended(NamedTuple):
    """Exit code (124: it did not end in time) and what was printed."""

    code: int
    text: str


def run(command: Sequence[str], env: Mapping[str, str], mark: str, limit_s: float, launcher: bool = False) -> Ended:
    """Run ``command``, whose standard input stays open as long as we live; after ``limit_s`` it is ended.

    ``mark`` begins the mark of its processes, by which `sweep` finds them later if we are killed. A ``launcher``, which may
    keep the end of its input to itself, is then ended by the kernel; only to be asked for where there is one thread.
    """
    own = f"{mark}/{uuid.uuid4().hex}"
    with tempfile.TemporaryFile() as page:  # no pipe: a process that outlives the command would hold it open
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": page, "stderr": subprocess.STDOUT}
        if launcher:
            options["preexec_fn"] = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
        process = subprocess.Popen(command, env={**env, MARK: own}, start_new_session=True, **options)
        try:
            code = _code(process, limit_s)
        finally:
            sweep(own)
            process.wait()
            if process.stdin:
                process.stdin.close()
        page.seek(0)
        return Ended(code, page.read().decode(errors="replace"))


def _code(process: subprocess.Popen[bytes], limit_s: float) -> int:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec cleans up after its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return OUT_OF_TIME


def job_over(ended: Ended) -> bool:
    """Whether a command has failed because the cluster's job that it ran in is at its end: that tells nothing about the run.

    Examples
    --------
    >>> job_over(Ended(1, "srun: error: Unable to create step for job 7: Job/step already completing or completed"))
    True
    """
    return bool(ended.code and _JOB_OVER.search(ended.text))


def reason(ended: Ended, limit_s: float) -> str:
    """Why a command has failed, in a line: the last error that it printed, else which rank was lost, else the signal that ended
    it, else the last line, else its code.

    Examples
    --------
    >>> reason(Ended(1, "Traceback\\n  ...\\nmpiddl.errors.UsageError: rate: got -1\\nmpiexec: rank 0 has failed"), 60)
    'rate: got -1'
    >>> reason(Ended(-9, ""), 60)
    'ended by signal 9 (out of memory?)'
    >>> reason(Ended(213, "prterun: no folder"), 60)  # there is no signal 85
    'prterun: no folder'
    >>> reason(Ended(9, "=   PID 14 RUNNING AT h4\\n=   EXIT CODE: 9\\n[mpiexec@login] main: launcher returned error"), 60)
    'a rank on h4 ended with code 9'
    """
    if ended.code == OUT_OF_TIME:
        return f"not over after {limit_s:g} s (limit in [compare])"
    if errors := _ERROR.findall(ended.text):
        return _shown(errors[-1])[:MOST_WORDS]
    for pattern, words in _GONE:
        if found := pattern.search(ended.text):
            return _shown(words.format(*found.groups()))[:MOST_WORDS]
    if number := _signal(ended.code):
        return f"ended by signal {number}" + " (out of memory?)" * (number == signal.SIGKILL)
    lines = [line for text in ended.text.splitlines() if any(map(str.isalnum, line := _shown(text)))]
    return (lines or [f"exit code {ended.code}"])[-1][:MOST_WORDS]


def _signal(code: int) -> int:
    """Which one ended a process, by its code or by the one a shell tells; 0: none did."""
    number = -code if code < 0 else code - 128
    return number if number in signal.valid_signals() else 0


def _shown(text: str) -> str:
    """Without what a terminal does not show: launchers end their messages with a zero byte."""
    return "".join(filter(str.isprintable, text)).strip()
