"""Which workers compute which blocks: every worker and block is served, loads are equal, and speeds are followed."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddl.coding.placements import all_subsets, block_rows, cyclic, replicated_groups, shares
from mpiddl.errors import UsageError

pytestmark = pytest.mark.no_mpi


KINDS = [all_subsets, replicated_groups, cyclic]
SIZES = [(n, r) for n in range(1, 11) for r in range(1, n + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "redundancy"), SIZES)
def test_each_block_has_its_owners_and_each_worker_its_blocks(kind, workers, redundancy):
    placement = kind(workers, redundancy)
    exact = kind is not replicated_groups or workers % redundancy == 0
    assert placement.redundancy == redundancy if exact else placement.redundancy >= redundancy
    assert all(list(owners) == sorted(set(owners)) for owners in placement.owners)
    pairs = {(worker, number) for number, owners in enumerate(placement.owners) for worker in owners}
    assert pairs == {(worker, number) for worker, mine in enumerate(placement.blocks) for number in mine}
    wanted = {all_subsets: (comb(workers, redundancy), comb(workers - 1, redundancy - 1)),
              replicated_groups: (workers // redundancy, 1), cyclic: (workers, redundancy)}[kind]  # fmt: skip
    assert (len(placement.owners), {len(mine) for mine in placement.blocks}) == (wanted[0], {wanted[1]})


@pytest.mark.parametrize(("workers", "redundancy"), SIZES)
def test_groups_are_balanced_where_nothing_divides(workers, redundancy):
    sizes = [len(owners) for owners in replicated_groups(workers, redundancy).owners]
    assert sum(sizes) == workers and max(sizes) - min(sizes) <= 1 and min(sizes) >= redundancy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "redundancy"), [(0, 1), (3, 0), (3, 4), (3, -1)])
def test_a_redundancy_that_makes_no_sense(kind, workers, redundancy):
    with pytest.raises(UsageError, match=f"redundancy: got {redundancy} with {workers} workers, expected"):
        kind(workers, redundancy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("redundancy", [1.5, "2", None])
def test_redundancies_that_are_no_whole_numbers(kind, redundancy):
    with pytest.raises(UsageError, match=f"redundancy: got {redundancy!r} with 3 workers, expected a whole number from 1 to 3"):
        kind(3, redundancy)


def test_too_many_blocks_are_refused():
    with pytest.raises(UsageError, match="makes 2704156 blocks"):
        all_subsets(24, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_speeds_give_equal_shares(kind):
    for workers, redundancy in ((6, 2), (8, 4), (5, 5), (7, 1)):
        parts = shares(kind(workers, redundancy), [2.5] * workers)
        assert parts == pytest.approx(1 / len(parts), abs=0)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 7), st.data())
def test_shares_follow_the_speeds(kind, workers, data):
    redundancy = data.draw(st.integers(1, workers))
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=workers, max_size=workers))
    placement = kind(workers, redundancy)
    parts = shares(placement, speeds)
    assert parts.sum() == pytest.approx(1) and (parts >= 0).all()
    seconds = max(sum(parts[list(mine)]) / speed for mine, speed in zip(placement.blocks, speeds, strict=True))
    least = max(redundancy / sum(speeds), 1 / sum(sorted(speeds)[: workers - redundancy + 1]) if redundancy == workers else 0)
    equal = max(len(mine) / len(parts) / speed for mine, speed in zip(placement.blocks, speeds, strict=True))
    assert least <= seconds * (1 + 1e-6)  # no better than possible
    assert seconds <= equal * (1 + 1e-6)  # no worse than equal blocks


def test_the_fast_ones_get_more_wherever_it_helps():
    assert shares(replicated_groups(4, 2), [1, 1, 3, 3]).tolist() == pytest.approx([0.25, 0.75])
    placement = cyclic(4, 2)
    parts = shares(placement, [1, 1, 1, 0.2])
    times = [sum(parts[list(mine)]) / speed for mine, speed in zip(placement.blocks, [1, 1, 1, 0.2], strict=True)]
    assert max(times) == pytest.approx(1 / 1.2, rel=1e-6)  # the late one and its opposite have all blocks between them


@pytest.mark.parametrize("slowest", [1e-5, 1e-9, 1e-300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_stands_almost_still_gets_almost_nothing(kind, slowest):
    placement = kind(4, 2)
    parts = shares(placement, [1, 1, 1, slowest])
    assert parts.sum() == pytest.approx(1) and (parts >= 0).all()
    assert kind is replicated_groups or sum(parts[list(placement.blocks[3])]) < 1e-4


@pytest.mark.parametrize("speeds", [[1, 1], [1, 1, 0], [1, 1, -1], [1, 1, float("nan")], [1, 1, float("inf")]])
def test_speeds_that_make_no_sense(speeds):
    with pytest.raises(UsageError, match=r"speeds: got .* expected 3 numbers above 0"):
        shares(cyclic(3, 2), speeds)


@given(st.integers(0, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda parts: sum(parts) > 0.1))
def test_rows_in_proportion(rows, parts):
    parts = np.array(parts) / sum(parts)
    blocks = block_rows(rows, parts)
    assert len(blocks) == len(parts) and [row for each in blocks for row in each] == list(range(rows))
    assert all(abs(len(each) - part * rows) <= 1 + 1e-6 for each, part in zip(blocks, parts, strict=True))
