"""What ``import mpiddl`` and the commands that need no MPI do not load; each in a fresh process."""

from __future__ import annotations

import ast
import sys
import time

import numpy
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

# What a program of one rank has loaded, of what is heavy, and its memory in MiB.
PROGRAM = """
import sys
from pathlib import Path
from mpi4py import MPI
import numpy
{}
heavy = [name for name in ("numba", "llvmlite", "scipy", "sklearn", "rich") if name in sys.modules]
pages = int(Path("/proc/self/statm").read_text().split()[1])
print((heavy, pages * 4096 / 2**20))
"""
MAKE = "import mpiddl; comm = mpiddl.Communicator(MPI.COMM_WORLD)"

DECOMPOSE = """
import os, sys
from mpiddl.cli import main
try:
    main({args!r})
except SystemExit as ended:
    heavy = [name for name in ("scipy", "sklearn", "numba") if name in sys.modules]
    os.write(2, f"loaded: {{heavy}}\\n".encode())
    raise
"""

USED = """
import sys
from mpi4py import MPI
import mpiddl, numpy
comm = mpiddl.Communicator(MPI.COMM_WORLD)
loaded = []
for nbytes in (64, 1 << 20):
    result = numpy.empty(nbytes, numpy.uint8).view(numpy.float32)
    comm.Allreduce(numpy.ones_like(result), result)
    assert (result == comm.size).all()
    loaded.append("numba" in sys.modules)
sys.stdout.write("{}-{}\\n".format(*loaded))
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


def test_a_communicator_that_is_not_used_loads_no_compiler(command):
    """Two processes of one rank: what mpi4py and numpy take alone, and what a `Communicator` adds to it."""
    plain, made = (ast.literal_eval(command(sys.executable, "-c", PROGRAM.format(make)).stdout) for make in ("", MAKE))
    assert made[0] == [], "expected nothing of these"
    assert made[1] - plain[1] < 20, "MiB of memory that a Communicator may add"


@pytest.mark.limit(120)
def test_short_calls_load_no_compiler_and_long_ones_do(mpirun):
    ended = mpirun(2, sys.executable, "-c", USED)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["False-True"] * 2


@pytest.mark.parametrize(("module", "barred"), [
    ("mpiddl.decomposition", {"numba", "scipy", "sklearn", "matplotlib"}),
    ("mpiddl.decomposition.run", {"numba", "scipy", "sklearn", "matplotlib"}),
])  # fmt: skip
def test_decompositions_load_no_compiler_at_import(command, module, barred):
    ended = command(sys.executable, "-c", f"import {module}; {TELL}")
    assert not barred & set(ast.literal_eval(ended.stderr))


def test_the_public_names_load_no_compiler(command):
    ended = command(sys.executable, "-c", f"import mpiddl; [getattr(mpiddl, name) for name in mpiddl.__all__]; {TELL}")
    assert not {"numba", "scipy", "matplotlib"} & set(ast.literal_eval(ended.stderr))


def test_numbers_of_kernels_that_are_repeated_elsewhere():
    from mpiddl import kernels
    from mpiddl.models.mlp import ACTIVATIONS
    from mpiddl.node.guard import Guard
    from mpiddl.strategies.gossip.quantised_average import BITS

    assert (Guard.WORDS, Guard.CHANGES) == (kernels.lock.WORDS, kernels.lock.COUNT)
    assert (*kernels.quantise.MIDDLES,) == BITS
    assert len({getattr(kernels, name) for name in ACTIVATIONS.values()}) == len(ACTIVATIONS)


def test_a_small_decomposition_loads_no_compiler(command):
    program = "import numpy; from mpiddl.decomposition import PCA; PCA(2).fit(numpy.random.default_rng(0).random((50, 450)))"
    ended = command(sys.executable, "-c", f"{program}; {TELL}")
    assert ended.returncode == 0
    assert "numba" not in ast.literal_eval(ended.stderr)


@pytest.mark.parametrize("kind", ["pca", "svd"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_commands_for_a_small_file_load_no_scikit_learn_and_no_compiler(mpirun, tmp_path, size, kind):
    numpy.save(tmp_path / "x.npy", numpy.random.default_rng(0).random((50, 450)))
    program = tmp_path / "program.py"
    program.write_text(DECOMPOSE.format(args=[kind, str(tmp_path / "x.npy"), "-k", "5", "-o", str(tmp_path / "out")]))
    ended = mpirun(size, sys.executable, program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("loaded: []") == size, ended.stderr
    assert (tmp_path / "out" / "summary.json").exists()


def test_every_kernel_is_found_by_its_name():
    from mpiddl import kernels
    from mpiddl.kernels.compensation import damped_move

    assert all(getattr(kernels, name) is not None for name in kernels.__all__)
    assert kernels.damped_move is damped_move
    assert kernels.meet.FLAGS == 16
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kernels.nonsense  # noqa: B018
    assert not set(kernels._HOME) & set(kernels._HOME.values()), "a module would hide the kernel of its name"


def test_every_public_name_is_there():
    import mpiddl

    assert all(getattr(mpiddl, name) is not None for name in mpiddl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mpiddl.nonsense  # noqa: B018


def test_what_a_module_of_kernels_misses_is_named(monkeypatch):
    """A module that is there, and imports one that is not, must not look as if it were not there."""
    from mpiddl import kernels

    monkeypatch.delitem(vars(kernels), "gather", raising=False)
    with pytest.raises(ModuleNotFoundError, match="numba_of_another_name"):
        monkeypatch.setattr(kernels, "import_module", lambda name: __import__("numba_of_another_name"))
        kernels.gather  # noqa: B018
