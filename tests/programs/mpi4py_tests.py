"""mpi4py's own tests with ``Communicator`` in the place of COMM_WORLD and COMM_SELF.

    mpiexec -n 3 python tests/programs/mpi4py_tests.py FOLDER two-step|ring|doubling|rule test_cco_buf ...

FOLDER holds the tests of mpi4py's source distribution. ``rule``: as users have it, so that short messages are the library's;
else the all-reduce of that name and a fitting algorithm for each other call, whatever the size.
"""

import sys
import unittest

import numba  # noqa: F401  before it is hidden below
from mpi4py import MPI

import mpiddl

folder, forced, *names = sys.argv[1:]
taken = None
if forced != "rule":
    short = "binomial" if forced == "doubling" else None
    read = forced if forced == "read" else None
    taken = {"allreduce": forced, "reduce": short or read or "scatter", "allgather": "ring", "reduce_scatter": read or "ring",
             "bcast": short or ("scatter" if forced == "ring" else "chain"), "barrier": "dissemination"}

COMM_WORLD, COMM_SELF = MPI.COMM_WORLD, MPI.COMM_SELF  # pickles find MPI's own here
MPI.COMM_WORLD, MPI.COMM_SELF = (mpiddl.Communicator(comm, algorithms=taken) for comm in (COMM_WORLD, COMM_SELF))

sys.path.insert(0, folder)
hidden, sys.modules["numba"] = sys.modules["numba"], None  # else they would want a GPU of it
import arrayimpl  # noqa: E402, F401

sys.modules["numba"] = hidden
result = unittest.TextTestRunner(verbosity=0).run(unittest.defaultTestLoader.loadTestsFromNames(names))
print(f"rank {COMM_WORLD.rank}: {result.testsRun} tests, {len(result.failures) + len(result.errors)} failed")
sys.exit(not result.wasSuccessful())
