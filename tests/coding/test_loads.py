"""Loads: what is really encoded has the sizes of the formulas; the predicted times are those that are published."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddl.coding import loads
from mpiddl.coding.choose_owners import senders
from mpiddl.coding.mds_code import MdsCode
from mpiddl.coding.placements import all_subsets, cyclic, replicated_groups
from mpiddl.coding.step_times import published_seconds, step_seconds
from mpiddl.coding.subset_code import SubsetCode
from mpiddl.errors import UsageError
from mpiddl.layout import block_size

pytestmark = pytest.mark.no_mpi

CASES = [(n, r) for n in (4, 8, 10) for r in (1, 2, 3, 4)]
SIZES = [0, 1, 12, 101]


@pytest.mark.parametrize(("workers", "redundancy"), CASES)
def test_published_load_is_that_of_the_packets(workers, redundancy):
    code = SubsetCode(workers, redundancy)
    own = {block: np.zeros(101, np.uint32) for block in range(len(code.placement.owners))}
    packet = np.empty(code.packet_words(101), np.uint32)
    sent, received = [0] * workers, [0] * workers
    for worker in range(workers):
        for number, subset in enumerate(code.subsets(worker)):
            if number == 0:  # one stands for all: their sizes are alike
                code.encode(worker, subset, own, packet)
            sent[worker] += packet.size
            for receiver in set(subset) - {worker}:
                received[receiver] += packet.size
    assert loads.published(workers, redundancy, 101, headers=True) == (sum(sent), sum(received), max(sent), max(received))
    padded = -(-101 // redundancy) * redundancy
    plain = loads.published(workers, redundancy, 101).sent
    assert plain == Fraction(comb(workers, redundancy) * (workers - redundancy), redundancy) * padded
    unicast = loads.unreduced(workers, redundancy, padded, multicast=False)
    assert plain * redundancy == unicast.sent == loads.published(workers, redundancy, 101).received  # coding divides by r


@pytest.mark.parametrize(("workers", "redundancy"), CASES)
@pytest.mark.parametrize("size", SIZES)
def test_mds_load_is_that_of_the_vectors(workers, redundancy, size):
    if redundancy == workers:
        assert loads.mds(workers, redundancy, size) == loads.NOTHING
        return
    for kind in (all_subsets, cyclic):
        for late in range(redundancy):
            code = MdsCode(kind(workers, redundancy), redundancy - late)
            sending, length = senders(code.choose()), code.slice_size(size)
            arriving = [length * len(set(sending) - {worker}) for worker in range(workers)]
            wanted = (length * len(sending), sum(arriving), length, max(arriving))
            assert loads.mds(workers, code.slices, size, len(sending)) == wanted
    if workers % redundancy == size % redundancy == 0:
        assert loads.mds(workers, redundancy, size).sent == workers * size / redundancy  # the lower bound


@pytest.mark.parametrize(("workers", "redundancy"), [(n, r) for n in range(1, 11) for r in range(1, n + 1)])
@pytest.mark.parametrize("size", SIZES)
def test_replicate_and_slice_sends_the_slices_of_its_groups(workers, redundancy, size):
    owners = replicated_groups(workers, redundancy).owners
    sent = [block_size(size, len(group), place) for group in owners for place in range(len(group))] if len(owners) > 1 else [0]
    wanted = (sum(sent), workers * (len(owners) - 1) * size, max(sent), (len(owners) - 1) * size)
    assert loads.replicate_and_slice(workers, redundancy, size) == wanted
    if redundancy < workers and workers % redundancy == 0:
        assert sum(sent) == workers // redundancy * size  # the lower bound


def test_late_members_leave_more_to_the_others():
    assert loads.replicate_and_slice(8, 2, 100, late=1) == loads.replicate_and_slice(8, 2, 100)._replace(egress=100)
    with pytest.raises(UsageError, match="late: got 2, expected from 0 to 1"):
        loads.replicate_and_slice(8, 2, 100, late=2)


def ring_sends(parts):
    """What each place of a ring all-reduce sends: all parts twice, but the one that it ends with, and the next one."""
    return [2 * sum(parts) - part - after for part, after in zip(parts, [*parts[1:], parts[0]], strict=True)]


def sent_by_unicast(workers, redundancy, size):
    """What each worker sends: slices round the groups, then all slices but the successor's round the own group."""
    owners, sent = replicated_groups(workers, redundancy).owners, [0] * workers
    if len(owners) == 1:
        return sent
    slices = min(map(len, owners))
    lengths = [block_size(size, slices, number) for number in range(slices)]
    for number, length in enumerate(lengths):
        parts = [block_size(length, len(owners), part) for part in range(len(owners))]
        for group, elements in zip(owners, ring_sends(parts), strict=True):
            sent[group[number]] += elements
    for group in owners:
        held = [*lengths, *[0] * (len(group) - slices)]
        for place, worker in enumerate(group):
            sent[worker] += size - held[(place + 1) % len(group)]
    return sent


