"""What goes wrong around real verbs: forks, limits, memory that goes while it is in use."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

from mpiddl.errors import TransportError
from mpiddl.remote_memory import allocate
from mpiddl.transport.verbs.transport import connect

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.limit(120)]


def test_a_forked_process_is_refused_and_does_not_harm_its_parent(link):
    """It ends as Python ends, with all its finalizers; the parent's memory and queue pairs are as before."""
    verbs = connect(link)
    right, left, big = (link.rank + 1) % link.size, (link.rank - 1) % link.size, np.full(1 << 20, link.rank, np.uint8)
    verbs.messages.registrations.local(big)
    child = os.fork()
    if child == 0:
        try:
            code = 1 if (big == link.rank).all() else 3
            verbs.Send(np.zeros(1), right)
        except TransportError as error:
            code = 7 if "forked" in str(error) else 2
        del verbs
        gc.collect()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    big[:] += 10  # on pages that the fork has marked
    got = np.zeros_like(big)
    coming, leaving = verbs.Irecv(got, left), verbs.Isend(big, right)
    coming.Wait()
    leaving.Wait()
    assert (got == left + 10).all()
    verbs.Free()


def test_arrays_that_nobody_holds_any_more_live_until_they_have_arrived(link):
    memory = allocate(link, 8 << 20, 1, "verbs")
    right = (link.rank + 1) % link.size
    request = memory.write(right, 0, np.full(8 << 20, link.rank + 1, np.uint8))
    gc.collect()
    other = np.full(8 << 20, 99, np.uint8)  # where the array was, if it was freed
    memory.signal(right, 0, 1)
    memory.arrived(0, 1).Wait()
    request.Wait()
    assert (memory.local == (link.rank - 1) % link.size + 1).all() and other[0] == 99
    link.Barrier()
    memory.Free()


def test_messages_larger_than_the_device_takes_at_once(link):
    verbs = connect(link)
    verbs.messages.device.largest = 64 << 10
    big, got = np.random.default_rng(0).integers(0, 256, 1_000_003, np.uint8), np.zeros(1_000_003, np.uint8)
    coming, leaving = verbs.Irecv(got, (link.rank - 1) % link.size), verbs.Isend(big, (link.rank + 1) % link.size)
    coming.Wait()
    leaving.Wait()
    assert got.tobytes() == big.tobytes()
    verbs.Free()


LITTLE = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
os.setgid(65534)
os.setuid(65534)
import numpy as np
from mpiddl.errors import TransportError
from mpiddl.transport.verbs.device import VerbsDevice

class Alone:
    rank, size = 0, 1
    def setup_allgather(self, mine): return [mine]
    def Barrier(self): pass

device = VerbsDevice(Alone(), depth=4)
try:
    device.register(np.zeros(4 << 20, np.uint8))
except TransportError as error:
    print(error)
"""


def test_too_little_locked_memory(link, command):
    """Of root, the system asks no limit: so it is another user."""
    if link.rank == 0:
        for name in os.listdir("/dev/infiniband"):
            os.chmod(f"/dev/infiniband/{name}", 0o666)
        done = command(sys.executable, "-c", LITTLE)
        assert "memory of 4194304 bytes cannot be registered" in done.stdout, (done.stdout, done.stderr)
        assert "may lock 1048576 bytes: raise the limit with `ulimit -l unlimited`" in done.stdout
    link.Barrier()
