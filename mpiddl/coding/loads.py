"""How much each scheme sends, from the numbers of workers, the redundancy and the size of a gradient. Payload, no headers.

n workers, redundancy r, V elements in a gradient, G = floor(n/r) groups. In all, where everything divides:

=======================================  =====================================================
scheme                                   elements sent by all workers
=======================================  =====================================================
replicate-and-slice, multicast           G V; nothing for G = 1
replicate-and-slice, unicast             n V (1 + 1/r - 2/n); nothing for G = 1
MDS, multicast (`mds_code`)              V/m from each sender; nothing for r = n without late workers
published code (`subset_code`)           C(n, r) (n - r) / r V
all block gradients, multicast           C(n, r) V; nothing for r = n
all block gradients, unicast             C(n, r) (n - r) V
ring all-reduce (r = 1)                  2 (n - 1) V
=======================================  =====================================================

The least that multicast can send is (n/r) V for r < n. With r > n/2 there is one group of all n workers: each then computes
everything.
Sources: Li, Maddah-Ali & Avestimehr 2018, arXiv:1604.07086; Ye & Abbe 2018, arXiv:1802.03475; the ring as
`mpiddl.collectives.allreduce_ring`; replicate-and-slice: ours.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

from mpiddl.coding.placements import check_redundancy
from mpiddl.errors import UsageError
from mpiddl.layout import ceil_div


class Load(NamedTuple):
    """Elements of one step."""

    sent: int
    """Sent by all workers. A multicast counts once, for any number of receivers."""

    received: int
    """Received by all workers. This much is sent where the network makes no copies."""

    egress: int
    """Sent by the busiest worker."""

    ingress: int
    """Received by the busiest worker."""


NOTHING = Load(0, 0, 0, 0)


def groups(workers: int, redundancy: int) -> int:
    """Number of groups of replicate-and-slice, G (`mpiddl.coding.placements.replicated_groups`).

    Examples
    --------
    >>> groups(8, 2), groups(8, 3), groups(8, 5)
    (4, 2, 1)
    """
    check_redundancy(workers, redundancy)
    return workers // redundancy


def replicate_and_slice(workers: int, redundancy: int, size: int, late: int = 0) -> Load:
    """Each member of a group multicasts its slice of the group's sum to all other groups.

    Parameters
    ----------
    late : int
        Members of a group that send nothing; the others of that group send their slices.

    Examples
    --------
    >>> replicate_and_slice(8, 2, 1000)
    Load(sent=4000, received=24000, egress=500, ingress=3000)
    """
    count = groups(workers, redundancy)
    senders = workers // count - late
    if not 0 <= late < workers // count:
        raise UsageError(f"late: got {late}, expected from 0 to {workers // count - 1}, fewer than the workers of a group")
    if count == 1:
        return NOTHING
    return Load(count * size, workers * (count - 1) * size, ceil_div(size, senders), (count - 1) * size)


def replicate_and_slice_unicast(workers: int, redundancy: int, size: int) -> Load:
    """Slices are all-reduced across groups in rings, then gathered inside each group in a ring.

    There are as many slices as the smallest group has members. ``sent`` and ``received`` are exact. ``egress`` and ``ingress``
    are exact where r divides n and all parts have the same size, and bounds otherwise.

    Examples
    --------
    >>> replicate_and_slice_unicast(8, 2, 1000)  # 1.25 V a worker
    Load(sent=10000, received=10000, egress=1250, ingress=1250)
    """
    count = groups(workers, redundancy)
    if count == 1:
        return NOTHING
    slices, largest = workers // count, ceil_div(workers, count)
    total = (2 * (count - 1) + workers - count) * size
    gathered = size - size // slices if slices == largest else size
    each = ring_allreduce(count, ceil_div(size, slices)).egress + gathered
    return Load(total, total, each, each)


def mds(workers: int, slices: int, size: int, senders: int | None = None) -> Load:
    """Each of ``senders`` workers multicasts a vector of 1/m of a gradient, padded, to all others.

    Parameters
    ----------
    slices : int
        m, redundancy less the number of workers that may be late.
    senders : int, optional
        By default all workers, which is for a redundancy of m; none for m = n, where each worker has the sum.

    Examples
    --------
    >>> mds(4, 2, 1001)
    Load(sent=2004, received=6012, egress=501, ingress=1503)
    """
    check_redundancy(workers, slices)
    if senders is None:
        senders = workers if slices < workers else 0
    length, others = ceil_div(size, slices), senders - (senders == workers)
    return Load(senders * length, senders * (workers - 1) * length, length * min(senders, 1), others * length)


def published(workers: int, redundancy: int, words: int, headers: bool = False) -> Load:
    """The packets of `mpiddl.coding.subset_code` for gradients of ``words`` words, padding included.

    Parameters
    ----------
    headers : bool
        Count also the header of each packet, 2 r words.

    Examples
    --------
    >>> published(8, 2, 1000)  # 84 V
    Load(sent=84000, received=168000, egress=10500, ingress=21000)
    """
    check_redundancy(workers, redundancy)
    packet = ceil_div(words, redundancy) + headers * 2 * redundancy
    each = comb(workers - 1, redundancy)
    sent = workers * each * packet
    return Load(sent, redundancy * sent, each * packet, redundancy * each * packet)


def unreduced(workers: int, redundancy: int, size: int, multicast: bool) -> Load:
    """Every worker gets the gradient of every block, without a code; all subsets. Redundancy 1: one block per worker.

    Examples
    --------
    >>> unreduced(8, 1, 1000, multicast=True), unreduced(8, 1, 1000, multicast=False).sent
    (Load(sent=8000, received=56000, egress=1000, ingress=7000), 56000)
    """
    check_redundancy(workers, redundancy)
    lacking = comb(workers - 1, redundancy) * size
    blocks = comb(workers, redundancy) if redundancy < workers else 0
    if multicast:
        return Load(blocks * size, workers * lacking, ceil_div(blocks, workers) * size, lacking)
    return Load(workers * lacking, workers * lacking, lacking, lacking)


def ring_allreduce(workers: int, size: int) -> Load:
    """The sum of all workers' gradients over a ring; ``egress`` is a bound where n does not divide the size.

    Examples
    --------
    >>> ring_allreduce(8, 1000)
    Load(sent=14000, received=14000, egress=1750, ingress=1750)
    """
    each = 2 * (size - size // workers)
    return Load(2 * (workers - 1) * size, 2 * (workers - 1) * size, each, each)
