"""Laws of `mpiddl.layout`: every row has one owner and is drawn once an epoch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddl.errors import PlacementError, UsageError
from mpiddl.layout import Layout, block, block_size, check_batch, rank_shards, shard_count

pytestmark = pytest.mark.no_mpi

SIZES = [1, 2, 3, 4, 7, 16, 17, 24]

layouts = st.builds(
    Layout,
    rows=st.integers(1, 300),
    shards=st.integers(1, 40),
    batch=st.integers(1, 320),
    validation=st.floats(0, 0.999),
)


def test_sixteen_shards_up_to_sixteen_ranks_and_then_one_a_rank():
    assert [shard_count(size) for size in SIZES] == [16] * 6 + [17, 24]


def test_a_users_own_number_of_shards_is_kept():
    assert [shard_count(size, 16) for size in (1, 3, 16)] == [16, 16, 16]
    assert shard_count(17, 40) == 40


@pytest.mark.parametrize(
    ("size", "shards", "message"),
    [(4, 3, "shards: got 3 for 4 ranks"), (17, 16, "shards: got 16 for 17 ranks"), (1, 0, "shards: got 0, expected 1 or more")],
)
def test_shards_that_cannot_be_dealt_are_refused(size, shards, message):
    with pytest.raises(PlacementError, match=message):
        shard_count(size, shards)


@given(st.integers(0, 500), st.integers(1, 60))
def test_blocks_cut_items_without_gap_larger_first(n, parts):
    blocks = [block(n, parts, part) for part in range(parts)]
    assert [item for items in blocks for item in items] == list(range(n))
    sizes = [len(items) for items in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [block_size(n, parts, part) for part in range(parts)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shards", [1, 5, 16, 24])
def test_every_shard_has_one_rank(size, shards):
    held = [shard for rank in range(size) for shard in rank_shards(shards, size, rank)]
    assert held == list(range(shards))


@given(layouts)
def test_every_row_is_in_one_shard(layout):
    rows = [row for shard in range(layout.shards) for row in layout.shard_rows(shard)]
    assert rows == list(range(layout.rows))


@given(layouts)
def test_the_split_leaves_rows_to_train_on_and_fits_in_the_shards(layout):
    counts = [layout.train_count(shard) for shard in range(layout.shards)]
    assert sum(counts) == layout.train_rows >= 1
    assert layout.train_rows + layout.validation_rows == layout.rows
    assert abs(layout.validation_rows - layout.validation * layout.rows) <= 1
    assert all(count <= len(layout.shard_rows(shard)) for shard, count in enumerate(counts))


@given(layouts)
def test_an_epoch_draws_every_training_row_of_every_shard_once(layout):
    for shard in range(layout.shards):
        drawn = [index for step in range(layout.steps_per_epoch) for index in layout.step_range(step, shard)]
        assert drawn == list(range(layout.train_count(shard)))


@given(layouts)
def test_batches_are_full_but_for_the_last_and_spread_evenly(layout):
    for step in range(layout.steps_per_epoch):
        taken = [len(layout.step_range(step, shard)) for shard in range(layout.shards)]
        last = step == layout.steps_per_epoch - 1
        assert sum(taken) == layout.batch_rows(step)
        assert layout.batch_rows(step) == layout.batch or (
            last and 0 < layout.batch_rows(step) < layout.batch
        )
        assert max(taken) - min(taken) <= 1


@given(layouts)
def test_positions_go_round_the_shards(layout):
    """The definition: position g of the epoch is index g // S of shard g % S."""
    for step in range(layout.steps_per_epoch):
        low = step * layout.batch
        positions = range(low, min(low + layout.batch, layout.train_rows))
        wanted = Counter((g % layout.shards, g // layout.shards) for g in positions)
        taken = [(s, index) for s in range(layout.shards) for index in layout.step_range(step, s)]
        assert Counter(taken) == wanted


@given(layouts, st.integers(1, 30))
def test_no_batch_outgrows_its_buffer(layout, size):
    for rank in range(size):
        held = rank_shards(layout.shards, size, rank)
        for step in range(layout.steps_per_epoch):
            taken = sum(len(layout.step_range(step, shard)) for shard in held)
            assert taken <= layout.max_batch_rows(held)


def test_a_batch_larger_than_the_training_rows_is_refused():
    check_batch(90, 90)
    with pytest.raises(UsageError, match="batch: got 91, expected at most 90, the number of training rows"):
        check_batch(91, 90)
    with pytest.raises(UsageError, match="batch: got 0, expected 1 or more"):
        check_batch(0, 90)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0, "shards": 1}, "rows: got 0, expected 1 or more"),
        ({"rows": 1, "shards": 0}, "shards: got 0, expected 1 or more"),
        ({"rows": 1, "shards": 1, "batch": -1}, "batch: got -1, expected 1 or more"),
        ({"rows": 9, "shards": 1, "validation": 1.0}, "validation: got 1.0, expected a fraction from 0"),
        ({"rows": 9, "shards": 1, "validation": -0.1}, "validation: got -0.1"),
        ({"rows": 9, "shards": 1, "validation": float("nan")}, "got nan"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Layout(**arguments)


@pytest.mark.parametrize(
    ("shards", "message"),
    [([0, 4], r"got \[0, 4\], expected shard numbers from 0 to 3"), ([-1], r"got \[-1\]"), ([1, 1], "expected each once")],
)
def test_shards_that_do_not_exist_or_come_twice_are_refused(shards, message):
    with pytest.raises(PlacementError, match=message):
        Layout(rows=10, shards=4).check_shards(shards)
