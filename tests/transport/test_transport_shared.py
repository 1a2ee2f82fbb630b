"""Memory that ranks of a node share: what is left of it, and what happens where it cannot be had."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness.tiers import more

from mpiddl.collectives import allreduce_staged, allreduce_two_step, reading
from mpiddl.errors import CommError, OutputError
from mpiddl.transport import shared_memory as shared

# Communicators of overlapping ranks whose algorithms have run. One is freed and another made after it, on some ranks in its
# place: MPI windows that are left would be freed in MPI_Finalize by their places, of which ranks have other ones.
FREES_NOTHING = """
import numpy as np
from mpi4py import MPI
import mpiddl

def used(comm):
    total = np.zeros(300_000)
    comm.Allreduce(np.ones(300_000), total)
    assert (total == comm.size).all()
    return comm, total

whole = mpiddl.Communicator(MPI.COMM_WORLD)
last = whole.Split(whole.rank > 0)
used(last)
kept = [used(whole.Split(whole.rank > 1)), used(whole)]
last.Free()
kept.append(used(whole.Dup()))
print("done", flush=True)
"""

KILLED = """
import os, signal, sys
from mpi4py import MPI
from mpiddl.transport.mpi import connect

link = connect(MPI.COMM_WORLD)
memory = link.share(1 << 20)
memory.segments[link.rank][:] = 1
link.Barrier()
print("there", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def names():
    """Files of ours that have a name, which those in use have not."""
    return {path.name for path in Path(shared.WHERE).glob(f"{shared.PREFIX}*")}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.more
def test_programs_that_free_nothing_end(mpirun, ranks):
    finished = mpirun(ranks, sys.executable, "-c", FREES_NOTHING)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("done") == ranks


def test_nothing_is_left_of_ranks_that_are_killed(mpirun):
    before = names()
    assert mpirun(3, sys.executable, "-c", KILLED).returncode != 0
    until = time.monotonic() + 60
    while names() - before and time.monotonic() < until:  # other tests' have one for a moment
        before &= names()
        time.sleep(0.01)
    assert not names() - before


@pytest.mark.mpi
def test_it_takes_no_files_and_no_memory_once_it_is_freed(link):
    def mapped():
        text = Path("/proc/self/maps").read_text()
        return sum(shared.PREFIX in line for line in text.splitlines())

    gc.collect()
    before = mapped(), len(os.listdir("/proc/self/fd"))
    memories = [link.share(size) for size in (0, 1, mmap.PAGESIZE, 100_000)]
    assert [memory.segments[link.rank].size for memory in memories] == [0, 1, mmap.PAGESIZE, 100_000]
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == (before[0] + len(memories), before[1])
    for memory in memories:
        memory.Free()
        memory.Free()  # the second time is nothing
    del memory, memories
    gc.collect()
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.mpi
def test_arrays_that_are_kept_are_zero_and_take_no_memory(link):
    def taken():
        parts = Path("/proc/self/smaps").read_text().split(shared.PREFIX)[1:]
        return sum(int(re.search(r"^Rss: +(\d+)", part, re.MULTILINE)[1]) for part in parts)

    gc.collect()
    before = taken()
    memory = link.share(1 << 20)
    memory.segments[link.rank][:] = 1
    memory.meet().Wait()
    kept = memory.segments
    memory.Free()
    link.Barrier()
    assert taken() == before
    assert not any(array.any() for array in kept)


@pytest.mark.mpi
def test_an_exception_as_it_is_freed_leaves_no_memory(link, monkeypatch):
    """Of a signal's handler: it comes when the barrier is over."""

    def interrupted():
        link.raw.Barrier()
        raise KeyboardInterrupt

    memory = link.share(100_000)
    memory.segments[link.rank][:] = 1
    kept = memory.segments[link.rank]
    link.Barrier()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(link, "Barrier", interrupted)
        memory.Free()
    assert not kept.any()
    memory.Free()


@pytest.mark.mpi
def test_memory_without_a_limit_is_not_full(link, monkeypatch):
    """tmpfs with size=0 tells 0 blocks."""
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    link.share(1000).Free()


@pytest.mark.mpi
@pytest.mark.parametrize(("where", "name", "number", "told"), [
    (os, "posix_fallocate", errno.ENOSPC, r"0\.\d MB needed for .* enlarge it"),  # another group has taken the last room
    more(os, "posix_fallocate", errno.EIO, r"of this node: \[Errno 5\] no"),
    more(shared, "mapped", errno.ENOMEM, r"of this node: \[Errno 12\] no"),
    (os, "open", errno.EMFILE, r"ulimit -n"),
    more(os, "open", errno.EACCES, r"of this node: \[Errno 13\] no"),
], ids=["room", "disk", "memory", "files", "rights"])  # fmt: skip
def test_what_fails_on_one_rank_is_told_on_all(link, monkeypatch, where, name, number, told):
    def fails(*words, **more):
        raise OSError(number, "no")

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    if link.rank == link.size - 1:
        monkeypatch.setattr(where, name, fails)
    with pytest.raises(CommError, match=told):
        link.share(1000)
    monkeypatch.undo()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    memory = link.share(1000)  # the next one is not harmed
    memory.segments[link.rank][:] = link.rank + 1
    memory.meet().Wait()
    assert [int(segment.max()) for segment in memory.segments] == [rank + 1 for rank in range(link.size)]
    memory.meet().Wait()
    memory.Free()


class Unloadable:
    """The kernels where numba finds no folder for them."""

    def __getattr__(self, name):
        raise OutputError("numba cache: got no folder")


@pytest.mark.mpi(min_size=2)
@pytest.mark.limit(60)
@pytest.mark.parametrize(("where", "make"), [
    (shared, lambda link: link.share(1000)),
    (allreduce_staged, lambda link: link.kept("stage", lambda: allreduce_staged.Stage(link, np.dtype("f4")))),
    (reading, lambda link: link.kept("reading", lambda: reading.Reading(link, np.dtype("f4"), np.zeros(link.size, "i4")))),
    (allreduce_two_step, lambda link: link.kept("two-step", lambda: allreduce_two_step.TwoStep(link, 1000, "f4"))),
], ids=["memory", "stage", "reading", "two-step"])  # fmt: skip
def test_kernels_that_one_rank_cannot_load_are_told_on_all(link, monkeypatch, where, make):
    last = link.size - 1
    if link.rank == last:
        monkeypatch.setattr(where, "kernels", Unloadable())
    with pytest.raises(OutputError, match=f"got no folder .on rank {last} of {link.size}.$"):
        make(link)
    monkeypatch.undo()
    assert not link.broken
    make(link)


@pytest.mark.mpi(min_size=2)
def test_ranks_without_a_folder_in_common_are_told(link, monkeypatch, tmp_path):
    real = os.open
    if link.rank == 1:
        monkeypatch.setattr(os, "open", lambda path, *more: real(str(path).replace(shared.WHERE, str(tmp_path)), *more))
    with pytest.raises(CommError, match=r"rank 1 of this node does not find .* --ipc=host"):
        link.share(1000)


@pytest.mark.mpi
def test_an_exception_as_it_is_made_leaves_no_file(link, monkeypatch):
    """Of a signal's handler, say."""
    before = names()

    def interrupted():
        link.Barrier()  # the file is open on all ranks
        raise KeyboardInterrupt

    monkeypatch.setattr(shared, "_free", interrupted)
    with pytest.raises(KeyboardInterrupt):
        link.share(1000)
    link.Barrier()
    until = time.monotonic() + 60
    while (left := names() - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


@pytest.mark.mpi
def test_many_pieces_take_none_of_the_library_s_contexts(link):
    """MPICH has 2,048."""
    memories = [link.share(8) for _ in range(300)]
    taken = [link.raw.Dup() for _ in range(8)]
    assert all(np.all(memory.segments[link.rank] == 0) for memory in memories)
    for thing in (*memories, *taken):
        thing.Free()
