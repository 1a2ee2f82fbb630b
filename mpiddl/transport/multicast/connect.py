"""Make a channel: agree on a key, a port and an interface, join, and try whether multicast works here."""

from __future__ import annotations

import atexit
import os
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm
from mpiddl.transport.multicast.channel import WINDOW_BYTES, Channel
from mpiddl.transport.multicast.interfaces import Interface, common_networks, interfaces
from mpiddl.transport.multicast.medium import SHORT, WHOLE, Group
from mpiddl.transport.multicast.pump_thread import PumpThread
from mpiddl.transport.multicast.request import ChannelRequest
from mpiddl.transport.multicast.sockets import Sockets
from mpiddl.transport.multicast.virtual_medium import Network, VirtualMedium
from mpiddl.transport.virtual import VirtualRequest, VirtualTransport

TESTS_S = tuple(0.02 * 2**attempt for attempt in range(7))
"""How long each attempt waits to hear everybody."""

PORTS = range(20_000, 32_000)
"""Below those that Linux hands out by itself (net.ipv4.ip_local_port_range)."""

PORT_ATTEMPTS = 3
"""A program of another job may have the port."""

LINGER_S, FAREWELLS, FAREWELL_S = 5.0, 5, 0.01
"""For what others lack of a rank whose process ends; times that it tells them that it goes, and seconds from time to time."""

SCOPE = "239.192"
"""Addresses for use inside an organisation (RFC 2365, section 6.2)."""


class Connection:
    """A channel that works, and what belongs to it. Made by `connect`.

    Attributes
    ----------
    comm : Comm
        The ranks of the channel, numbered as there.
    channel : Channel
    place : str
        Where it runs, for the user.
    """

    def __init__(self, comm: Comm, channel: Channel, place: str):
        self.comm, self.channel, self.place = comm, channel, place
        self._thread: PumpThread | None = None
        self._process = os.getpid()
        if not isinstance(comm.transport, VirtualTransport):
            atexit.register(self.leave)

    def request(self, since: Callable[[], float | None], what: str) -> Request:
        """A request that is complete from the moment ``since()``; None: not yet. ``what``: for messages."""
        transport = self.comm.transport
        if isinstance(transport, VirtualTransport):
            self.channel.pump()
            return VirtualRequest(transport, since, what)
        return ChannelRequest(self.comm, self.channel, since)

    @property
    def timeless(self) -> bool:
        """No time passes on these ranks: none of them can be late."""
        return isinstance(self.comm.transport, VirtualTransport) and not self.comm.simulated

    def serve(self) -> None:
        """Take what has come, where no thread does it."""
        if self._thread is None:
            self.channel.pump()

    def begin_thread(self) -> None:
        """Have a thread serve the channel while this rank computes. Virtual ranks are served without one."""
        if self._thread is None and not isinstance(self.comm.transport, VirtualTransport):
            self._thread = PumpThread(self.channel)

    def leave(self) -> None:
        """At the end of a process that has not called `Free`: see to it that no rank waits for this one."""
        if os.getpid() != self._process:  # a fork, which is no rank
            return
        if self._thread is not None:
            self._thread.Free()
        with suppress(TransportError):
            channel, streams = self.channel, list(self.channel.streams.values())
            until = channel.now() + LINGER_S
            while channel.now() < until and any(stream.idle_since() is None for stream in streams):
                channel.pump()
                channel.medium.wait(min(channel.pause(), LINGER_S), channel.queued > 0)
            for _ in range(FAREWELLS):
                channel.leave()
                time.sleep(FAREWELL_S)

    def Free(self) -> None:
        """Collective: wait until nobody lacks anything, then give everything back."""
        atexit.unregister(self.leave)
        self.begin_thread()  # it answers those that are later than this rank
        for stream in list(self.channel.streams.values()):
            self.request(stream.idle_since, "what others lack").Wait()
        self.comm.patient_barrier()
        if self._thread is not None:
            self._thread.Free()
        self.channel.close()


class _Agreement(NamedTuple):
    """What rank 0 has drawn."""

    key: bytes
    port: int
    base: str


def connect(comm: Comm, joined: Sequence[Sequence[int]], interface: str = "") -> Connection:
    """A channel between the ranks of ``comm``.

    Parameters
    ----------
    comm : Comm
    joined : sequence of sequence of int
        For each multicast address, the ranks that receive what is sent to it. The same on all ranks.
    interface : str
        A name, an address or a network of the interfaces to use; "" for the first network that all hosts are in.

    Raises
    ------
    TransportError
        On all ranks, with the reason: multicast does not work here.

    Communication
    -------------
    Collective: some all-gathers of short messages, and for each network that is tried a self-test of at most two seconds.
    """
    transport = comm.transport
    if isinstance(transport, VirtualTransport):
        return _connect_virtual(comm, transport, joined)
    if not comm.processes:
        raise TransportError(f"multicast: got {comm.library()}, expected MPI or virtual ranks")
    nodes = comm.nodes()
    found = comm.setup_allgather(interfaces())
    networks = common_networks(found, nodes, interface)
    why = "the hosts have no network in common that carries multicast"
    if interface and not networks and (fit := common_networks(found, nodes)):
        names = " or ".join(f"{each.name} ({each.network})" for (each, *_) in fit)
        why = f"interface: got {interface!r}, expected one that connects all ranks by multicast: {names}"
    for network in networks:
        try:
            return _connect_sockets(comm, joined, network, nodes)
        except TransportError as error:
            why = str(error)
    raise TransportError(f"multicast: {why}")


