"""Where a rank's output ends up: launchers put a pipe between a rank and the terminal of the person who started them.

So a rank looks up its line of parents for the launcher on the same machine and asks whether *its* standard error is a terminal.
Where that cannot be told (another machine, no /proc), there is none.
"""

from __future__ import annotations

import os
from pathlib import Path

LAUNCHERS = {"mpiexec", "mpirun", "prterun", "prte", "prted", "mpiexec.hydra", "hydra_pmi_proxy", "srun", "orterun"}


def columns() -> int | None:
    """Width of the terminal that shows this process's standard error, None if none does."""
    try:
        return os.get_terminal_size(2).columns
    except OSError:
        pass
    process = os.getppid()
    while process > 1 and _name(process) in LAUNCHERS:
        if width := _columns_of(process):
            return width
        process = _parent(process)
    return None


def _columns_of(process: int) -> int | None:
    """Width of a process's standard error, if that is a terminal."""
    try:
        file = os.open(f"/proc/{process}/fd/2", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
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
