"""Rank 1 is killed while rank 0 waits for its message and rank 2 for its flag. Both have to notice; they print after what time.

    mpiexec --with-ft ulfm -n 3 python tests/rdma/inside/death.py

With this option, mpiexec does not end the other ranks when rank 1 dies. Wanted: 10 s on idle cores.
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
memory, messages = allocate(comm, 8, 1, "verbs"), connect(comm)
what = "flag" if comm.rank == 2 else "message"
waited = memory.arrived(0, 1) if comm.rank == 2 else messages.Irecv(np.zeros(8), 1 - comm.rank)
waited.Test()  # loads the kernels, which takes seconds here
comm.Barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = now()
try:
    waited.Wait()
    print(f"{what}: the wait ended")
except TransportError as error:
    print(f"{what}: rank {comm.rank} noticed after {now() - began:.1f} s: {error}")
sys.stdout.flush()
os._exit(0)  # MPI cannot be ended without rank 1
