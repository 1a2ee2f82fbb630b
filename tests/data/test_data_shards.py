"""Laws of `ShardedRows`: batches depend on seed, shards and step, never on the ranks that share them."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddl.data import ArraySource, ShardedRows, arrays_data
from mpiddl.errors import DataError, PlacementError, ShapeError, UsageError
from mpiddl.layout import Layout, rank_shards

pytestmark = pytest.mark.no_mpi

SIZES = [1, 2, 3, 4, 7, 16, 17, 24]


def numbered(n, dtype="float32", features=2):
    """Rows that say which row they are: x[i, :] = i; for bytes x[i, :] = i % 256."""
    x = np.repeat(np.arange(n)[:, None], features, axis=1)
    return ArraySource(x.astype(dtype), np.arange(n) % 3, classes=3)


def flat(parts):
    return list(chain.from_iterable(parts))


def drawn(held, epoch):
    """Return the numbers of the rows of every step of an epoch."""
    return [
        held.batch(epoch, step)[0][:, 0].astype(int).tolist() for step in range(held.layout.steps_per_epoch)
    ]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 90),
    shards=st.integers(1, 30),
    batch=st.integers(1, 100),
    validation=st.floats(0, 0.9),
    epoch=st.integers(0, 3),
)
def test_every_training_row_is_drawn_once_an_epoch_and_the_rest_is_for_validation(
    rows, shards, batch, validation, epoch
):
    held = ShardedRows(numbered(rows), Layout(rows, shards, batch, validation), range(shards))
    trained = sorted(flat(drawn(held, epoch)))
    held_back = [int(row) for x, _ in held.validation() for row in x[:, 0]]
    assert sorted(trained + held_back) == list(range(rows))
    assert (len(trained), len(held_back)) == (held.train_rows, held.validation_rows)


@pytest.mark.parametrize("rows", [5, 100])
@pytest.mark.parametrize("size", SIZES)
def test_the_rows_of_a_step_are_the_same_on_every_number_of_ranks(size, rows):
    layout, source = Layout(rows, shards=24, batch=min(rows, 7), validation=0.3), numbered(rows)
    alone = ShardedRows(source, layout, range(24), seed=4)
    ranks = [ShardedRows(source, layout, rank_shards(24, size, rank), seed=4) for rank in range(size)]
    for epoch in range(2):
        together = [flat(parts) for parts in zip(*(drawn(rank, epoch) for rank in ranks), strict=True)]
        assert together == drawn(alone, epoch)
    held_back = [flat(x[:, 0].tolist() for x, _ in rank.validation()) for rank in ranks]
    assert flat(held_back) == flat(x[:, 0].tolist() for x, _ in alone.validation()) != []


def test_labels_stay_with_their_rows_and_bytes_are_scaled():
    x = np.arange(40, dtype=np.uint8).reshape(20, 2)
    held = ShardedRows(ArraySource(x, np.arange(20)), Layout(20, 4, 6), range(4), dtype="float64")
    for step in range(held.layout.steps_per_epoch):
        got, rows = held.batch(0, step)
        np.testing.assert_allclose(got, x[rows] / 255, rtol=1e-15)


@pytest.mark.parametrize("stored", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batches_have_the_models_dtype_and_are_aligned(stored, dtype):
    held = ShardedRows(numbered(30, stored, 5), Layout(30, 4, 9), [1, 2], dtype=dtype)
    x, y = held.batch(0, 0)
    assert (x.dtype, y.dtype, x.shape[1]) == (np.dtype(dtype), np.int64, 5)
    assert x.flags.c_contiguous
    assert x.ctypes.data % 64 == 0
    assert held.batch(0, 1)[0].ctypes.data == x.ctypes.data


@pytest.mark.parametrize("shards", [[], [7], [6, 7]])
def test_a_rank_without_rows_gets_empty_batches(shards):
    held = ShardedRows(numbered(5), Layout(5, 8, 2, 0.2), shards, dtype="float64")
    for x, y in [held.batch(0, 0), held.batch(3, 1)]:
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 2), np.float64, (0,), np.int64)
    assert list(held.validation()) == list(held.all_rows()) == held.shard_labels() == []
    assert (held.rows, held.train_rows, held.validation_rows) == (0, 0, 0)


def test_shards_that_are_apart_are_read_as_ranges_and_drawn_as_ever():
    source, layout = numbered(60), Layout(60, 6, 12, 0.2)
    alone = [ShardedRows(source, layout, [shard], seed=1) for shard in range(6)]
    asked = []

    class Spy(ArraySource):
        def read(self, ranges):
            asked.extend(ranges)
            return super().read(ranges)

    spy = Spy(np.arange(120, dtype="float32").reshape(60, 2) // 2, np.arange(60) % 3)
    held = ShardedRows(spy, layout, [5, 0, 1], seed=1)
    assert asked == [range(20), range(50, 60)]
    assert drawn(held, 2) == [
        flat(parts) for parts in zip(*(drawn(alone[s], 2) for s in (0, 1, 5)), strict=True)
    ]
    assert [len(labels) for labels in held.shard_labels()] == [10, 10, 10]


def test_arrays_that_may_not_be_written_can_be_drawn_from():
    x = np.ones((4, 2), np.float32)
    x.setflags(write=False)
    assert ShardedRows(ArraySource(x, [0, 1, 0, 1]), Layout(4, 1, 4), [0]).batch(0, 0)[0].sum() == 8


def test_epochs_and_seeds_shuffle_anew_and_a_rerun_does_not():
    source, layout = numbered(64), Layout(64, 4, 16, 0.25)
    held, again = (ShardedRows(source, layout, range(4), seed=3) for _ in range(2))
    other = ShardedRows(source, layout, range(4), seed=4)
    assert drawn(held, 1) != drawn(held, 0) == drawn(again, 0)  # epoch 0 drawn after epoch 1 is what it was
    assert drawn(other, 0) != drawn(held, 0)
    rows = [np.sort(np.concatenate([x[:, 0] for x, _ in each.validation()])) for each in (held, again, other)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).any()


def test_the_draws_are_frozen():
    """These numbers are in checkpoints' promises: a resumed run draws what the first one did."""
    held = ShardedRows(numbered(12), Layout(12, 3, 6, 0.25), range(3), seed=7)
    assert drawn(held, 5) == [[3, 0, 5, 7, 8, 9], [2, 6, 11]]


