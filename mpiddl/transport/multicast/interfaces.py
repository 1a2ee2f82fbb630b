"""The network interfaces of this host that have an IPv4 address, and the networks that hosts have in common."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK, SIOCGIFMTU = 0x8913, 0x8915, 0x891B, 0x8921  # linux/sockios.h
IFF_UP, IFF_LOOPBACK, IFF_MULTICAST = 1 << 0, 1 << 3, 1 << 12  # linux/if.h


class Interface(NamedTuple):
    """``network`` such as 10.0.0.0/24; ``mtu`` in bytes; ``multicast``: it carries multicast."""

    name: str
    address: str
    network: str
    mtu: int
    loopback: bool
    multicast: bool


def interfaces() -> list[Interface]:
    """Those of this host that are up, in the order of the system; one address of each."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                flags, = struct.unpack_from("H", _ask(any_socket, SIOCGIFFLAGS, name), 16)
                address = socket.inet_ntoa(_ask(any_socket, SIOCGIFADDR, name)[20:24])
                mask = socket.inet_ntoa(_ask(any_socket, SIOCGIFNETMASK, name)[20:24])
                mtu, = struct.unpack_from("i", _ask(any_socket, SIOCGIFMTU, name), 16)
                network = str(ipaddress.ip_network(f"{address}/{mask}", strict=False))
                loopback, multicast = bool(flags & IFF_LOOPBACK), bool(flags & IFF_MULTICAST)
                if flags & IFF_UP:
                    found.append(Interface(name, address, network, mtu, loopback, multicast))
    return found


def _ask(any_socket: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(any_socket.fileno(), request, struct.pack("256s", name.encode()[:15]))


def common_networks(by_rank: Sequence[Sequence[Interface]], nodes: Sequence[int], wanted: str = "") -> list[list[Interface]]:
    """Networks that all ranks are in, each as the interface of every rank.

    Parameters
    ----------
    by_rank : the interfaces of each rank.
    nodes : for each rank the node that it is on. Two nodes with the same address are not in one network.
    wanted : a name of interfaces, an address, or a network such as 10.0.0.0/24; "" for any.

    Examples
    --------
    >>> first = Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1500, False, True)
    >>> second = first._replace(address="10.0.0.2")
    >>> bridge = Interface("docker0", "172.17.0.1", "172.17.0.0/16", 1500, False, True)
    >>> [[each.name for each in found] for found in common_networks([[bridge, first], [bridge, second]], [0, 1])]
    [['eth0', 'eth0']]
    """
    alone = len(set(nodes)) == 1
    found = []
    for candidate in by_rank[0]:
        if candidate.loopback != alone:
            continue
        chosen = [next((its for its in theirs if its.network == candidate.network and (its.multicast or alone)), None)
                  for theirs in by_rank]
        there = [its for its in chosen if its is not None]
        homes = {its.address: node for its, node in zip(there, nodes, strict=False)}
        distinct = len(homes) == len(set(nodes))
        if len(there) == len(by_rank) and distinct and (not wanted or any(_is(its, wanted) for its in there)):
            found.append(there)
    return found


def _is(interface: Interface, wanted: str) -> bool:
    return wanted in (interface.name, interface.address, interface.network)
