"""The arena: names, and memory that is private, shared or common."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from harness.reductions import LAYOUTS, REAL, placed

from mpiddl.errors import CommError, UsageError
from mpiddl.memory import ALIGNMENT
from mpiddl.node.arena import Arena
from mpiddl.node.topology import neighbours
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

SIZES = [0, 17, 1000]


def aligned(array):
    return not array.size or array.ctypes.data % ALIGNMENT == 0


def check_sharing(comm):
    local = neighbours(comm).local
    with Arena(comm) as arena:
        for size in SIZES:
            for dtype in ("f4", "u1"):
                name = f"{size} {dtype}"
                own = arena.private(f"own {name}", size, dtype)
                mine = arena.shared(f"all {name}", size + local.rank, dtype)
                whole = arena.common(f"one {name}", size + 1, dtype)
                peers = arena.peers(f"all {name}")
                assert [array.shape for array in (own, mine, whole)] == [(size,), (size + local.rank,), (size + 1,)]
                assert [len(theirs) for theirs in peers] == [size + rank for rank in range(local.size)]
                for array in (own, whole, *peers):
                    assert array.dtype == dtype and aligned(array) and not array.any()
                arena.meet(f"all {name}").Wait()  # all have looked
                own[:], mine[:] = 100, comm.rank % 100
                if local.rank == local.size - 1:
                    whole[:] = 7
                arena.meet(f"all {name}").Wait()
                everyone = local.allgather(comm.rank)
                for rank, theirs in zip(everyone, peers, strict=True):
                    assert (theirs == rank % 100).all()
                assert (whole == 7).all() and (own == 100).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_virtual_ranks_share_within_their_node(layout):
    virtual.run(len(LAYOUTS[layout]), check_sharing, LAYOUTS[layout])


@pytest.mark.mpi
@pytest.mark.parametrize("layout", REAL)
def test_real_ranks_share_within_their_node(link, layout):
    check_sharing(placed(link, layout))


@pytest.mark.mpi
def test_nobody_leaves_a_meeting_before_the_last_has_come(link):
    arena = Arena(link)
    mine = arena.shared("flags", 1, "i8")
    for turn in range(1, 200):
        if turn % 50 == link.rank:
            time.sleep(0.005)
        mine[0] = turn
        meeting = arena.meet("flags")
        if turn % 2:
            meeting.Wait()
        while not meeting.Test():
            pass
        assert all(turn <= flag[0] <= turn + 1 for flag in arena.peers("flags"))
    arena.Free()


@pytest.mark.mpi
def test_names(link):
    arena = Arena(link)
    arena.private("a", 3, "f4")
    arena.shared("b", 3, "f4")
    for make in (arena.private, arena.shared, arena.common):
        for name in ("a", "b"):
            with pytest.raises(UsageError, match=f"name: got '{name}', expected a new name, because this arena already has"):
                make(name, 3, "f4")
    for find in (arena.peers, arena.meet, arena.barrier, arena.free):
        with pytest.raises(UsageError, match="name: got 'c', expected the name of a shared buffer: b"):
            find("c")
    with pytest.raises(UsageError, match="name: got 'a'"):
        arena.peers("a")
    arena.free("a")
    arena.free("b")
    with pytest.raises(UsageError, match=r"there are none"):
        arena.peers("b")
    arena.shared("a", 4, "f8")[:] = 1  # a name given back can be taken again
    arena.private("b", 4, "f8")
    assert arena.peers("a")[link.rank].shape == (4,)
    arena.Free()
    arena.Free()


@pytest.mark.mpi
def test_memory_is_zero_again_after_it_was_given_back(link):
    for _ in range(20):
        with Arena(link) as arena:
            mine = arena.shared("a", 5000, "f8")
            assert not mine.any()
            mine[:] = np.nan


@pytest.mark.mpi
def test_a_communicator_frees_what_an_arena_has_left(link):
    own = link.Dup()
    with pytest.raises(ZeroDivisionError), Arena(own) as arena:
        arena.shared("a", 100, "f4")
        raise ZeroDivisionError
    own.Free()
    arena.Free()


@pytest.mark.mpi
def test_too_little_room_is_told_on_all_ranks_with_the_remedy(link, monkeypatch):
    found = os.statvfs("/dev/shm")
    room = os.statvfs_result((*found[:4], 2 if link.rank == 0 else found[4], *found[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    arena = Arena(link)
    with pytest.raises(CommError, match=r"shared memory: \d+\.\d MB needed for .* has only 0\.0 MB free; .*--shm-size"):
        arena.shared("a", 1_000_000, "f4")
    monkeypatch.undo()
    assert arena.shared("a", 1_000, "f4").size == 1_000
    arena.Free()
