"""The oldest Python 3.11 of this machine: what came with a later 3.11 would be missed there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

# Pre-releases are left out, as is a Python that cannot make virtual environments (Debian's without python3-venv).
ASK = "import ensurepip, sys, venv; *found, level, _ = sys.version_info; print(*found if level == 'final' else ())"

# Where Pythons are that are not in PATH: the distribution's, those of pyenv and of uv.
PLACES = "/usr/bin", "/usr/local/bin", "~/.pyenv/versions/3.11.*/bin", "~/.local/share/uv/python/cpython-3.11.*/bin"


class Python(NamedTuple):
    """An interpreter."""

    version: tuple[int, ...]
    path: Path

    def __str__(self) -> str:
        return f"Python {'.'.join(map(str, self.version))}"


def ask(path: Path) -> Python | None:
    """What ``path`` is; None if it does not run, or is not fit for an environment."""
    try:
        said = subprocess.run([path, "-c", ASK], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError:
        return None
    version = tuple(map(int, said.stdout.split())) if said.returncode == 0 else ()
    return Python(version, path) if version else None


def oldest(places: tuple[str, ...] = PLACES) -> Python | None:
    """The oldest Python 3.11 in PATH and in ``places``."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    for place in places:
        root = Path(place).expanduser()
        folders += root.parents[-1].glob(str(root.relative_to(root.anchor)))
    found = [ask(folder / "python3.11") for folder in dict.fromkeys(folders) if os.path.isfile(folder / "python3.11")]
    return min((python for python in found if python and python.version[:2] == (3, 11)), default=None)