def test_all_rows_come_in_order_and_in_chunks():
    held = ShardedRows(numbered(25), Layout(25, 4), [0, 1, 3])
    chunks = [x[:, 0].tolist() for x, _ in held.all_rows(chunk=6)]
    assert flat(chunks) == [*range(13), *range(19, 25)]
    assert max(map(len, chunks)) == 6


@pytest.mark.parametrize("targets", [(), (1,), (3,)])
def test_a_regressions_targets_come_in_the_models_dtype(targets):
    y = np.random.default_rng(0).normal(size=(10, *targets))
    held = ShardedRows(ArraySource(np.arange(10.0)[:, None], y), Layout(10, 2, 5), [0, 1], dtype="float32")
    x, got = held.batch(0, 1)
    assert (got.dtype, got.shape) == (np.float32, (5, *targets))
    np.testing.assert_allclose(got, y[x[:, 0].astype(int)], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_on_the_rank_that_holds_it(bad):
    x = np.zeros((20, 3))
    x[13, 2] = bad
    source, layout = ArraySource(x, np.zeros(20, int)), Layout(20, 2, 4)
    ShardedRows(source, layout, [0])
    with pytest.raises(DataError, match=rf"x, row 13, column 2: got {bad}"):
        ShardedRows(source, layout, [1])


def test_a_value_too_large_for_the_models_dtype_is_named():
    source = ArraySource(np.array([[1.0], [1e300]]), [0, 1])
    ShardedRows(source, Layout(2, 1), [0], dtype="float64")
    with pytest.raises(DataError, match=r"row 1, column 0: got 1e\+300, .*finite in float32"):
        ShardedRows(source, Layout(2, 1), [0], dtype="float32")


@pytest.mark.parametrize(("y", "place"), [([0.5, np.nan], "row 1"), ([[0.5, 1], [2, np.nan]], "row 1, column 1")])
def test_a_target_that_is_not_finite_is_named(y, place):
    with pytest.raises(DataError, match=f"^y, {place}: got nan, expected a number that is finite in float32"):
        ShardedRows(ArraySource(np.ones((2, 1)), y), Layout(2, 1), [0])


@pytest.mark.parametrize("row", range(20))
def test_a_target_is_named_by_its_row_in_the_users_array_also_where_rows_are_held_out(row):
    y = np.arange(20.0)
    y[row] = np.inf
    data = arrays_data(np.ones((20, 1)), y)
    with pytest.raises(DataError, match=f"^y, row {row}: got inf"):
        for source in (data.train, data.test):
            ShardedRows(source, Layout(source.n, 1), [0])


class Own:
    """A user's own source, with whatever `read` returns handed in."""

    n, shape, classes, targets = 4, (2,), 3, ()

    def __init__(self, x, y):
        self.rows = x, y

    def read(self, ranges):
        return [(self.rows[0][r.start : r.stop], self.rows[1][r.start : r.stop]) for r in ranges]

    def where(self, row):
        return f"own row {row}"


def test_a_users_own_source_is_enough():
    held = ShardedRows(Own(np.ones((4, 2)), np.arange(4) % 3), Layout(4, 2, 4), [0, 1])
    assert sorted(held.batch(0, 0)[1]) == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (np.ones((4, 2)), np.array([0, 1, 3, 0]), DataError, "own row 2: got label 3, expected 0 to 2"),
        (np.ones((4, 2)), np.array([0, 1, -1, 0]), DataError, "own row 2: got label -1"),
        (np.ones((4, 3)), np.zeros(4, int), ShapeError, r"x of float64 and shape \(4, 3\).*expected x .*\(4, 2\)"),
        (np.ones((4, 2), int), np.zeros(4, int), ShapeError, "x of int64.*uint8 or float32 or float64"),
        (np.ones((4, 2)), np.zeros(4), ShapeError, r"y of float64 and shape \(4,\).*y of int64 and shape \(4,\)"),
    ],
)
def test_a_source_that_breaks_its_promise_is_refused(x, y, error, message):
    with pytest.raises(error, match=message):
        ShardedRows(Own(x, y), Layout(4, 1), [0])