@pytest.mark.parametrize(("workers", "redundancy"), [(n, r) for n in range(1, 11) for r in range(1, n + 1)])
@pytest.mark.parametrize("size", [0, 1, 101, 2520])
def test_unicast_replicate_and_slice(workers, redundancy, size):
    load, sent = loads.replicate_and_slice_unicast(workers, redundancy, size), sent_by_unicast(workers, redundancy, size)
    assert load.sent == load.received == sum(sent) and load.egress == load.ingress
    assert max(sent) <= load.egress <= max(sent) + 4
    if workers % redundancy == 0 and redundancy < workers and size == 2520:
        assert max(sent) == load.egress == size * (1 + Fraction(1, redundancy) - Fraction(2, workers))
    assert loads.replicate_and_slice_unicast(workers, 1, size) == loads.ring_allreduce(workers, size)


def test_unicast_figures_of_the_docs():
    assert loads.replicate_and_slice_unicast(8, 2, 800).egress == 1000  # 1.25 V
    assert loads.replicate_and_slice_unicast(10, 2, 1000).egress == 1300 and loads.ring_allreduce(10, 1000).egress == 1800


@given(st.integers(1, 12), st.integers(0, 200))
def test_a_ring_sends_all_parts_but_two(workers, size):
    sent = ring_sends([block_size(size, workers, part) for part in range(workers)])
    load = loads.ring_allreduce(workers, size)
    assert load.sent == load.received == sum(sent) and max(sent) <= load.egress == load.ingress <= max(sent) + 1


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_exchange_without_a_code(workers):
    one = loads.unreduced(workers, 1, 7, multicast=True)
    assert one == (workers * 7, workers * (workers - 1) * 7, 7, (workers - 1) * 7)
    assert loads.unreduced(workers, 1, 7, multicast=False) == (one.received, one.received, one.ingress, one.ingress)
    assert loads.unreduced(workers, workers, 7, multicast=True) == loads.NOTHING
    assert loads.published(workers, workers, 7) == loads.NOTHING
    assert loads.unreduced(workers, 1, 7, multicast=False) == loads.published(workers, 1, 7)  # r = 1 codes nothing


def test_the_published_scheme_at_eight_workers_sends_84_gradients():
    assert loads.published(8, 2, 1000).sent == 84_000


@pytest.mark.parametrize(("ratio", "wanted", "best"), [(8, [9, 5.43, 4.90, 5.14], 3), (3.5, [4.5, 3.5, 3.83, 4.5], 2)])
def test_the_published_law(ratio, wanted, best):
    seconds = [published_seconds(8, redundancy, 0.5, 0.5 * ratio) / 0.5 for redundancy in range(1, 9)]
    assert seconds[:4] == pytest.approx(wanted, abs=0.0051)
    assert 1 + seconds.index(min(seconds)) == best
    assert seconds[7] == 8  # nothing is sent


@pytest.mark.parametrize(("redundancy", "sliced", "mds"), [(2, -0.44, -0.38), (5, -0.51, -0.43)])
def test_gains_over_multicast_of_local_sums(redundancy, sliced, mds):
    plain = step_seconds(loads.unreduced(10, 1, 3000, multicast=True), 1, 1.0, 9 * 3000 / 12)
    assert plain == pytest.approx(13)
    for load, gain in ((loads.replicate_and_slice(10, redundancy, 3000), sliced), (loads.mds(10, redundancy, 3000), mds)):
        assert step_seconds(load, redundancy, 1.0, 9 * 3000 / 12) / plain - 1 == pytest.approx(gain, abs=0.005)


def test_the_busiest_link_counts_in_its_busier_direction():
    assert step_seconds(loads.Load(90, 90, 30, 20), 1, 1.0, 10.0) == 4
    assert step_seconds(loads.Load(90, 90, 20, 30), 2, 1.0, 10.0) == 5


def test_a_late_worker_costs_what_the_issue_says():
    seconds = step_seconds(loads.replicate_and_slice(4, 2, 1000, late=1), 2, 1.0, 1000.0)
    assert seconds == 2 * 1.0 + max((4 / 2 - 1) * 1000, 1000) / 1000


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("workers", [2, 4, 6, 12])
def test_times_of_replicate_and_slice_are_those_of_the_issue(workers, multicast):
    scheme = loads.replicate_and_slice if multicast else loads.replicate_and_slice_unicast
    for r in [r for r in range(2, workers) if workers % r == 0]:
        moved = max(workers / r - 1, 1 / r) if multicast else 1 + 1 / r - 2 / workers
        found = step_seconds(scheme(workers, r, 12_000_000), r, 2.0, 1e6)
        assert found == pytest.approx(2.0 * r + moved * 12)
