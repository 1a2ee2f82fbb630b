"""Runs the command of a cell: with a time limit, its output kept, and no process left behind."""

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


# As `mpiddl.transport.uncaught` prints it, or the end of a traceback. With the rank in front, where a launcher prints it.
_ERROR = re.compile(r"^(?:\[[^\]]*\] ?)?(?:mpiddl: error(?: on rank .*?, the job ends)?"
                    r"|(?:[a-z_]+\.)*\w*(?:Error|Exception)): (.+)$", re.MULTILINE)  # fmt: skip
_GONE = (  # Open MPI 5 (from its launcher; from another rank), MPICH 5, Slurm 22.05
    (re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+signal (\d+)"),
     "rank {} on {} was ended by signal {}"),
    (re.compile(r"peer process has unexpectedly disconnected.*?Peer host:\s*(\S+)", re.DOTALL),
     "a rank on {} was killed or crashed"),
    (re.compile(r"PID \d+ RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)"), "a rank on {} ended with code {}"),
    (re.compile(r"srun: error: (\S+): (tasks? [\d,-]+: .+)"), "on {}, {}"),
)
"""What launchers print when a rank is lost."""

_JOB_OVER = re.compile(r"\*\*\* STEP .* DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE|NODE FAILURE)|"
                       r"Unable to create step .*already completing")  # fmt: skip
"""What Slurm 22.05 prints when the job around a run ends: for the present run, and for the next ones."""


class Ended(NamedTuple):
    """Exit code (124: time limit reached) and output."""

    code: int
    text: str


def run(command: Sequence[str], env: Mapping[str, str], mark: str, limit_s: float, launcher: bool = False) -> Ended:
    """Run ``command`` for at most ``limit_s``. Its standard input stays open as long as this process lives.

    ``mark`` is the beginning of the mark of its processes, by which `sweep` finds them if this process is killed. A
    ``launcher`` may not pass on the end of its input, so the kernel ends it when this process ends; only for processes with
    one thread.
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
    """Whether a command failed only because the cluster job around it ended.

    Examples
    --------
    >>> job_over(Ended(1, "srun: error: Unable to create step for job 7: Job/step already completing or completed"))
    True
    """
    return bool(ended.code and _JOB_OVER.search(ended.text))


def reason(ended: Ended, limit_s: float, option: str = "limit in [compare]") -> str:
    """Why a command failed, in a line: the last error printed, the rank that was lost, the signal, the last line printed or the
    exit code, whichever of these is found first. ``option``: where users set the limit.

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
        return f"not finished after {limit_s:g} s ({option})"
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
    """The signal that ended a process, by its own exit code or by that of a shell; 0: none."""
    number = -code if code < 0 else code - 128
    return number if number in signal.valid_signals() else 0


def _shown(text: str) -> str:
    """Printable characters only: launchers end their messages with a zero byte."""
    return "".join(filter(str.isprintable, text)).strip()