def test_arguments_that_do_not_fit_are_refused():
    source = numbered(10)
    with pytest.raises(ShapeError, match="got 11 rows, expected 10"):
        ShardedRows(source, Layout(11, 2), [0])
    with pytest.raises(PlacementError, match=r"got \[2\], expected shard numbers from 0 to 1"):
        ShardedRows(source, Layout(10, 2), [2])
    with pytest.raises(UsageError, match="float16"):
        ShardedRows(source, Layout(10, 2), [0], dtype="float16")
    with pytest.raises(UsageError, match="seed: got -1, expected 0 or more"):
        ShardedRows(source, Layout(10, 2), [0], seed=-1)
    with pytest.raises(UsageError, match="step: got 5, expected a step of the epoch, 0 to 4"):
        ShardedRows(source, Layout(10, 2, 2), [0]).batch(0, 5)


@pytest.mark.parametrize("rows", [5, 100])
@pytest.mark.parametrize("size", SIZES)
def test_a_shards_rows_are_the_same_bytes_at_the_same_alignment_whoever_holds_it(size, rows):
    layout, source = Layout(rows, shards=24, batch=min(rows, 7), validation=0.3), numbered(rows)
    alone = ShardedRows(source, layout, range(24), seed=4)
    ranks = [ShardedRows(source, layout, rank_shards(24, size, rank), seed=4) for rank in range(size)]
    for step in range(layout.steps_per_epoch):
        parts = flat(rank.batch_by_shard(1, step) for rank in ranks)
        assert [len(x) for x, _ in parts] == [len(layout.step_range(step, shard)) for shard in range(24)]
        assert {x.ctypes.data % 64 for x, _ in parts if x.size} == {0}
        assert {y.ctypes.data % 64 for _, y in parts if y.size} == {0}
        for (x, y), (its_x, its_y) in zip(parts, alone.batch_by_shard(1, step), strict=True):
            assert (x.tobytes(), y.tobytes(), x.shape, x.dtype) == (its_x.tobytes(), its_y.tobytes(), its_x.shape, its_x.dtype)
        assert np.concatenate([x for x, _ in parts]).tobytes() == alone.batch(1, step)[0].tobytes()


def test_validation_by_shard_gives_the_same_rows_in_pieces_that_do_not_depend_on_the_holder():
    layout, source = Layout(100, shards=8, batch=7, validation=0.3), numbered(100)
    alone = ShardedRows(source, layout, range(8))
    pieces = [x[:, 0].tolist() for x, _ in alone.validation(3, by_shard=True)]
    halves = [ShardedRows(source, layout, rank_shards(8, 2, rank)) for rank in range(2)]
    assert pieces == flat([x[:, 0].tolist() for x, _ in half.validation(3, by_shard=True)] for half in halves)
    assert flat(pieces) == flat(x[:, 0].tolist() for x, _ in alone.validation())
    assert len(pieces) > len(list(alone.validation(3)))
