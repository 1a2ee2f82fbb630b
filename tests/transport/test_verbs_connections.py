"""Connections over verbs: where there is no device, where one rank cannot register memory, and what is left after many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from harness.fake_device import FakeDevice, FakeNetwork

from mpiddl.collectives.wire import new_wire
from mpiddl.errors import TransportError, UsageError
from mpiddl.transport.verbs import ports, transport
from mpiddl.tuning.verbs import works


@pytest.fixture
def fake(monkeypatch):
    """`connect` opens a device that has no network."""
    opened = []

    class Alone(FakeDevice):
        few = False

        def __init__(self, comm, wanted, depth):
            super().__init__(FakeNetwork(0), comm.rank, comm.size, 64, depth, depth, 1 << 20)
            opened.append(self)

        def register(self, array):
            if self.few and self.rank == self.size - 1:
                raise TransportError(f"verbs: memory of {array.nbytes} bytes cannot be registered")
            return super().register(array)

    monkeypatch.setattr(transport, "VerbsDevice", Alone)
    return SimpleNamespace(device=Alone, opened=opened)


@pytest.mark.no_mpi
def test_a_library_without_a_driver(monkeypatch):
    class Refused(Exception):
        pass

    def refuse():
        raise Refused("Failed to get devices list")

    monkeypatch.setattr(ports, "load", lambda: SimpleNamespace(error=Refused, device=SimpleNamespace(get_device_list=refuse)))
    with pytest.raises(TransportError, match="verbs: this host has no RDMA device"):
        ports.find_port()


@pytest.mark.no_mpi
def test_a_device_that_makes_no_sense_is_told_without_the_library():
    with pytest.raises(UsageError, match=r"verbs device \(MPIDDL_VERBS\): got 'rxe0:x'"):
        ports.find_port("rxe0:x")


@pytest.mark.mpi(min_size=2)
def test_if_one_rank_cannot_register_its_buffers_no_rank_uses_verbs(link, fake, monkeypatch):
    monkeypatch.setattr(fake.device, "few", True)
    assert not works(link, aloud=False)
    assert [device.closed for device in fake.opened] == [True]
    with pytest.raises(TransportError, match="cannot be registered"):
        transport.connect(link)


@pytest.mark.mpi(min_size=2)
def test_wires_that_are_freed_leave_no_communicators(link, fake):
    assert works(link, aloud=False)
    owned = link._kept["verbs"].transport._comm._owned
    before = len(owned)
    for _ in range(20):
        new_wire(link, "verbs").comm.Free()
    assert sum(not comm.freed for comm in link._kept["verbs"].transport._comm._owned) == before
    assert len(fake.opened) == 1
