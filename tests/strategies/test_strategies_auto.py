"""`auto`: the steps of `allreduce`, in buckets that travel during the backward pass; and what is said of the overlap."""

from __future__ import annotations

import os
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest

import mpiddl
from mpiddl.collectives import progress
from mpiddl.collectives.buckets import Buckets
from mpiddl.errors import CommError, UsageError
from mpiddl.models import MLP
from mpiddl.node.process_memory import readable
from mpiddl.node.topology import neighbours
from mpiddl.strategies import STRATEGIES, AllReduce, Auto, Replica, Step, Strategy, chain
from mpiddl.strategies.synchronous.auto import choose
from mpiddl.strategies.synchronous.overlap_measured import MEASURED, Hidden
from mpiddl.strategies.synchronous.overlap_schedule import Overlap, ideal, lengths, schedule
from mpiddl.transport import virtual
from mpiddl.transport.mpi import MpiComm
from mpiddl.tuning import Entry, Table, write_table
from mpiddl.tuning.place import place_of

pytestmark = pytest.mark.no_mpi

JOB = {"epochs": 2, "max_steps": 15, "batch": 60, "rate": 0.02, "quiet": True, "dtype": "float64", "hidden": (32, 16)}
LAYOUTS = [(0,), (0, 0), (0, 1), (0, 1, 2), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 2, 3)]
ROW = 8 * 32
BUCKETS = [0, 8, ROW, 1 << 40]  # chosen, a part each, a row, the whole gradient


def weights(result):
    return np.concatenate([array.ravel() for array in result.params.values()])


def on_nodes(nodes, strategy, **settings):
    job = {**JOB, **settings}
    return virtual.run(len(nodes), lambda comm: mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **job), nodes)


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "mpiddl progress"]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_steps_of_allreduce_on_any_nodes(nodes, bucket):
    ours, again = (on_nodes(nodes, Auto(bucket)) for _ in range(2))
    assert len({weights(result).tobytes() for result in ours + again}) == 1
    assert distance(weights(ours[0]), weights(on_nodes(nodes, "allreduce")[0])) < 1e-12


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_steps_of_allreduce_on_real_ranks(comm, bucket):
    ours, again, theirs = (mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **JOB)
                           for strategy in (Auto(bucket), Auto(bucket), "allreduce"))
    assert len(set(comm.allgather(weights(ours).tobytes()))) == 1
    assert weights(ours).tobytes() == weights(again).tobytes()
    assert distance(weights(ours), weights(theirs)) < 1e-12
    assert not threads()


@pytest.mark.mpi(min_size=2)
def test_every_rank_on_a_node_of_its_own(comm, monkeypatch):
    """Rings round all ranks, moved on by a thread."""
    monkeypatch.setattr(MpiComm, "nodes", lambda self: list(range(self.size)))
    seen = []

    class Looking(Strategy):
        def mix(self, comm, state, replica, step):
            seen.append(len(threads()))
            return state

    ours, theirs = (mpiddl.train("mlp", "digits", comm=comm, strategy=chain(strategy, Looking()), **JOB)
                    for strategy in (Auto(ROW), AllReduce()))
    assert len(set(comm.allgather(weights(ours).tobytes()))) == 1
    assert distance(weights(ours), weights(theirs)) < 1e-12
    assert max(seen[: ours.summary["steps"]]) == 1 and not threads()
    assert all(rank["communication"] + rank["waiting"] > 0 for rank in ours.summary["per_rank"])
    hidden = ours.summary["overlap"]
    assert hidden["communication_ms"] > 0 and 0 <= hidden["could_be_hidden_ms"] <= hidden["communication_ms"] + 0.001


