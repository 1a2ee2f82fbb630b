"""What the network links of a host have carried: the counters of the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Link(NamedTuple):
    """What a host's link has carried. Packets that the kernel has not yet cut to the wire's size count as one."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def since(self, earlier: Link) -> Link:
        """What came on top of ``earlier``; of a link that went with its host meanwhile, what is known: nothing."""
        return Link(*(max(0, now - before) for now, before in zip(self, earlier, strict=True)))


def read_links(text: str) -> dict[str, Link]:
    """The counters of each interface, from the text of a ``/proc/net/dev``."""
    found = {}
    for line in text.splitlines()[2:]:  # two lines of headings
        name, _, numbers = line.partition(":")
        fields = [int(number) for number in numbers.split()]
        found[name.strip()] = Link(fields[8], fields[0], fields[9], fields[1])
    return found


def link_bytes() -> Link:
    """What the link of this host has carried so far; for programs that run inside a testbed.

    Elsewhere it is the sum over all interfaces but the loopback.
    """
    found = read_links(Path("/proc/self/net/dev").read_text())
    own = [link for name, link in found.items() if name != "lo"]
    return found.get("eth0") or Link(*map(sum, zip(*own, strict=True))) if own else Link(0, 0, 0, 0)
