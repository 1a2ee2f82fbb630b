"""Rank 1 is killed. Rank 0, which only waits for it, has to notice; the time is printed (wanted: 10 s on idle cores).

    mpiexec --with-ft ulfm -n 2 python tests/rdma/inside/death.py message|flag

With this option, mpiexec does not end rank 0 when rank 1 dies.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.machine.clock import now
from mpiddl.remote_memory import allocate
from mpiddl.transport.mpi import connect as world
from mpiddl.transport.verbs.transport import connect

comm = world()
if sys.argv[1] == "flag":
    waited = allocate(comm, 8, 1, "verbs").arrived(0, 1)
else:
    waited = connect(comm).Irecv(np.zeros(8), 1)
waited.Test()  # loads the kernels, which takes seconds here
comm.Barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = now()
try:
    waited.Wait()
    print("the wait ended")
except TransportError as error:
    print(f"noticed after {now() - began:.1f} s: {error}")
sys.stdout.flush()
os._exit(0)  # MPI cannot be ended without rank 1