@pytest.mark.mpi(min_size=2)
def test_a_thread_and_a_waiting_rank_that_cut_in_on_each_other_lose_no_message(link, monkeypatch):
    """Both ask the library for all requests at once, and what it has called complete it never names again."""
    monkeypatch.setattr(MpiComm, "nodes", lambda self: list(range(self.size)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        buckets = Buckets(link, 2000, np.dtype("d"), 64)
        with progress(link) as moving:
            for _ in range(30):
                buckets.input[:] = link.rank
                for begin in range(0, 2000, 400):
                    moving.on(buckets.start(begin, begin + 400))
                buckets.wait()
                assert (buckets.result == sum(range(link.size))).all()
    finally:
        sys.setswitchinterval(before)


@pytest.mark.mpi(min_size=2)
def test_a_thread_level_too_low_is_said_and_changes_no_bit(comm, monkeypatch, capfd):
    best = mpiddl.train("mlp", "digits", comm=comm, strategy=Auto(ROW), **JOB)

    def refuse(self):
        raise CommError("threads: too low")

    monkeypatch.setattr(MpiComm, "check_threads", refuse)
    capfd.readouterr()
    degraded = mpiddl.train("mlp", "digits", comm=comm, strategy=Auto(ROW), **{**JOB, "quiet": False})
    assert weights(best).tobytes() == weights(degraded).tobytes()
    out, err = capfd.readouterr()
    assert err.count("auto: threads: too low: communication goes on only between") == (comm.rank == 0)
    assert ("hidden behind computation" in out) == (comm.rank == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("at", [2, 6], ids=["while measuring", "later"])
def test_a_failure_in_the_middle_of_a_backward_pass_ends_all_ranks_and_the_thread(comm, at):
    class Breaking(MLP):
        calls = 0

        def gradient(self, params, x, y, grad, *, ready=None, work=None):
            type(self).calls += 1

            def broken(part):
                ready(part)
                if self.calls > at:
                    raise ZeroDivisionError("in the middle")

            return super().gradient(params, x, y, grad, ready=broken if ready else None, work=work)

    job = {key: value for key, value in JOB.items() if key != "hidden"}
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        mpiddl.train(Breaking((64, 32, 10)), "digits", comm=comm, strategy=Auto(8), **job)
    assert not threads()


LONE = """
import mpiddl
from mpiddl.models import MLP
from mpiddl.strategies import Auto
from mpiddl.transport.mpi import connect

comm = connect()

class Breaking(MLP):
    calls = 0

    def gradient(self, params, x, y, grad, *, ready=None, work=None):
        type(self).calls += 1

        def broken(part):
            ready(part)
            if comm.rank == 1 and self.calls > 6:
                raise ZeroDivisionError("rank 1 alone")

        return super().gradient(params, x, y, grad, ready=broken if ready else None, work=work)

mpiddl.train(Breaking((64, 32, 10)), "digits", comm=comm, strategy=Auto(8), quiet=True)
"""


@pytest.mark.more
def test_a_failure_of_one_rank_alone_ends_the_job(mpirun, tmp_path):
    program = tmp_path / "lone.py"
    program.write_text(LONE)
    done = mpirun(2, sys.executable, program)
    assert done.returncode != 0 and "error on rank 1 of 2, the job ends" in done.stderr and "rank 1 alone" in done.stderr


@pytest.mark.mpi(min_size=2)
def test_resumed_with_the_bits_of_a_run_that_was_not_stopped(comm, tmp_path):
    folder = comm.bcast(str(tmp_path))
    whole = mpiddl.train("mlp", "digits", comm=comm, strategy=Auto(ROW), **{**JOB, "max_steps": 30})
    mpiddl.train("mlp", "digits", comm=comm, strategy=Auto(ROW), out=folder, **JOB)
    resumed = mpiddl.train("mlp", "digits", comm=comm, strategy=Auto(ROW), out=folder, resume=True, **{**JOB, "max_steps": 30})
    assert weights(resumed).tobytes() == weights(whole).tobytes()


class Forwards(MLP):
    """Announces its parts in an odd order: first the first layer, which it has not written last."""

    def gradient(self, params, x, y, grad, *, ready=None, work=None):
        parts = []
        score = super().gradient(params, x, y, grad, ready=parts.append if ready else None, work=work)
        for part in reversed(parts):
            ready(part)
        return score


class Forgetful(MLP):
    def gradient(self, params, x, y, grad, *, ready=None, work=None):
        score = super().gradient(params, x, y, grad, work=work)
        if ready:
            ready(slice(0, 100))
        return score


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0, 0, 1)], ids=str)
def test_parts_in_any_order(nodes):
    job = {key: value for key, value in JOB.items() if key != "hidden"}

    def train(comm, strategy):
        return weights(mpiddl.train(Forwards((64, 32, 16, 10)), "digits", comm=comm, strategy=strategy, **job))

    ours, theirs = (virtual.run(3, lambda comm, s=s: train(comm, s), nodes) for s in (Auto(ROW), AllReduce()))
    assert len({found.tobytes() for found in ours}) == 1 and distance(ours[0], theirs[0]) < 1e-12


