"""Sixteen ranks in one process, no mpiexec: how much accuracy does local SGD give for how few bytes?

    python examples/virtual_ranks.py

Expect about 0.96 at period 1, and little less at period 16 for a sixteenth of the bytes.
"""

import mpiddl
from mpiddl.transport import virtual

print("period   accuracy   MB sent")
for period in (1, 4, 16):

    def program(comm, strategy=f"local-sgd:period={period}"):
        return mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, epochs=20, batch=128, quiet=True)

    summary = virtual.run(16, program)[0].summary
    print(f"{period:6d}   {summary['test_accuracy']:8.4f}   {summary['bytes_sent'] / 1e6:7.1f}")
