"""UDP sockets as a medium: one that has joined the multicast addresses, one for everything else, and one to send short messages
from, which find room when that of the data is full.

The kernel cuts a burst into datagrams as late as it can (UDP_SEGMENT), and hands on several datagrams of a sender as one
(UDP_GRO): 44 datagrams cost one system call and one pass through the network stack.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.machine import clock
from mpiddl.transport.multicast.interfaces import Interface
from mpiddl.transport.multicast.medium import Destination, Group, Received

UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h
IP_MULTICAST_ALL = 49  # linux/in.h
SO_RCVBUFFORCE = 33  # asm-generic/socket.h

BUFFER_BYTES = 1 << 20
"""Wanted for what has come and was not fetched yet; the system may allow less (net.core.rmem_max)."""

GONE_S = 20.0
"""Seconds in which nothing can be sent, after which the network is taken to be gone."""

IP_UDP_BYTES = 28
"""Of the headers of IP and UDP."""

LARGEST_DATAGRAM = 8960
"""Bytes; what jumbo frames hold."""

LARGEST_BYTES = 1 << 16
"""Of a burst that is received at once."""

AT_ONCE = 1024
"""Receptions from one socket before what has come is looked at."""

SHORT_BYTES = 512

ANCILLARY_BYTES = socket.CMSG_SPACE(4)


class Sockets:
    """The sockets of one rank.

    Parameters
    ----------
    interface : Interface
    port : int
        For multicast, the same on all ranks.
    base : str
        The multicast address of group 0; those of other groups follow.
    joined : sequence of int
        Groups that this rank receives.
    mtu : int
        The smallest one on the way.
    together : bool
        Several ranks of the channel are on this host: they have to hear what it sends.

    Raises
    ------
    OSError
        If the system refuses.
    """

    prompt = False

    def __init__(self, interface: Interface, port: int, base: str, joined: Sequence[int], mtu: int, together: bool):
        self.datagram_bytes = min(mtu - IP_UDP_BYTES, LARGEST_DATAGRAM) // 8 * 8
        self._name, self._base, self._port = f"{interface.name} ({interface.address})", ipaddress.IPv4Address(base), port
        self._cuts, self._failing = True, None  # type: tuple[bool, tuple[float, float] | None]
        self._ranks: dict[tuple[str, int], int] = {}
        self._addresses: list[tuple[str, int]] = []
        self._all: list[socket.socket] = []
        try:
            self._own = self._socket(interface.address, 0)
            self._joined = self._socket("", port, shared=True)
            own = socket.inet_aton(interface.address)
            self._short = self._socket(interface.address, 0)
            for sends in (self._own, self._short):
                sends.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
                sends.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, together)
            self._joined.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
            self._memberships = [socket.inet_aton(str(self._base + number)) + own for number in joined]
            for membership in self._memberships:
                self._joined.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        except OSError:
            self.close()
            raise
        self.buffer_bytes = min(each.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for each in self._all)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of this rank, to be told to the others: where it receives, and from where else it sends."""
        return [each.getsockname() for each in (self._own, self._short)]

    def know(self, addresses: Iterable[list[tuple[str, int]]]) -> None:
        """The addresses of all ranks."""
        everyone = list(addresses)
        self._addresses = [receives for receives, _ in everyone]
        self._ranks = {address: rank for rank, its in enumerate(everyone) for address in its}

    def now(self) -> float:
        return clock.now()

    def departed(self) -> float:
        return clock.now()

    def send(self, burst: np.ndarray, segment: int, to: Destination) -> bool:
        address = (str(self._base + to.number), self._port) if isinstance(to, Group) else self._addresses[to]
        try:
            self._write(burst.data, segment, address)
        except OSError as error:  # without room it is tried again; else it is as if lost on the way
            if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            self._note_failure(error)
        else:
            self._failing = None
        return True

    def _write(self, burst: memoryview, segment: int, address: tuple[str, int]) -> None:
        if len(burst) <= segment:
            (self._own if len(burst) > SHORT_BYTES else self._short).sendto(burst, address)
            return
        if self._cuts:
            try:
                self._own.sendmsg([burst], [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("H", segment))], 0, address)
                return
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EINVAL):
                    raise
                self._cuts = False  # not on this interface
        for begin in range(0, len(burst), segment):
            self._own.sendto(burst[begin : begin + segment], address)

    def _note_failure(self, error: OSError) -> None:
        """A `TransportError` if nothing could be sent for long, though it was tried all the time."""
        now = self.now()
        since, last = self._failing or (now, now)
        self._failing = (since if now - last < GONE_S / 4 else now), now
        if now - since > GONE_S:
            raise TransportError(f"multicast: {self._name}: nothing could be sent for {GONE_S:g} s: {error}") from error

    def receive(self, buffer: np.ndarray) -> list[Received]:
        found: list[Received] = []
        data, begin = buffer.data.cast("B"), 0
        for which in (self._own, self._joined):  # acknowledgements first: senders wait for them
            for _ in range(AT_ONCE):
                if len(data) - begin < LARGEST_BYTES:
                    break
                try:
                    nbytes, told, _, source = which.recvmsg_into([data[begin:]], ANCILLARY_BYTES)
                except OSError:
                    break
                segment = int.from_bytes(told[0][2][:4], "little") if told else nbytes
                rank, last = self._ranks.get(source, -1), found[-1] if found else None
                if (last is not None and last.nbytes % last.segment == 0 and last.segment == segment and last.source == rank
                        and last.begin + last.nbytes == begin and last.multicast == (which is self._joined)):
                    found[-1] = last._replace(nbytes=last.nbytes + nbytes)
                else:
                    found.append(Received(begin, nbytes, max(segment, 1), rank, which is self._joined))
                begin += (nbytes + 7) // 8 * 8
                if nbytes > segment:  # much has come: let it be acknowledged at once
                    return found
        return found

    def wait(self, seconds: float, to_send: bool) -> None:
        ready = select.poll()  # a thread may wait at the same time, and an object waits for one caller only
        ready.register(self._joined, select.POLLIN)
        ready.register(self._own, select.POLLIN | (select.POLLOUT if to_send else 0))
        ready.poll(max(seconds, 0) * 1000)

    def rejoin(self) -> None:
        for membership in self._memberships:
            with suppress(OSError):
                self._joined.setsockopt(socket.IPPROTO_IP, socket.IP_DROP_MEMBERSHIP, membership)
                self._joined.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        for each in self._all:
            each.close()

    def _socket(self, host: str, port: int, shared: bool = False) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._all.append(made)
        made.setblocking(False)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        with suppress(OSError):  # root may exceed the limit
            made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        with suppress(OSError):  # an older kernel hands them on one by one
            made.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        made.bind((host, port))
        return made
