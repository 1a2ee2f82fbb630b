"""`mpiddl.Communicator`: requests of ours among the library's."""

from __future__ import annotations

import numpy as np
import pytest
from harness.tiers import only

from mpiddl.communicator import Communicator
from mpiddl.communicator.request import CollectiveRequest
from mpiddl.transport.mpi import MpiComm
from mpiddl.transport.start import load_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("way", ["Wait", "Test", "Waitall", "wait", "Waitany"])
def test_requests_mix_with_the_librarys(comm, forced, way):
    MPI = load_mpi()
    ours = forced("ring")
    source, total, cast = np.full(5000, comm.rank + 1.0), np.zeros(5000), np.full(3000, float(comm.rank))
    there, here = (comm.rank + 1) % comm.size, np.zeros(1)
    requests = [ours.Iallreduce(source, total), ours.Ibcast(cast, 0), comm.Irecv(here, MPI.ANY_SOURCE, 5),
                comm.Isend(np.array([7.0]), there, 5)]
    if way == "Waitall":
        MPI.Request.Waitall(requests)
    elif way == "Waitany":
        for _ in requests:
            MPI.Request.Waitany(requests)
    elif way == "Test":
        while sum(request == MPI.REQUEST_NULL or request.Test() for request in requests) < len(requests):
            pass
    else:
        for request in requests:
            getattr(request, way)()
    assert (total == comm.size * (comm.size + 1) / 2).all() and not cast.any() and here[0] == 7
    assert all(request == MPI.REQUEST_NULL for request in requests)


@pytest.mark.parametrize("way", only({"Waitall", "Waitany"}, ["Waitall", "Testall", "Waitsome", "Waitany"]))
@pytest.mark.parametrize("others", ["null", "one waited for", "one of Waitany"])
def test_a_list_may_hold_null_requests(comm, forced, way, others):
    """MPICH 5 ends the process where a generalized request is beside a null one."""
    MPI = load_mpi()
    ours, totals = forced("ring"), [np.zeros(90_000) for _ in range(3)]
    requests = [ours.Iallreduce(np.full(90_000, comm.rank + 1.0), total) for total in totals]
    if others == "null":
        requests.insert(1, MPI.REQUEST_NULL)
    elif others == "one of Waitany":
        MPI.Request.Waitany(requests)
    else:
        requests[0].Wait()
    if way.endswith("all"):
        while not getattr(MPI.Request, way)(requests):
            pass
    else:
        while any(request != MPI.REQUEST_NULL for request in requests):
            getattr(MPI.Request, way)(requests)
    assert all((total == comm.size * (comm.size + 1) / 2).all() for total in totals)
    assert all(request == MPI.REQUEST_NULL for request in requests)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_long_requests_are_ours_between_nodes_only(comm, monkeypatch, nodes):
    """In one node, and with MPICH, a rank that waits for a list of them in the library holds up our thread."""
    monkeypatch.setattr(MpiComm, "nodes", lambda link: [min(rank, nodes - 1) for rank in range(link.size)])
    MPI, one, x = load_mpi(), Communicator(comm.Dup()), np.full(1 << 17, comm.rank + 1.0)
    total, short, cast = np.zeros(1 << 17), np.zeros(100_000), np.zeros(1 << 17)
    room, part = np.zeros(1 << 18), np.zeros(100_000)  # a message may lie in a longer buffer on some of the ranks
    piece = [room, part.size, MPI.DOUBLE] if comm.rank == 0 else part
    requests = [one.Iallreduce(x, total), one.Iallreduce(x[:100_000], short), one.Ibcast(cast),
                one.Iallreduce(x[:100_000], piece), one.Ibcast(piece)]
    ours = nodes > 1 and MPI.Get_library_version().startswith("Open MPI")
    assert [isinstance(request, CollectiveRequest) for request in requests] == [ours, False, ours, False, False]
    MPI.Request.Waitall(requests)
    assert (total == comm.size * (comm.size + 1) / 2).all()
    one.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["Wait", "Test", "Waitall", "Waitany"])
def test_an_error_when_all_is_there_is_told_and_the_request_is_null(comm, forced, way):
    MPI = load_mpi()
    ours, frozen = forced(), bytes(64)
    kind = MPI.DOUBLE.Create_vector(4, 1, 2).Commit()
    if comm.rank == 0:
        ours.Ibcast(np.ones(4)).Wait()
    else:
        request = ours.Ibcast([frozen, 1, kind])
        with pytest.raises(BufferError if way in ("Wait", "Test") else MPI.Exception):
            while not (getattr(MPI.Request, way)([request]) if way.startswith("Waita") else getattr(request, way)()):
                pass
        assert request == MPI.REQUEST_NULL and frozen == bytes(64)
    kind.Free()
