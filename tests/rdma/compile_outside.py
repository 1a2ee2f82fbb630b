"""Two ranks train as the tests in the guest do, over MPI: compiled kernels are in numba's cache before the guest starts.

The guest's emulated processor would take minutes to compile them. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are the same here and
there (`rdma.guest.PROCESSOR`).
"""

from __future__ import annotations

import mpiddl
from mpiddl.transport.mpi import MpiComm

MpiComm.nodes = lambda self: list(range(self.size))

JOB = {"data": "digits", "hidden": (64,), "epochs": 1, "max_steps": 3, "batch": 60, "rate": 0.05, "quiet": True}

for strategy in ("ring", "two-step", "two-step:form=leader", "allreduce", "asgd:communication=one-sided",
                 "dc-asgd-a:communication=one-sided", "ddc-asgd:communication=one-sided"):
    mpiddl.train("mlp", strategy=strategy, **JOB)
