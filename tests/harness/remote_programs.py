"""Programs that write, read and change the memory of other ranks, over any kind of it."""

from __future__ import annotations

import numpy as np

from mpiddl.remote_memory import allocate


def moves(comm, kind):
    """Each rank writes to the right, and reads from the left."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for size in (0, 1, 3, 1000, 300_001):
        memory = allocate(comm, 2 * size + 3, 1, kind)
        assert memory.sizes == [2 * size + 3] * comm.size and not memory.local.any()
        comm.Barrier()
        for step in (1, 2, 3):
            source = np.random.default_rng([comm.rank, step]).integers(0, 256, size).astype(np.uint8)
            written = memory.write(right, 3, source)
            memory.signal(right, 0, step).Wait()
            written.Wait()
            memory.arrived(0, step).Wait()
            wanted = np.random.default_rng([left, step]).integers(0, 256, size).astype(np.uint8)
            assert memory.local[3 : 3 + size].tobytes() == wanted.tobytes()
            comm.Barrier()
            into = np.zeros(size, np.uint8)
            memory.read(right, 3, into).Wait()
            assert into.tobytes() == source.tobytes()
            comm.Barrier()
        memory.Free()


def counts(comm, kind):
    """Numbers drawn by all ranks are different; a lock made of compare-and-swap keeps a sum right."""
    memory = allocate(comm, 24 if comm.rank == 0 else 0, 0, kind)
    drawn = [memory.fetch_add(0, 0, 3) for _ in range(20)]
    for found in drawn:
        found.Wait()
    everyone = sorted(number for theirs in comm.allgather([found.value for found in drawn]) for number in theirs)
    assert everyone == list(range(0, 60 * comm.size, 3))
    word = np.zeros(1, np.int64)
    for _ in range(10):
        while True:
            held = memory.compare_swap(0, 8, 0, -1 - comm.rank)
            held.Wait()
            if held.value == 0:
                break
        memory.read(0, 16, word).Wait()
        word += 1
        memory.write(0, 16, word).Wait()
        if memory.kind == "MPI":
            memory.fetch_add(0, 0, 0).Wait()  # it is complete at the receiver
        released = memory.compare_swap(0, 8, -1 - comm.rank, 0)
        released.Wait()
        assert released.value == -1 - comm.rank
    comm.Barrier()
    memory.read(0, 16, word).Wait()
    assert word[0] == 10 * comm.size
    comm.Barrier()
    memory.Free()
