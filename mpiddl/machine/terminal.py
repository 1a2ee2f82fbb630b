"""Where a rank's output ends up. A launcher puts a pipe or a terminal of its own between a rank and the user's terminal.

So a rank searches its parents for the launcher on the same machine, and asks whether the *launcher's* output is a terminal. If
the launcher is on another machine, the answer is no.
"""

from __future__ import annotations

import os
from pathlib import Path

LAUNCHERS = {"mpiexec", "mpirun", "prterun", "prte", "prted", "mpiexec.hydra", "hydra_pmi_proxy", "srun", "orterun"}


def columns(stream: int = 2) -> int | None:
    """Width of the terminal that shows this process's output on ``stream`` (1 or 2), None if no terminal does."""
    process = os.getppid()
    if _name(process) not in LAUNCHERS:
        try:
            return os.get_terminal_size(stream).columns
        except OSError:
            return None
    while process > 1 and _name(process) in LAUNCHERS:
        if width := _columns_of(process, stream):
            return width
        process = _parent(process)
    return None


def _columns_of(process: int, stream: int) -> int | None:
    """Width of a process's ``stream``, if that is a terminal."""
    try:
        file = os.open(f"/proc/{process}/fd/{stream}", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.get_terminal_size(file).columns
    except OSError:
        return None
    finally:
        os.close(file)


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def _parent(process: int) -> int:
    """The fourth field of stat; the second may hold spaces, but ends with the last bracket."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
