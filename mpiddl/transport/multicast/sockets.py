"""UDP sockets as a medium: one that has joined the multicast addresses, and one for everything else.

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

from mpiddl.machine import clock
from mpiddl.transport.multicast.interfaces import Interface
from mpiddl.transport.multicast.medium import Destination, Group, Received

UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h
IP_MULTICAST_ALL = 49  # linux/in.h
SO_RCVBUFFORCE = 33  # asm-generic/socket.h

BUFFER_BYTES = 1 << 20
"""Wanted for what has come and was not fetched yet; the system may allow less (net.core.rmem_max)."""

IP_UDP_BYTES = 28
"""Of the headers of IP and UDP."""

LARGEST_DATAGRAM = 8960
"""Bytes; what jumbo frames hold."""

LARGEST_BYTES = 1 << 16
"""Of a burst that is received at once."""

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

    def __init__(self, interface: Interface, port: int, base: str, joined: Sequence[int], mtu: int, together: bool):
        self.datagram_bytes = min(mtu - IP_UDP_BYTES, LARGEST_DATAGRAM) // 8 * 8
        self._base, self._port = ipaddress.IPv4Address(base), port
        self._ranks: dict[tuple[str, int], int] = {}
        self._addresses: list[tuple[str, int]] = []
        self._ready = select.poll()
        self._all: list[socket.socket] = []
        try:
            self._own = self._socket(interface.address, 0)
            self._joined = self._socket("", port, shared=True)
            own = socket.inet_aton(interface.address)
            self._own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
            self._own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, together)
            self._joined.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
            self._memberships = [socket.inet_aton(str(self._base + number)) + own for number in joined]
            for membership in self._memberships:
                self._joined.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        except OSError:
            self.close()
            raise
        self.buffer_bytes = min(each.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for each in self._all)

    @property
    def address(self) -> tuple[str, int]:
        """Of this rank, to be told to the others."""
        host, port = self._own.getsockname()
        return str(host), int(port)

    def know(self, addresses: Iterable[tuple[str, int]]) -> None:
        """The addresses of all ranks."""
        self._addresses = list(addresses)
        self._ranks = {address: rank for rank, address in enumerate(self._addresses)}

    def now(self) -> float:
        return clock.now()

    def send(self, burst: np.ndarray, segment: int, to: Destination) -> bool:
        address = (str(self._base + to.number), self._port) if isinstance(to, Group) else self._addresses[to]
        cut = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("H", segment))] if burst.nbytes > segment else []
        try:
            self._own.sendmsg([burst.data], cut, 0, address)
        except OSError as error:  # without room it is tried again; else it is as if lost on the way
            return error.errno not in (errno.EAGAIN, errno.ENOBUFS)
        return True

    def receive(self, buffer: np.ndarray) -> list[Received]:
        found: list[Received] = []
        data, begin = buffer.data.cast("B"), 0
        for which in (self._joined, self._own):
            while len(data) - begin >= LARGEST_BYTES:
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
        self._ready.modify(self._own, select.POLLIN | (select.POLLOUT if to_send else 0))
        self._ready.poll(max(seconds, 0) * 1000)

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
        self._ready.register(made, select.POLLIN)
        return made