def _connect_virtual(comm: Comm, transport: VirtualTransport, joined: Sequence[Sequence[int]]) -> Connection:
    network: Network = transport.exchanged(Network())[0]  # type: ignore[arg-type,assignment]
    medium = VirtualMedium(transport, network)
    network.mediums = transport.exchanged(medium)  # type: ignore[arg-type,assignment]
    network.members = {number: set(ranks) for number, ranks in enumerate(joined)}
    medium.channel = Channel(medium, np.zeros(2, np.uint64), comm.rank, comm.size)
    comm.Barrier()
    return Connection(comm, medium.channel, "virtual ranks")


def _connect_sockets(comm: Comm, joined: Sequence[Sequence[int]], network: Sequence[Interface],
                     nodes: Sequence[int]) -> Connection:
    """On one network; a `TransportError` on all ranks where it does not carry multicast."""
    mine = [number for number, ranks in enumerate(joined) if comm.rank in ranks]
    own, mtu = network[comm.rank], min(its.mtu for its in network)
    for attempt in range(1, PORT_ATTEMPTS + 1):
        agreement = _draw(comm, len(joined))
        try:
            sockets = _open(comm, own, agreement, mine, mtu, len(set(nodes)) < comm.size)
            break
        except TransportError:
            if attempt == PORT_ATTEMPTS:
                raise
    try:
        sockets.know(comm.setup_allgather(sockets.addresses))
        channel = Channel(sockets, np.frombuffer(agreement.key, np.uint64), comm.rank, comm.size)
        windows = comm.setup_allgather(channel.window)
        if comm.rank == windows.index(min(windows)):
            _check_buffer(comm.rank, channel.window, sockets)
        channel.limit_window(min(windows))
        _test(comm, channel, joined, mine, own)
    except TransportError:
        sockets.close()
        raise
    return Connection(comm, channel, f"{own.network}, port {agreement.port}, {mtu} bytes")


def _check_buffer(rank: int, window: int, sockets: Sockets) -> None:
    """A warning if the system's receive buffers are too small for full speed."""
    if (window + 1) * sockets.datagram_bytes < WINDOW_BYTES:
        warnings.warn(f"multicast: rank {rank} has a receive buffer of {sockets.buffer_bytes} bytes, expected "
                      f"{2 * WINDOW_BYTES} or more: multicast is slow; raise the limit, as root: sysctl -w net.core.rmem_max="
                      "212992", stacklevel=2)


def _draw(comm: Comm, groups: int) -> _Agreement:
    """By rank 0."""
    base = f"{SCOPE}.{secrets.randbelow(256)}.{secrets.randbelow(1 + max(255 - groups, 0))}"
    agreement: _Agreement = comm.bcast(_Agreement(secrets.token_bytes(16), secrets.choice(PORTS), base))
    return agreement


def _open(comm: Comm, own: Interface, agreement: _Agreement, mine: Sequence[int], mtu: int, together: bool) -> Sockets:
    """A `TransportError` on all ranks where a system refuses."""
    sockets: Sockets | None = None
    try:
        with agreed(comm):
            try:
                sockets = Sockets(own, agreement.port, agreement.base, mine, mtu, together)
            except OSError as error:
                raise TransportError(f"{own.name} ({own.address}), port {agreement.port}: {error}") from None
    except TransportError:
        if sockets is not None:
            sockets.close()
        raise
    assert sockets is not None  # or it was raised
    return sockets


def _test(comm: Comm, channel: Channel, joined: Sequence[Sequence[int]], mine: Sequence[int], own: Interface) -> None:
    """Each rank shows itself at each address, and to each other rank, until all have heard all or `TESTS_S` are over."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    wanted = {(rank, number) for number in (*mine, WHOLE, SHORT) for rank in others}
    heard: list[list[tuple[int, bool]]] = []
    for attempt, seconds in enumerate(TESTS_S):
        began = channel.medium.now()
        if attempt:  # one rank after the other: small receive buffers hold few datagrams
            _listen(channel, set(), began + 0.5 * seconds * comm.rank / comm.size)
        for number in range(len(joined)):
            channel.hello(Group(number), number)
        for rank in others:
            channel.hello(rank, WHOLE)
            channel.hello(rank, SHORT)
        _listen(channel, wanted, began + (seconds if wanted else 0))
        heard = comm.setup_allgather(sorted({(rank, number >= WHOLE) for rank, number in wanted - channel.hellos}))
        if not any(heard):
            return
    first = next(rank for rank, missing in enumerate(heard) if missing)
    silent = [rank for rank, directly in heard[first] if not directly]
    if silent:
        raise TransportError(f"on {own.network}, rank {first} has heard nothing of {_ranks(silent)} by multicast in "
                             f"{sum(TESTS_S):.1f} s; a switch with IGMP snooping needs a querier, and a firewall may drop UDP")
    silent = [rank for rank, _ in heard[first]]
    raise TransportError(f"on {own.network}, rank {first} gets multicast, but no UDP messages that {_ranks(silent)} sent to it "
                         "alone; a firewall has to let all UDP ports through between the hosts")


def _listen(channel: Channel, wanted: set[tuple[int, int]], until: float) -> None:
    """Until then, or until all that are ``wanted``, if any are, have been heard."""
    channel.pump()
    while not (wanted and wanted <= channel.hellos) and channel.medium.now() < until:
        channel.medium.wait(until - channel.medium.now(), False)
        channel.pump()


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