def test_a_model_that_forgets_parts_is_told():
    job = {key: value for key, value in JOB.items() if key != "hidden"}
    with pytest.raises(UsageError, match=r"ready\(\) cover 100 elements, expected each of the 2410"):
        virtual.run(2, lambda comm: mpiddl.train(Forgetful((64, 32, 10)), "digits", comm=comm, strategy=Auto(8), **job), (0, 1))


def test_behind_another_strategy():
    nodes = (0, 1, 1)
    ours, theirs = (on_nodes(nodes, chain(Strategy(), strategy)) for strategy in (Auto(ROW), AllReduce()))
    assert distance(weights(ours[0]), weights(theirs[0])) < 1e-12


@pytest.mark.parametrize(("nodes", "nbytes", "algorithm"), [
    ((0,), 1 << 30, "none"), ((0, 0, 0), 1 << 30, "two-step"), ((0, 1), 1000, "doubling"), ((0, 1), 100_000, "two-step"),
    ((0, 1), 1 << 24, "buckets"), ((0, 0, 1, 1), 1 << 24, "buckets"),
])
def test_the_choice_is_the_same_on_all_ranks_and_says_why(nodes, nbytes, algorithm):
    chosen = set(virtual.run(len(nodes), lambda comm: choose(comm, nbytes), nodes))
    assert len(chosen) == 1
    (choice,) = chosen
    assert choice.algorithm == algorithm and choice.why


def by_table(comm, path, algorithm, size=1000):
    """What a table chooses that names ``algorithm`` the fastest, whether the choice says so, and the sums of ranks' numbers."""
    topology = neighbours(comm).topology
    if comm.rank == 0:
        seconds = {"library": (1.0,), **({} if algorithm == "library" else {algorithm: (0.1,)})}
        entry = Entry(place_of(comm, topology, os.environ), "allreduce", (1000,), seconds)
        write_table(path, Table((entry,)))
    comm.Barrier()
    choice = choose(comm, 4 * size)
    strategy, grad = Auto(), np.full(size, comm.rank + 1.0, np.float32)
    memory = strategy.memory(comm, size, grad.dtype)
    if memory is not None:
        memory[:] = grad
        grad = memory
    replica = Replica(np.zeros(size, np.float32), {})
    combined = strategy.combine(comm, strategy.init(comm, replica), grad, replica, Step(0, 1, 3, 0.1))
    found = choice.algorithm, "measured" in choice.why, set(combined.grad.tolist())
    strategy.finish(comm, {}, replica)
    return found


@pytest.mark.parametrize("algorithm", ["library", "ring", "doubling", "two-step", "two-step-leader"])
def test_a_measured_table_is_followed(monkeypatch, tmp_path, algorithm):
    monkeypatch.setenv("MPIDDL_TUNE", str(tmp_path / "tune.toml"))
    found = virtual.run(3, lambda comm: by_table(comm, tmp_path / "tune.toml", algorithm), nodes=[0, 0, 1])
    assert found == [(algorithm, True, {6.0})] * 3


@pytest.mark.filterwarnings("ignore:verbs")
@pytest.mark.parametrize("algorithm", ["ring-verbs", "two-step-verbs"])
@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_a_table_that_names_verbs_where_there_are_none(monkeypatch, tmp_path, algorithm, size):
    """Then messages go over MPI, of large gradients in buckets."""
    monkeypatch.setenv("MPIDDL_TUNE", str(tmp_path / "tune.toml"))
    found = virtual.run(3, lambda comm: by_table(comm, tmp_path / "tune.toml", algorithm, size), nodes=[0, 0, 1])
    assert found == [(algorithm if size == 1000 else "buckets-verbs", True, {6.0})] * 3


@pytest.mark.mpi(min_size=2)
def test_a_table_that_names_the_reading_of_others_memory(monkeypatch, tmp_path, comm, link):
    """In former times, the gradient was not summed then."""
    path = tmp_path / "tune.toml"
    monkeypatch.setenv("MPIDDL_TUNE", str(path))
    if readable(link) is not None:
        assert by_table(link, path, "read") == ("read", True, {comm.size * (comm.size + 1) / 2})


