"""What ``import mpiddl`` and the commands that need no MPI do not load; each in a fresh process."""

from __future__ import annotations

import ast
import sys
import time

import pytest

HEAVY = [
    "mpi4py.MPI",
    "numpy",
    "scipy",
    "sklearn",
    "numba",
    "rich",
    "matplotlib",
    "safetensors",
    "torch",
    "click",
]
TELL = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
COMMAND = f"""
from mpiddl.cli import main
try:
    main([{{option!r}}])
except SystemExit:
    {TELL}
"""


def test_importing_loads_nothing_heavy(command):
    timed = "from time import perf_counter as now; since = now(); import mpiddl; print(now() - since)"
    ended = command(sys.executable, "-c", f"{timed}; {TELL}")
    assert (ended.returncode, ended.stderr) == (0, "[]\n")
    print(f"import mpiddl: {float(ended.stdout):.4f} s")


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_commands_that_only_tell_load_no_mpi(command, option):
    since = time.perf_counter()
    ended = command("mpiddl", option)
    print(f"mpiddl {option}: {time.perf_counter() - since:.3f} s")
    assert (ended.returncode, ended.stderr) == (0, "")
    loaded = ast.literal_eval(command(sys.executable, "-c", COMMAND.format(option=option)).stderr)
    assert set(loaded) <= {"click", "rich"}


def test_version_is_that_of_the_package(command):
    import mpiddl

    assert mpiddl.__version__ in command("mpiddl", "--version").stdout


def test_every_public_name_is_there():
    import mpiddl

    assert all(getattr(mpiddl, name) is not None for name in mpiddl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mpiddl.nonsense  # noqa: B018
