"""The harness itself: small test files, run by real mpiexec jobs, and what became of them."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import run
from harness import jobs

HERE = Path(__file__).parent
HEAD = "import ctypes, os, time\nimport pytest\n"

UNEQUAL = """
@pytest.mark.mpi
def test_equal(comm):
    assert comm.allreduce(1) == comm.size

@pytest.mark.mpi
def test_one_rank_fails(comm):
    print("a word from", comm.rank)
    assert comm.rank != 1, "this rank is unhappy"

@pytest.mark.mpi
def test_one_rank_skips(comm):
    if comm.rank == 1:
        pytest.skip("no luck here")

@pytest.mark.mpi
def test_all_ranks_skip(comm):
    pytest.skip("everywhere alike")

@pytest.mark.mpi
@pytest.mark.xfail(raises=AssertionError)
def test_expected(comm):
    assert False

@pytest.fixture
def untidy(comm):
    yield
    if comm.rank == 1:
        raise OSError("left open")

@pytest.mark.mpi
def test_one_rank_fails_afterwards(untidy):
    pass

@pytest.mark.mpi
def test_after_all_that(comm):
    assert comm.allgather(comm.rank) == list(range(comm.size))

@pytest.mark.mpi(min_size=3)
def test_wants_more_ranks(comm):
    assert False

def test_serial():
    assert False
"""

HANGS = {"in a collective": "comm.recv()", "holding the interpreter lock": "ctypes.PyDLL(None).sleep(250)"}

# The limit begins with the hang. A rank that has shown its stacks waits until the other ones have, too; each has a file for
# it, since a launcher may drop what ranks have printed last.
HANG = """
import conftest, glob, harness.alarm, types

def last_words(seconds):
    open(f"said-{{conftest.WORLD.rank}}", "w").close()
    while {awaited} and len(glob.glob("said-*")) < conftest.WORLD.size:
        time.sleep(0.01)

harness.alarm.time = types.SimpleNamespace(sleep=last_words)
harness.alarm.BACKSTOP_S = 1 if conftest.WORLD.size == 1 else 100

@pytest.mark.mpi
@pytest.mark.limit(200)
def test_hang(comm, request):
    assert conftest._limit(request.node) == 200
    comm.Barrier()
    alarm = request.config.stash[conftest.ALARM]
    alarm._stream = open(f"told-{{comm.rank}}", "w")
    alarm.set(1, "test_hang")
    {hang}
"""


@pytest.fixture
def pytest_on(mpirun, tmp_path):
    """Runs a test file with this harness on so many ranks."""
    for name in ("conftest.py", "harness"):
        copy = shutil.copytree if (HERE / name).is_dir() else shutil.copy
        copy(HERE / name, tmp_path / name)

    def run(ranks: int, body: str, *options: str) -> jobs.Finished:
        (tmp_path / "test_it.py").write_text(HEAD + body)
        arguments = ("-p", "no:cacheprovider", "-ra", "--color=no", *options, "test_it.py")
        return mpirun(ranks, "python", "-m", "pytest", *arguments, cwd=tmp_path)

    return run


def test_ranks_share_outcomes(pytest_on):
    ended = pytest_on(2, UNEQUAL)
    assert ended.returncode != 0
    assert "3 passed, 1 skipped, 2 deselected, 1 xfailed, 1 error" in ended.stdout.replace("2 failed, ", "")
    assert ended.stdout.count("test session starts") == 1
    assert "FAILED test_it.py::test_one_rank_fails - [rank 1/2]" in ended.stdout
    assert "AssertionError: this rank is unhappy" in ended.stdout
    assert re.search(r"\[rank 0/2\] Captured stdout call -+\na word from 0\n", ended.stdout)
    assert re.search(r"\[rank 1/2\] Captured stdout call -+\na word from 1\n", ended.stdout)
    assert "test_one_rank_skips [rank 1/2]" in ended.stdout
    assert "no luck here" in ended.stdout
    assert "ERROR at teardown of test_one_rank_fails_afterwards [rank 1/2]" in ended.stdout


@pytest.mark.parametrize("where", HANGS)
@pytest.mark.more
def test_a_hang_ends_the_job_and_is_shown(pytest_on, tmp_path, where):
    awaited = where == "in a collective"
    ended = pytest_on(2, HANG.format(hang=f"if comm.rank: {HANGS[where]}", awaited=awaited))
    assert ended.returncode != 0
    assert "test_hang: no end within 1 s; the job ends." in (tmp_path / "told-0").read_text()
    if where == "in a collective":
        told = (tmp_path / "told-1").read_text()
        assert re.search(r"\[rank 1/2\] MainThread stands at\n.*test_it.py.*in test_hang", told)


@pytest.mark.more
def test_a_lone_rank_that_holds_the_interpreter_lock_is_ended(pytest_on, tmp_path):
    ended = pytest_on(1, HANG.format(hang=HANGS["holding the interpreter lock"], awaited=False))
    assert ended.returncode != 0
    assert re.search(r"test_it.py.* in test_hang", (tmp_path / "told-0").read_text())


@pytest.mark.more
def test_a_failure_that_leaves_others_in_a_collective_is_told_before_the_alarm(pytest_on):
    body = """
