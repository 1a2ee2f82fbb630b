"""Errors that a program does not catch: one message on several ranks, and the caller's frames only."""

from __future__ import annotations

import os
import sys
import threading
import traceback

import numpy as np
import pytest
from harness.lone_rank import Rank
from harness.tiers import only

import mpiddl
from mpiddl.errors import CommError, UsageError
from mpiddl.transport import uncaught

HEAD = """
import threading
import numpy as np
import mpiddl
from mpiddl import collectives
from mpiddl.data import Data
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
X, Y = np.random.default_rng(0).standard_normal((60, 3)), np.arange(60.0)

class Linear:
    shapes = {"w": (3,)}
    def init(self, params, rng):
        params["w"][:] = 0
    def gradient(self, params, x, y, grad):
        error = x @ params["w"] - y
        grad["w"][:] = x.T @ error
        return (error @ error) / 2
    def predict(self, params, x):
        return x @ params["w"]
"""

MESSAGES = {
    "train": ('mpiddl.train("mlp", "digits", epochs=-1)', "epochs: got -1, expected 0 or more"),
    "load": ('mpiddl.load("nothing")', "nothing: got no checkpoint, expected"),
    "fit": ("from mpiddl.decomposition import PCA; PCA(n_components=2, tol=-1).fit(X)",
            "tol: got -1, expected a number from 0 to below 1"),
    "communicator": ('mpiddl.Communicator(WORLD, algorithms={"bcast": "ring"})',
                     "algorithms: got 'ring' for bcast, expected one of library"),
    "differ": ('mpiddl.train("mlp", "digits", epochs=WORLD.rank)', "settings: epochs: rank 0 got 0, but rank 1 got 1;"),
}

# Where one rank alone fails, it need not wait long for the others.
SOON = "from mpiddl.transport import uncaught\nuncaught.GRACE_S = 0.1\n"


def job(mpirun, tmp_path, text, ranks=3):
    """The result of a program on some ranks, and what our package printed on standard error, without the launcher's remarks."""
    program = tmp_path / "program.py"
    program.write_text(HEAD + text)
    done = mpirun(ranks, "python", program)
    return done, done.stderr


def place(tmp_path, line):
    """How a message names the ``line`` behind the head of the program."""
    number = len(HEAD.splitlines()) + 1
    return f"{tmp_path / 'program.py'}:{number}: {line}\n"


@pytest.mark.parametrize("name", only({"train"}, MESSAGES))
def test_a_mistake_on_all_ranks_is_one_message_with_the_callers_line(mpirun, tmp_path, name):
    line, message = MESSAGES[name]
    done, said = job(mpirun, tmp_path, line, 2 if name == "differ" else 3)
    assert done.returncode == 1
    assert said.count("mpiddl: error") == 1 and "Traceback" not in said, said
    assert f"{place(tmp_path, line)}mpiddl: error: {message}" in said


@pytest.mark.more
def test_an_error_of_a_collective_is_one_message(mpirun, tmp_path):
    done, said = job(mpirun, tmp_path, """
from mpiddl.transport.mpi import connect
collectives.allreduce(connect(), np.zeros(3), np.zeros(4))
""")
    assert done.returncode == 1 and said.count("mpiddl: error: recvbuf: got 4") == 1 and "Traceback" not in said


def test_a_mistake_of_one_rank_outside_a_run_ends_the_job(mpirun, tmp_path):
    done, said = job(mpirun, tmp_path, SOON + """
if WORLD.rank == 1:
    mpiddl.load("nothing")
WORLD.Barrier()
""")
    assert done.returncode and said.count("got no checkpoint") == 1 and "Traceback" not in said
    assert "mpiddl: error on rank 1 of 3, the job ends: nothing" in said


