"""Ranks that the cores or the job have no use for: the end of a run says so, and ranks that wait yield their cores."""

from __future__ import annotations

import os

import numpy as np
import pytest

import mpiddl
from mpiddl.cli.flags import in_flags
from mpiddl.decomposition import run as decomposition_run
from mpiddl.machine import launch, rank_count, threads
from mpiddl.training import report
from mpiddl.training import run as training
from mpiddl.training.metrics import Split
from mpiddl.training.request import Request
from mpiddl.transport.start import initialise

YIELD = "OMPI_MCA_mpi_yield_when_idle"


@pytest.mark.no_mpi
@pytest.mark.parametrize(("nodes", "words"), [([(1, 1), (4, 4)], ""), ([(2, 4), (5, 4)], "5 ranks share 4 cores"),
                                              ([(3, 2), (3, 1)], "3 ranks share 1 core of a node")])
def test_the_fullest_node_is_named(nodes, words):
    assert words in rank_count.shared_cores(nodes) and bool(words) == bool(rank_count.shared_cores(nodes))


JOBS = {
    "10 % overhead": ([9.0] * 3, [1.0] * 3, False),
    "two ranks, half of the time": ([5.0] * 2, [5.0] * 2, False),
    "many ranks, still faster than one": ([1.0] * 64, [9.0] * 64, False),
    "4.1 s where one takes 0.1 s": ([0.03] * 3, [4.07] * 3, True),
    "a loss that nobody notices": ([0.001] * 3, [0.09] * 3, False),
    "hardly slower than one": ([3.0] * 2, [4.0] * 2, False),
    "one rank": ([0.1], [4.0], False),
    "no rank with work": ([], [], False),
}


@pytest.mark.no_mpi
@pytest.mark.parametrize(("computing", "communicating", "said"), JOBS.values(), ids=JOBS)
def test_a_job_is_too_small_where_one_rank_would_be_faster(computing, communicating, said):
    assert bool(rank_count.small_job(computing, communicating)) == said


@pytest.mark.no_mpi
def test_the_figures_are_told():
    text = rank_count.small_job([0.03] * 3, [4.07] * 3, rank_count.LESS_OFTEN)
    for words in ("99% of 4.1 s", "too small for 3 ranks", "about 0.09 s (estimate:", "local-sgd"):
        assert words in text


@pytest.mark.no_mpi
def test_the_final_table_ends_with_them(capsys):
    summary = {"test_accuracy": 0.5, "test_loss": 0.5, "test_rows": 10, "steps": 10, "seconds": 2.0, "ended": "",
               "strategy_name": "AllReduce()", "mpi": "MPI X", "too_many_ranks": ["cores: 3 ranks share 2 cores"]}
    report.show_summary(summary, [Split(1.0, 0.5, 0.5, 1, 3)] * 3)
    assert capsys.readouterr().out.endswith("cores: 3 ranks share 2 cores\n")


@pytest.mark.mpi
@pytest.mark.parametrize(("spell", "remedy"), [(str, "`strategy='local-sgd'`"), (in_flags, "`--strategy local-sgd`")])
def test_the_summary_of_a_run_says_it_in_the_callers_words(comm, monkeypatch, spell, remedy):
    monkeypatch.setattr(training, "node", lambda link: (link.size, 1))
    monkeypatch.setattr(rank_count, "LEAST_RATIO", 0.0)
    monkeypatch.setattr(rank_count, "LEAST_LOSS_S", -1e9)
    request = Request(model="mlp", data="digits", quiet=True, settings={"epochs": 1}, spell=spell)
    said = training.run(request, comm).summary["too_many_ranks"]
    assert len(said) == (2 if comm.size > 1 else 0)
    if said:
        assert f"{comm.size} ranks share 1 core" in said[0] and remedy in said[1]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("strategy", "slow", "counted"), [
    ("asgd:communication=two-sided", "", "workers"), ("allreduce", "1:1.5", "none"), ("local-sgd", "", "all")])  # fmt: skip
def test_only_ranks_that_nobody_makes_wait_count(comm, monkeypatch, strategy, slow, counted):
    seen, real = [], rank_count.small_job
    monkeypatch.setattr(rank_count, "small_job", lambda *args: seen.append(args) or real(*args))
    settings = {"slow": slow} if slow else {}
    mpiddl.train("mlp", "digits", comm=comm, epochs=1, strategy=strategy, optimiser="sgd", quiet=True, **settings)
    expected = {"workers": [comm.size - 1], "none": [], "all": [comm.size]}[counted]
    assert [len(args[0]) for args in seen] == expected
    assert not any("local-sgd" in args[2] for args in seen)


@pytest.mark.no_mpi
def test_simulated_ranks_need_no_cores(monkeypatch):
    monkeypatch.setattr(training, "node", lambda link: (link.size, 1))
    settings = {"simulate": 4, "step_seconds": 1.0, "message_seconds": 9.0, "epochs": 1, "quiet": True}
    assert mpiddl.train("mlp", "digits", **settings).summary["too_many_ranks"] == []


@pytest.mark.mpi
def test_a_decomposition_says_it(comm, monkeypatch, mpi_tmp_path):
    monkeypatch.setattr(decomposition_run, "node", lambda link: (link.size, 1))
    monkeypatch.setattr(rank_count, "LEAST_RATIO", 0.0)
    monkeypatch.setattr(rank_count, "LEAST_LOSS_S", -1e9)
    if comm.rank == 0:
        np.save(mpi_tmp_path / "x.npy", np.random.default_rng(0).standard_normal((60, 8)))
    comm.Barrier()
    summary = decomposition_run.decompose_file(str(mpi_tmp_path / "x.npy"), mpi_tmp_path / "out", comm=comm, n_components=2)
    assert len(summary["too_many_ranks"]) == (2 if comm.size > 1 else 0)
    assert all(each["compute"] > 0 and each["communication"] >= 0 for each in summary["per_rank"])


class Library:
    """MPI that is not started: what the environment says when it would be."""

    THREAD_MULTIPLE = 3

    def Init_thread(self, level):
        self.env = dict(os.environ)


@pytest.mark.no_mpi
@pytest.mark.parametrize(("local", "set_by_user", "wanted"), [
    (2, None, None), (3, None, "1"), (3, "0", "0"), (None, None, None)])  # fmt: skip
def test_ranks_without_a_core_each_yield_it_while_they_wait(monkeypatch, local, set_by_user, wanted):
    monkeypatch.setattr(threads, "launcher_cores", lambda: 2)
    monkeypatch.setenv(YIELD, set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv(YIELD)
    monkeypatch.setenv("OMPI_MCA_osc", "^ucx")
    library = Library()
    initialise(library, launch.Promise(launch.OPEN_MPI, 3, 0, local, "OMPI_COMM_WORLD_SIZE"))
    os.environ.pop(YIELD, None)
    assert library.env.get(YIELD) == wanted
