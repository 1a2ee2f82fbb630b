"""The ports of this host's RDMA devices, and the address (GID) of each that other hosts can reach.

RoCE v2 runs over IP, so its address must be one of an IP network that the hosts have in common. An InfiniBand port is addressed
by its LID, inside one subnet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpiddl.errors import TransportError, UsageError
from mpiddl.transport.verbs.library import Library, load

ROCE_V2, ROCE_V1, INFINIBAND = "RoCE v2", "RoCE v1", "InfiniBand"

EMPTY = {"", "0000:0000:0000:0000:0000:0000:0000:0000", "::"}


OFF = "off"
"""In place of a device: none."""


class Address(NamedTuple):
    """One entry of a port's GID table, by its index. ``ip``: it belongs to an IPv4 network."""

    place: int
    gid: str
    kind: str
    ip: bool


class Port(NamedTuple):
    """A port that is up.

    device, number : its name, such as mlx5_0, and the number of the port, from 1.
    lid : of an InfiniBand port; 0 with RoCE.
    mtu : bytes of the largest packet, without headers.
    largest : bytes of the largest message.
    address : the one that is used.
    """

    device: str
    number: int
    lid: int
    mtu: int
    largest: int
    address: Address

    def __str__(self) -> str:
        return f"{self.device} port {self.number}, {self.address.kind}, GID {self.address.place} ({self.address.gid})"


def best_address(table: list[Address], wanted: int | None = None) -> Address | None:
    """RoCE v2 with an IPv4 address is preferred, then RoCE v2, then what there is; ``wanted``: the index that the user gives.

    Examples
    --------
    >>> table = [Address(0, "fe80::1", "RoCE v1", False), Address(1, "::ffff:10.0.0.1", "RoCE v2", True)]
    >>> best_address(table).place, best_address(table, 0).kind, best_address(table, 7)
    (1, 'RoCE v1', None)
    """
    if wanted is not None:
        return next((address for address in table if address.place == wanted), None)
    return min(table, key=lambda address: (address.kind != ROCE_V2, not address.ip, address.place), default=None)


def parse(wanted: str) -> tuple[str, int | None, int | None]:
    """Device, port and GID index of ``DEVICE[:PORT[:GID]]``; None where it says nothing.

    Examples
    --------
    >>> parse(""), parse("mlx5_0"), parse("mlx5_0:1:3")
    (('', None, None), ('mlx5_0', None, None), ('mlx5_0', 1, 3))
    """
    name, *words = wanted.split(":")
    if len(words) > 2 or not all(word.isdecimal() for word in words):
        raise UsageError(f"verbs device (MPIDDL_VERBS): got {wanted!r}, expected DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX, "
                         "such as mlx5_0:1:3, or off")
    port, index = (*map(int, words), None, None)[:2]
    return name, port, index


def find_port(wanted: str = "") -> Port:
    """The first port that is up, of the device that the user ``wanted``; see `parse`. OFF: none.

    Raises
    ------
    TransportError
        No pyverbs, no device, no port that is up, or no GID of that index; the message says what there is.
    """
    if wanted == OFF:
        raise TransportError("verbs: switched off")
    name, number, index = parse(wanted)
    verbs = load()
    try:
        devices = [device.name.decode() for device in verbs.device.get_device_list()]
    except verbs.error:  # no driver is loaded
        devices = []
    if not devices:
        raise TransportError("verbs: this host has no RDMA device; the command ibv_devices lists them, and rdma link shows "
                             "their network interfaces")
    if name and name not in devices:
        raise TransportError(f"verbs: got device {name!r}, expected one of this host: {', '.join(devices)}")
    trouble = ""
    for device in [name] if name else devices:
        try:
            found, why = _of_device(verbs, device, number, index)
        except verbs.error as error:
            found, why = None, f"{device} cannot be opened ({error})"
        if found is not None:
            return found
        trouble = trouble or why
    raise TransportError(f"verbs: {trouble}")


def _of_device(verbs: Library, device: str, number: int | None, index: int | None) -> tuple[Port | None, str]:
    context = verbs.device.Context(name=device)
    try:
        count = context.query_device().phys_port_cnt
        if number is not None and not 1 <= number <= count:
            return None, f"got port {number} of {device}, expected 1 to {count}"
        why = f"{device} has no port"
        for each in [number] if number else range(1, count + 1):
            attributes = context.query_port(each)
            if attributes.state != verbs.enums.IBV_PORT_ACTIVE:
                state = verbs.device.port_state_to_str(attributes.state)
                why = f"port {each} of {device} is not active (state: {state}); is its network interface up?"
                continue
            table = _addresses(verbs, context, each, attributes)
            address = best_address(table, index)
            if address is None:
                had = ", ".join(f"{found.place} ({found.kind}, {found.gid})" for found in table) or "none"
                return None, f"got GID index {index} of {device} port {each}, expected one that has an address: {had}"
            mtu = 128 << attributes.active_mtu  # IBV_MTU_256 is 1
            return Port(device, each, attributes.lid, mtu, attributes.max_msg_sz, address), ""
        return None, why
    finally:
        context.close()


def _addresses(verbs: Library, context: Any, port: int, attributes: Any) -> list[Address]:
    """The GID table of a port, without empty entries."""
    infiniband = attributes.link_layer == verbs.enums.IBV_LINK_LAYER_INFINIBAND
    found = []
    for index in range(attributes.gid_tbl_len):
        try:
            gid = str(context.query_gid(port, index))
            kind = INFINIBAND if infiniband else ROCE_V2 if context.query_gid_type(port, index) == _roce_v2(verbs) else ROCE_V1
        except verbs.error:
            continue
        if gid not in EMPTY:
            found.append(Address(index, gid, kind, gid.startswith("0000:0000:0000:0000:0000:ffff:")))
    return found


def _roce_v2(verbs: Library) -> int:
    """What the library calls it, by its version."""
    names = ("IBV_GID_TYPE_SYSFS_ROCE_V2", "IBV_GID_TYPE_ROCE_V2")
    return next((value for name in names if (value := getattr(verbs.enums, name, None)) is not None), 1)