def test_who_sums_gradients():
    summing = {name for name in STRATEGIES if getattr(STRATEGIES.find(name), "sums_gradients", False)}
    coded = {"multicast-allreduce", "coded-sum", "coded"}
    assert summing == {"alone", "allreduce", "two-step", "ring", "auto"} | coded and not Strategy.sums_gradients


def test_a_negative_bucket():
    with pytest.raises(UsageError, match="bucket_bytes: got -1"):
        Auto(-1)


@pytest.mark.parametrize("sizes", [(784, 2048, 2048, 10), (64, 32, 10), (10, 5000), (5000, 10), (1300, 1100, 3)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slices_of_layers_cover_the_gradient_once_and_change_no_bit(sizes, threads, dtype):
    """Backwards, whatever the number of rows."""
    model = MLP(sizes, threads=threads)
    params, whole, sliced = (mpiddl.memory.FlatBuffer(model.shapes, dtype) for _ in range(3))
    rng = np.random.default_rng(0)
    model.init(params.views, rng)
    orders = []
    for rows in (0, 1, 3, 17):
        x, y = rng.random((rows, sizes[0])).astype(dtype), rng.integers(0, sizes[-1], rows)
        whole.flat[:], sliced.flat[:] = np.nan, np.nan
        model.gradient(params.views, x, y, whole.views)
        parts = []

        def ready(part, parts=parts):
            assert not np.isnan(sliced.flat[part]).any() and np.isnan(sliced.flat[: part.start]).all()
            parts.append((part.start, part.stop))

        model.gradient(params.views, x, y, sliced.views, ready=ready)
        assert sliced.flat.tobytes() == whole.flat.tobytes()
        orders.append(parts)
    assert all(parts == orders[0] for parts in orders)
    edges = [whole.flat.size, *(start for start, _ in orders[0])]
    assert [(start, stop) for stop, start in pairwise(edges)] == orders[0] and edges[-1] == 0


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0, 0, 1, 1), (0, 1, 0), (0, 0)], ids=str)
def test_buckets_are_the_sum_in_any_cut_round_after_round(nodes):
    def program(comm):
        buckets = Buckets(comm, 1000, np.dtype("d"), 64)
        for number, cuts in enumerate([(0, 1000), (0, 1, 999, 1000), (0, 300, 600, 1000)]):
            buckets.input[:] = np.arange(1000) * (comm.rank + 1) + number
            for begin, end in list(pairwise(cuts))[::-1]:
                buckets.start(begin, end)
            buckets.wait()
            size = comm.size
            np.testing.assert_array_equal(buckets.result, np.arange(1000) * size * (size + 1) / 2 + size * number)
        buckets.Free()

    virtual.run(len(nodes), program, nodes)


def test_the_schedule_of_one_wire():
    assert schedule([], []) == [] and ideal([], [], 5) == 5
    assert schedule([1, 2, 9], [4, 1, 1]) == [(1, 5), (5, 6), (9, 10)]
    assert ideal([1, 2, 9], [4, 1, 1], 9) == 10  # all but the last bucket is hidden
    assert ideal([1, 2, 9], [10, 10, 10], 9) == 31  # the wire is busy from the first bucket on
    assert ideal([1, 2], [1, 1], 9) == 9  # all is hidden
    assert ideal([9], [3], 9) == 12  # nothing is
    assert lengths(10, [1, 3, 1]) == [2, 6, 2]


def test_what_could_be_hidden_and_was():
    found = Overlap(computing=9, communication=6, ideal=10, step=11)
    assert (found.allowed, found.reached, found.share) == (5, 4, 0.8)
    assert Overlap(9, 3, 12, 12).share == 1


def test_a_run_measures_its_overlap_itself():
    clock = [0.0]
    hidden = Hidden(lambda: clock[0])
    assert hidden.summary() is None
    for step in range(10):
        for at, size in ((1, 20), (2, 30)):
            clock[0] = 100 * step + at
            hidden.ready(size)
        clock[0] = 100 * step + 5
        hidden.computed()
        assert hidden.measuring == (step in MEASURED)
        clock[0] = 100 * step + (10 if step in MEASURED else 7)
        hidden.over()
    # From the first bucket on: 4 s of computing, 2 + 3 of exchange, ideally over after 5, in fact after 6.
    assert hidden.overlap() == Overlap(4, 5, 5, 6)
    assert hidden.summary() == {"communication_ms": 5000, "could_be_hidden_ms": 4000, "was_hidden_ms": 3000}
