"""The line that starts several ranks here: made from what is found, shown where it is looked for, and it works."""

from __future__ import annotations

import os
import shlex
import sys

import pytest
from harness import jobs
from harness.examined import EXAMINE, read

from mpiddl.doctor import checks as doctor
from mpiddl.machine import launch_line as lines
from mpiddl.machine.launch_line import Machine, family_of, in_examples, launch_line, this_machine

# Without what the tests tell Open MPI, so that the line has to.
UNTOLD = dict.fromkeys(jobs.OPEN_MPI | jobs.AS_ROOT) | {"SLURM_JOB_ID": None}
COUNT = "from mpi4py import MPI; assert MPI.COMM_WORLD.size == {}; print('here', flush=True)"


def put(folder, *names):
    """Programs in a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("machine", "ranks", "line"),
    [
        (Machine("mpiexec", "openmpi", 2, False), 2, "mpiexec -n 2"),
        (Machine("mpiexec", "openmpi", 2, False), 3, "mpiexec --oversubscribe -n 3"),
        (Machine("mpiexec", "openmpi", 2, True), 3, "mpiexec --allow-run-as-root --oversubscribe -n 3"),
        (Machine("/opt/bin/mpiexec", "mpich", 2, True), 3, "/opt/bin/mpiexec -n 3"),
        (Machine("mpiexec", "other", 2, True), 3, "mpiexec -n 3"),
        (Machine("srun", "srun", 2, True), 3, "srun -n 3"),
        (Machine("", "other", 2, True), 3, "mpiexec -n 3"),
    ],
)
def test_the_line(machine, ranks, line):
    assert launch_line(machine, ranks) == line
    assert launch_line(machine, ranks, "python x.py") == f"{line} python x.py"


@pytest.mark.parametrize(
    ("beside", "leads_to", "family"),
    [
        (("ompi_info",), None, "openmpi"),
        (("prterun",), None, "openmpi"),
        (("mpiexec.hydra",), None, "mpich"),
        (("mpiexec.hydra", "orterun"), None, "other"),
        (("mpiexec.hydra", "orterun"), "orterun", "openmpi"),
        (("mpiexec.hydra", "orterun"), "mpiexec.hydra", "mpich"),
        ((), None, "other"),
    ],
)
def test_whose_mpiexec_it_is(tmp_path, beside, leads_to, family):
    put(tmp_path, *beside)
    (tmp_path / "mpiexec").symlink_to(leads_to) if leads_to else put(tmp_path, "mpiexec")
    assert family_of(str(tmp_path / "mpiexec")) == family


def test_beside_python_first_with_its_folder_if_the_path_does_not_lead_there(tmp_path):
    own, site = put(tmp_path / "own", "mpiexec", "ompi_info", "mpiddl"), put(tmp_path / "site", "mpiexec", "mpiexec.hydra")
    python = str(own / "python")
    found = this_machine({"PATH": f"{site}"}, python=python)
    assert (found.mpiexec, found.family, found.mpiddl) == (f"{own}/mpiexec", "openmpi", f"{own}/mpiddl")
    found = this_machine({"PATH": f"{own}:{site}"}, python=python)
    assert (found.mpiexec, found.family, found.mpiddl) == ("mpiexec", "openmpi", "mpiddl")
    found = this_machine({"PATH": f"{own}:{site}"}, "mpich", python)
    assert (found.mpiexec, found.family) == (f"{site}/mpiexec", "mpich")
    found = this_machine({"PATH": f"{site}:{own}"}, "other", python)  # Intel MPI's mpiexec is Hydra
    assert (found.mpiexec, found.family) == ("mpiexec", "mpich")


def test_what_is_not_known_is_that_of_the_library(tmp_path):
    site, python = put(tmp_path / "site", "mpiexec"), str(tmp_path / "python")
    assert this_machine({"PATH": f"{site}"}, "openmpi", python).family == "openmpi"
    assert this_machine({"PATH": f"{site}"}, "", python)[:2] == ("mpiexec", "other")


def test_srun_where_there_is_no_mpiexec(tmp_path):
    site, python = put(tmp_path / "site", "srun"), str(tmp_path / "a b" / "python")
    found = this_machine({"PATH": f"{site}"}, "openmpi", python)
    assert (found.mpiexec, found.family) == ("srun", "srun")
    assert found.mpiddl == f"'{tmp_path}/a b/python' -m mpiddl"
    assert this_machine({"PATH": f"{tmp_path}"}, "openmpi", python).mpiexec == ""


def test_a_job_of_slurms_has_as_many_slots_as_tasks():
    job = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "64"}
    assert this_machine(job | {"SLURM_JOB_ID": "1"}).slots == 64
    assert this_machine(job).slots == len(lines.cores().ids)


def test_examples_in_a_text():
    text = "  mpiexec -n 2 mpiddl tune\n  A=1 mpiexec -n 9 python x.py, under mpiexec"
    machine = Machine("/m/mpiexec", "openmpi", 2, False, "/m/mpiddl")
    assert in_examples(text, machine) == (
        "  /m/mpiexec -n 2 /m/mpiddl tune\n  A=1 /m/mpiexec --oversubscribe -n 9 python x.py, under mpiexec"
    )


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("bench", "overlap", "-h")], ids=" ".join)
def test_help_shows_the_line_of_this_machine(command, words):
    finished = command("mpiddl", *words)
    here = this_machine(os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"})
    assert finished.returncode == 0 and here.mpiexec == "mpiexec"
    assert any(f"{launch_line(here, ranks)} mpiddl " in finished.stdout for ranks in (2, 4))


def test_a_bench_on_one_rank_names_the_line(command):
    finished = command("mpiddl", "bench", "overlap")
    here = this_machine(os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"})
    assert finished.returncode == 2
    assert f"expected 2 or more: start it with `{launch_line(here, 2)} mpiddl bench overlap`" in finished.stderr


@pytest.mark.parametrize("more", [0, 1, 3])
def test_the_line_works(command, more):
    ranks = len(lines.cores().ids) + more
    here = this_machine(os.environ)
    line = launch_line(here, ranks, shlex.join([sys.executable, "-c", COUNT.format(ranks)]))
    finished = command("sh", "-c", line, env=UNTOLD)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("here") == ranks
    assert finished.stderr == ""


def test_the_doctor_shows_lines_that_work(command):
    found = read(command(sys.executable, "-c", EXAMINE, env=UNTOLD))["launch line"]
    assert found.ok
    for line in found.value.split("\n"):
        line = line.rpartition("ranks: ")[2].replace("mpiddl doctor", "mpiddl --version")
        finished = command("sh", "-c", line, env=UNTOLD)
        assert finished.returncode == 0, finished.stderr
        assert "mpiddl 0" in finished.stdout


def test_the_doctor_says_that_there_is_no_mpiexec(monkeypatch):
    monkeypatch.setattr(doctor, "this_machine", lambda env, library: Machine("", "other", 2, False))
    found = doctor._launch_line({}, "Open MPI v5.0.11")
    assert found.ok is None and found.value.startswith("got no mpiexec of Open MPI v5.0.11")
    assert "mpiddl[openmpi]" in found.remedy
    assert "module" in doctor._launch_line({}, "Intel(R) MPI Library 2021.10").remedy