import harness.outcomes
harness.outcomes.GRACE_S = 1
@pytest.mark.mpi
def test_lone_failure(comm):
    assert comm.rank != 1, "before the barrier"
    comm.Barrier()
"""
    ended = pytest_on(2, body)
    assert ended.returncode != 0
    assert "[rank 1/2] failed, and not all other ranks ended the test" in ended.stderr
    assert "AssertionError: before the barrier" in ended.stderr


@pytest.mark.more
def test_ranks_that_collect_other_tests_are_stopped(pytest_on):
    body = "import conftest\nif conftest.WORLD.rank:\n    @pytest.mark.mpi\n    def test_mine(): pass\n"
    ended = pytest_on(2, body)
    assert ended.returncode != 0
    assert "ranks [1] collected other tests than rank 0" in ended.stderr


def test_one_rank_runs_serial_tests_and_those_for_any_size(pytest_on):
    marks = ["@pytest.mark.mpi\n", "@pytest.mark.mpi_skip\n", ""]
    body = "".join(f"{mark}def test_{index}(): pass\n" for index, mark in enumerate(marks))
    assert "3 passed in" in pytest_on(1, body).stdout


@pytest.mark.more
def test_outcomes_are_recorded_up_to_an_abort(pytest_on, tmp_path):
    body = "@pytest.mark.mpi\ndef test_a(): pass\n@pytest.mark.mpi\ndef test_b(): os._exit(3)\n"
    assert pytest_on(2, body, "--record", "record").returncode != 0
    a, b = "test_it.py::test_a", "test_it.py::test_b"
    record = [json.loads(line)[:2] for line in (tmp_path / "record").read_text().splitlines()]
    assert record == [["started", a], ["passed", a], ["took", a], ["started", b]]


@pytest.mark.parametrize(("mpi", "ranks", "python", "tier"), [
    ("openmpi", 4, None, "all"), ("mpich", 1, None, "all"), ("openmpi", 1, None, "more"), ("mpich", 4, None, "more"),
    ("Python 3.11.2", 1, Path("python"), "more")])  # fmt: skip
def test_the_second_tier_runs_all_tests_only_where_the_first_one_runs_none(mpi, ranks, python, tier):
    options = argparse.Namespace(mpi={"openmpi": Path(), "mpich": Path()}, tier="more", pytest=[])
    assert run.tier_of(run.Part(mpi, ranks, python=python), options) == tier


def test_commands_leave_nothing_behind(tmp_path):
    script = f"""
import subprocess, sys, time
child = subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(99)"], start_new_session=True)
print(child.pid, flush=True)
"""
    env = jobs.environment(sys.executable)
    child = int(jobs.run([sys.executable, "-c", script], env, 200).stdout)
    assert not Path(f"/proc/{child}/cmdline").exists() or Path(f"/proc/{child}/cmdline").read_bytes() == b""


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.more
def test_a_command_without_an_end_is_ended_and_shown(command, mpirun, ranks):
    run = functools.partial(mpirun, ranks) if ranks else command
    for limit_s in (2, 20, 200):
        with pytest.raises(TimeoutError, match=f"no end within {limit_s} s; it said\n") as late:
            run("sh", "-c", "echo so far; sleep 999", timeout_s=limit_s)
        if "so far" in str(late.value):  # else it had not begun
            break
    assert "it said\nso far" in str(late.value)
