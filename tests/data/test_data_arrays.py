"""In-memory arrays, labels, held-out rows and the warning about sorted files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from mpiddl.data import ArraySource, arrays_data, generator, hold_out, permutation, sorted_warning
from mpiddl.errors import DataError, UsageError

pytestmark = pytest.mark.no_mpi


def rows_of(source):
    """Return the first feature of every row."""
    ((x, _),) = source.read([range(source.n)])
    return x[:, 0].tolist()


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ("uint8", "uint8"),
        ("float32", "float32"),
        ("float64", "float64"),
        (">f8", "float64"),
        ("int16", "float32"),
        ("float16", "float32"),
        ("bool", "float32"),
        ("int64", "float64"),
        ("longdouble", "float64"),
    ],
)
def test_features_are_read_as_bytes_or_floats(stored, read):
    source = ArraySource(np.ones((3, 2, 2), stored), [0, 1, 2])
    ((x, y),) = source.read([range(1, 3)])
    assert (x.dtype, x.shape, y.tolist()) == (np.dtype(read), (2, 4), [1, 2])
    assert x.dtype.isnative


def test_arrays_of_the_right_kind_are_not_copied():
    x = np.zeros((4, 3), np.float32)
    ((read, _),) = ArraySource(x, [0, 1, 0, 1]).read([range(1, 3)])
    assert np.shares_memory(read, x)


@pytest.mark.parametrize("x", [np.ones((4, 6))[:, ::2], np.ones((3, 4)).T], ids=["slice", "transpose"])
def test_rows_that_are_not_contiguous_become_so(x):
    ((read, _),) = ArraySource(x, [0, 1, 0, 1]).read([range(2)])
    assert read.flags.c_contiguous


@pytest.mark.parametrize(
    ("y", "classes", "targets", "kind"),
    [
        (np.array([0, 1, 2, 1], np.uint8), 3, (), np.int64),
        (np.array([[0], [1], [2], [1]]), 3, (), np.int64),
        (np.array([True, False, True, True]), 2, (), np.int64),
        (np.array([0.5, 1, 2, 3]), None, (), np.float64),
        (np.array([0.5, 1, 2, 3], np.float32), None, (), np.float32),
        (np.ones((4, 2)), None, (2,), np.float64),
    ],
)
def test_integers_are_classes_and_floats_are_targets(y, classes, targets, kind):
    source = ArraySource(np.ones((4, 1)), y)
    assert (source.classes, source.targets) == (classes, targets)
    assert source.read([range(4)])[0][1].dtype == kind


def test_the_task_overrules_the_dtype():
    x = np.ones((3, 1))
    assert ArraySource(x, [0.0, 2.0, 1.0], task="classification").classes == 3
    targets = ArraySource(x, [-5, 7, 1000], task="regression")
    assert targets.classes is None
    assert targets.read([range(3)])[0][1].tolist() == [-5.0, 7.0, 1000.0]


def test_data_knows_what_a_model_puts_out():
    x = np.ones((6, 2, 2))
    assert arrays_data(x, [0, 1, 2] * 2).outputs == 3
    assert arrays_data(x, np.ones(6)).outputs == 1
    data = arrays_data(x, np.ones((6, 4)))
    assert (data.outputs, data.features) == (4, 4)


class Gradient:
    """As a tensor of torch that asks for a gradient."""

    def __array__(self, *arguments, **options):
        raise RuntimeError("Use tensor.detach().numpy() instead.")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((3, 2)), [0, 1], "y: got 2 labels, expected 3, one label for each row of x"),
        (np.ones((0, 2)), np.zeros(0, int), r"x: got shape \(0, 2\), expected at least one row"),
        (np.ones((3, 0)), [0, 1, 2], r"x: got shape \(3, 0\), expected \(rows, features\)"),
        (np.ones(3), [0, 1, 2], r"x: got shape \(3,\), expected \(rows, features\)"),
        (np.ones((3, 2)), 1, "y: got int, expected an array with one entry for each row"),
        (np.ones((3, 2)), np.zeros((3, 4), int), r"y: got shape \(3, 4\), expected .*argmax"),
        (np.ones((3, 2)), np.zeros((3, 4, 5)), r"y: got shape \(3, 4, 5\), expected shape \(rows,\) or \(rows, k\)"),
        (np.ones((3, 2)), np.array([None, 1, 2]), "y: got labels of dtype object"),
        (np.array([["a"], ["b"]]), [0, 1], "x: got features of dtype <U1"),
        (np.ones((2, 2), complex), [0, 1], "x: got features of dtype complex128"),
        (np.array([[1], [None]]), [0, 1], "x: got features of dtype object"),
        ([[1, 2], [3]], [0, 1], "x: got list, expected an array"),
        (sparse.csr_matrix(np.eye(2)), [0, 1], r"x: got a sparse matrix \(csr_matrix\), expected .*: x\.toarray\(\)"),
        (sparse.coo_array(np.eye(2)), [0, 1], "^x: got a sparse matrix .coo_array."),
        (np.eye(2), sparse.csc_matrix([[0], [1]]), "^y: got a sparse matrix"),
        (np.ma.masked_less(np.eye(2), 1), [0, 1], r"^x: got a masked array \(masked entries: 2\), expected no masked entries"),
        (list(np.ma.masked_less(np.eye(2), 1)), [0, 1], "^x: got a masked array"),
        (np.eye(2), np.ma.masked_equal([0, 1], 1), "^y: got a masked array"),
        ((row for row in np.eye(2)), [0, 1], "^x: got generator, expected an array"),
        ({"a": [1, 2]}, [0, 1], "^x: got dict, expected an array"),
        (np.eye(2), None, "^y: got NoneType, expected an array"),
        (Gradient(), [0, 1], r"^x: got Gradient, expected an array .*detach\(\)"),
        (np.ones((3, 2)), [0, -1, 1], "y, row 1: got label -1"),
        (np.ones((3, 2)), [0, 1, 40], r"y, row 2: got label 40, .*no more classes than rows \(3\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, y, message):
    with pytest.raises(DataError, match=message):
        ArraySource(x, y)


def test_a_label_far_above_the_others_is_no_class():
    y = np.arange(500) % 10
    y[321] = 200
    with pytest.raises(
        DataError, match="y, row 321: got label 200, but only 11 different labels occur"
    ):
        ArraySource(np.ones((500, 1)), y)
    assert ArraySource(np.ones((500, 1)), y, classes=201).classes == 201


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        ([0, 1, 0.5], {"task": "classification"}, "y, row 2: got label 0.5, expected whole class numbers"),
        ([0, np.nan, 1], {"task": "classification"}, "y, row 1: got label nan"),
        ([0, 1, 3], {"classes": 3}, "y, row 2: got label 3, expected 0 to 2"),
    ],
)
def test_labels_that_are_no_classes_are_refused(y, options, message):
    with pytest.raises(DataError, match=message):
        ArraySource(np.ones((3, 1)), y, **options)


def test_options_that_cannot_be_taken_are_refused():
    x, y = np.ones((4, 1)), [0, 1, 0, 1]
    with pytest.raises(UsageError, match="task: got 'guess'"):
        ArraySource(x, y, task="guess")
    with pytest.raises(UsageError, match="classes: got 0, expected 1 or more"):
        ArraySource(x, y, classes=0)
    with pytest.raises(UsageError, match="x_test and y_test: got only one of these arrays"):
        arrays_data(x, y, x)
    with pytest.raises(UsageError, match="test_fraction: got 1, expected a number of at least 0 and less than 1"):
        arrays_data(x, y, test_fraction=1)


def test_a_test_set_has_to_match_the_training_set():
    x, y = np.ones((40, 3)), np.arange(40) % 2
    with pytest.raises(DataError, match=r"x_test, row 0: got shape \(4,\), expected \(3,\)"):
        arrays_data(x, y, np.ones((5, 4)), [0] * 5)
    with pytest.raises(DataError, match="y_test, row 1: got label 2, expected 0 to 1"):
        arrays_data(x, y, np.ones((2, 3)), [0, 2])


def test_test_labels_count_where_the_training_rows_are_too_few_to_show_all_classes():
    data = arrays_data(np.ones((3, 1)), [0, 1, 2], np.ones((3, 1)), [3, 4, 9])
    assert data.classes == data.train.classes == data.test.classes == 10


@given(n=st.integers(2, 200), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 5))
def test_a_held_out_part_and_the_rest_are_the_whole(n, fraction, seed):
    source = ArraySource(np.arange(n, dtype=float)[:, None], np.zeros(n, int))
    train, test = hold_out(source, fraction, seed)
    assert sorted(rows_of(train) + rows_of(test)) == list(range(n))
    assert train.n >= 1
    assert test.n >= 1
    assert abs(test.n - fraction * n) <= 1
    assert rows_of(test) == sorted(rows_of(test))
    assert train.where(0) == f"x, row {int(rows_of(train)[0])}"


def test_a_subset_reads_only_between_its_first_and_last_row():
    asked = []

    class Spy(ArraySource):
        def read(self, ranges):
            asked.extend(ranges)
            return super().read(ranges)

    train, _ = hold_out(Spy(np.arange(100.0)[:, None], np.zeros(100, int)), 0.2)
    kept = rows_of(train)
    asked.clear()
    parts = train.read([range(5, 15), range(15, 15), range(40, 60)])
    assert [x[:, 0].tolist() for x, _ in parts] == [kept[5:15], [], kept[40:60]]
    assert max(map(len, asked)) < 40


def test_nothing_is_held_out_of_one_row_or_by_a_fraction_of_zero():
    source = ArraySource(np.ones((1, 1)), [0])
    assert hold_out(source, 0.5) == (source, None)
    assert arrays_data(np.ones((5, 1)), [0] * 5, test_fraction=0).test is None


def test_sorted_shards_are_told():
    labels = np.sort(np.arange(1600) % 10)
    warning = sorted_warning(np.split(labels, 16), 10)
    assert warning.startswith("16 of the 16 shards here hold at most half of the 10 classes (one holds 1)")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.split(np.random.default_rng(0).permutation(1600) % 10, 16), 10),
        (np.split(np.sort(np.arange(64) % 10), 16), 10),  # four rows a shard say nothing
        ([np.linspace(0, 1, 100)], None),
        ([], 10),
        ([np.zeros(100, int)], 1),
    ],
    ids=["shuffled", "too few rows", "regression", "no shards", "one class"],
)
def test_other_shards_are_not(labels, classes):
    assert sorted_warning(labels, classes) is None


def test_draws_belong_to_their_arguments():
    streams = [generator(0, 16, shard, epoch).integers(1 << 60) for shard in range(3) for epoch in range(3)]
    assert len(set(streams)) == 9
    assert generator(0, 16, 2, 1).integers(1 << 60) == streams[7]
    assert permutation(8, 1, 0, 2, 3).tolist() == [7, 1, 3, 5, 2, 0, 6, 4]
    assert permutation(0, 1, 0).shape == (0,)