def test_an_exception_of_the_programs_own_on_one_rank_ends_the_job(mpirun, tmp_path):
    done, said = job(mpirun, tmp_path, SOON + """
mpiddl.train("mlp", "digits", epochs=0, quiet=True)
if WORLD.rank == 1:
    raise KeyError("the program's own")
WORLD.Barrier()
""")
    assert done.returncode and said.count("KeyError: \"the program's own\"") == 1


@pytest.mark.more
def test_errors_can_be_caught_on_all_ranks_and_others_are_printed_as_ever(mpirun, tmp_path):
    done, said = job(mpirun, tmp_path, SOON + """
try:
    mpiddl.train("mlp", "digits", epochs=-1)
except ValueError as error:
    print(f"caught {error}")
mpiddl.train("mlp", "digits", epochs=0, quiet=True)
if WORLD.rank == 1:
    raise KeyError("the program's own")
""")
    assert done.returncode == 1 and done.stdout.count("caught epochs") == 3
    assert said.count("Traceback") == 1 and "KeyError: \"the program's own\"" in said and "mpiddl: error" not in said


@pytest.mark.more
def test_a_mistake_on_a_part_of_the_ranks_is_one_message_and_the_others_go_on(mpirun, tmp_path):
    done, said = job(mpirun, tmp_path, """
part = WORLD.Split(min(WORLD.rank, 1))
if WORLD.rank:
    mpiddl.train("mlp", "digits", epochs=-1, comm=part)
print("went on")
""")
    assert done.returncode == 1 and said.count("mpiddl: error: epochs: got -1") == 1 and "Traceback" not in said
    assert done.stdout.count("went on") == 1


def test_an_exception_of_the_users_model_on_all_ranks_is_one_traceback(mpirun, tmp_path):
    done, said = job(mpirun, tmp_path, """
class Broken(Linear):
    def init(self, params, rng):
        params["w"][:] = np.zeros(4)

mpiddl.train(Broken(), (X, Y), batch=10)
""")
    assert done.returncode == 1 and said.count("Traceback") == 1 and "During handling" not in said, said
    assert "mpiddl: error: ranks 0, 1, 2 failed:\nTraceback" in said and "could not broadcast" in said
    assert "in init" in said and "mpiddl.train(Broken()" in said and f"{uncaught.__file__}" not in said


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.more
def test_an_exception_of_the_users_loader_on_one_rank_is_one_traceback(mpirun, tmp_path, rank):
    done, said = job(mpirun, tmp_path, f"""
class Loader:
    n, shape, classes, targets = 60, (3,), 3, ()
    def read(self, ranges):
        if WORLD.rank == {rank}:
            raise FileNotFoundError("shard 7")
        return [(np.zeros((len(part), 3)), np.arange(part.start, part.stop) % 3) for part in ranges]
    def where(self, row):
        return f"row {{row}}"

mpiddl.train("mlp", Data("mine", Loader(), None, 3, 3), batch=10)
""")
    assert done.returncode == 1 and said.count("Traceback") == 1 and "During handling" not in said, said
    assert f"mpiddl: error: rank {rank} failed:\nTraceback" in said and said.count("FileNotFoundError: shard 7") == 1


def test_an_exception_in_a_thread_ends_the_job_while_it_trains(mpirun, tmp_path):
    """The other ranks wait for what that thread would have done."""
    done, said = job(mpirun, tmp_path, """
class Threaded(Linear):
    def gradient(self, *arguments):
        if WORLD.rank == 1:
            def load():
                raise OSError("shard 7")
            thread = threading.Thread(target=load, name="loader")
            thread.start()
            threading.Event().wait()  # for what the thread does not bring
        return super().gradient(*arguments)

mpiddl.train(Threaded(), (X, Y), batch=10)
""")
    assert done.returncode and said.count("Traceback") == 1, said
    assert "mpiddl: error on rank 1 of 3 in loader, the job ends: Traceback" in said and "OSError: shard 7" in said


@pytest.mark.mpi(min_size=2)
def test_threads_are_as_before_after_a_run_and_when_they_exit(comm):
    before, ended = threading.excepthook, []

    class Exiting(mpiddl.MLP):
        def gradient(self, *arguments, **options):
            thread = threading.Thread(target=sys.exit)
            thread.start()
            thread.join()
            ended.append(threading.excepthook is not before)
            return super().gradient(*arguments, **options)

    mpiddl.train(Exiting((64, 10)), "digits", epochs=1, batch=1000, quiet=True, comm=comm)
    assert ended and all(ended) and threading.excepthook is before


@pytest.mark.no_mpi
def test_on_one_rank_only_the_callers_frames_are_left():
    with pytest.raises(UsageError) as caught:
        mpiddl.train("mlp", "digits", epochs=-1)
    shown = traceback.format_exception(caught.value)
    assert len([line for line in shown if line.startswith("  File")]) == 2, shown  # this file, and the one that raises again
    assert "During handling" not in "".join(shown)


@pytest.mark.mpi
def test_on_one_rank_a_hook_of_the_programs_own_stays(comm, monkeypatch):
    for hook, replaced in (sys.__excepthook__, True), (print, comm.size > 1):
        monkeypatch.setattr(sys, "excepthook", hook)
        with pytest.raises(UsageError):
            mpiddl.train("mlp", "digits", epochs=-1, comm=comm)
        assert (sys.excepthook is not hook) == replaced


@pytest.mark.no_mpi
def test_on_one_rank_a_mistake_is_the_same_message(command, tmp_path):
    line, message = MESSAGES["train"]
    program = tmp_path / "program.py"
    program.write_text(HEAD + line)
    assert command("python", program).stderr == f"{place(tmp_path, line)}mpiddl: error: {message}\n"


@pytest.mark.no_mpi
def test_on_one_rank_an_exception_of_the_users_model_shows_the_users_frames(command, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HEAD + """
class Broken(Linear):
    def gradient(self, *arguments):
        raise OSError("shard 7")

mpiddl.train(Broken(), (X, Y), batch=10, quiet=True)
""")
    said = command("python", program).stderr
    assert said.count("  File") == 2 and "mpiddl.train(Broken()" in said and "in gradient" in said, said
    assert said.endswith("OSError: shard 7\n")


@pytest.mark.no_mpi
def test_frames_below_the_last_of_the_callers_stay():
    """A bug of ours has to be found."""
    with pytest.raises(Exception) as caught:
        np.linalg.cholesky(np.zeros((2, 2)) - 1)
    said = uncaught.trace_of(caught.value)
    assert "linalg" in said and "test_uncaught.py" in said


@pytest.mark.no_mpi
def test_the_message_of_a_bug_names_the_ranks():
    bug = KeyError("w")
    assert uncaught.text(bug) == "KeyError: 'w'"
    bug.ranks = "rank 3"
    assert uncaught.text(bug) == "rank 3 failed:\nKeyError: 'w'"
    assert uncaught.text(CommError("rank 1 failed")) == "rank 1 failed"


@pytest.mark.no_mpi
@pytest.mark.parametrize("fail", [None, RuntimeError("MPI is finalized")])
@pytest.mark.parametrize(("error", "code"), [(UsageError("rate: got -1"), 2), (OSError("shard 7"), 1)])
def test_the_process_ends_where_abort_returns(monkeypatch, fail, error, code):
    monkeypatch.setattr(os, "_exit", sys.exit)
    rank = Rank(fail)
    with pytest.raises(SystemExit) as ended:
        uncaught.end_job(rank, error)
    assert rank.codes == [code] == [ended.value.code]


def test_an_error_of_all_that_only_one_rank_lets_go_is_printed_by_that_rank(mpirun, tmp_path):
    done, said = job(mpirun, tmp_path, SOON + """
try:
    mpiddl.train("mlp", "digits", epochs=-1)
except ValueError:
    if WORLD.rank == 1:
        raise
""")
    assert done.returncode == 1 and said.count("mpiddl: error: epochs: got -1") == 1 and "Traceback" not in said
