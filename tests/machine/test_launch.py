"""What launchers announce, and what is said when MPI comes up otherwise.

The environments are those that processes really had under Slurm 22.05, Open MPI 5.0.11 and MPICH 5.0.2, cut
down to what tells one launcher from another.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness.launchers import MPICH_LIBRARY, OMPI_LIBRARY, OPEN_MPI_RANK

from mpiddl.machine import launch
from mpiddl.machine.launch import HYDRA, NONE, OPEN_MPI, PMI, PMIX, SRUN, Promise, check, promise

JOB = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "2"}
# sbatch -N2 -n4. Slurm calls the batch script a task with a rank, too.
BATCH = JOB | {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SALLOC = JOB | {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}
STEP = JOB | {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "7",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
STEP_PMI2 = STEP | {
    "SLURM_MPI_TYPE": "pmi2",
    "PMI_FD": "13",
    "PMI_JOBID": "1.7",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
STEP_PMIX = STEP | {"SLURM_MPI_TYPE": "pmix", "PMIX_NAMESPACE": "slurm.pmix.1.7", "PMIX_RANK": "3"}
STEP_OF_ONE = STEP | {
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}
HYDRA_RANK = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "6", "PMI_RANK": "3", "PMI_SIZE": "4"}
# Hydra starts its proxies, one a node, with srun, so that its ranks carry a step of two tasks.
PROXY_STEP = STEP | {
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_MPI_TYPE": "pmi2",
    "PMI_JOBID": "1.1",
}

SEEN = {
    "alone": ({}, Promise(NONE, 1, 0, 1, "")),
    "mpiexec of Open MPI": (OPEN_MPI_RANK, Promise(OPEN_MPI, 4, 3, 2, "OMPI_COMM_WORLD_SIZE", "pmix")),
    "mpiexec of MPICH": (HYDRA_RANK, Promise(HYDRA, 4, 3, 2, "PMI_SIZE", "pmi")),
    "prterun": (
        {"PMIX_NAMESPACE": "prterun-vm-8122@1", "PMIX_RANK": "1"},
        Promise(PMIX, 2, 1, None, "PMIX_RANK", "pmix"),
    ),
    "gforker": ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Promise(PMI, 3, 1, None, "PMI_SIZE", "pmi")),
    "batch step": (BATCH, Promise(NONE, 1, 0, 1, "")),
    "shell of salloc": (SALLOC, Promise(NONE, 1, 0, 1, "")),
    "interactive step": (STEP_OF_ONE | {"SLURM_STEP_ID": "4294967290"}, Promise(NONE, 1, 0, 1, "")),
    "srun --mpi=none": (STEP, Promise(SRUN, 4, 3, 2, "SLURM_STEP_NUM_TASKS", "none")),
    "srun --mpi=pmi2": (STEP_PMI2, Promise(SRUN, 4, 3, 2, "SLURM_STEP_NUM_TASKS", "pmi2")),
    "srun --mpi=pmix": (STEP_PMIX, Promise(SRUN, 4, 3, 2, "SLURM_STEP_NUM_TASKS", "pmix")),
    "srun -n1": (STEP_OF_ONE, Promise(SRUN, 1, 0, 1, "SLURM_STEP_NUM_TASKS", "none")),
    "mpiexec of Open MPI in sbatch, first node": (
        BATCH | OPEN_MPI_RANK,
        Promise(OPEN_MPI, 4, 3, 2, "OMPI_COMM_WORLD_SIZE", "pmix"),
    ),
    "mpiexec of Open MPI in sbatch, second node": (
        STEP_OF_ONE | OPEN_MPI_RANK,
        Promise(OPEN_MPI, 4, 3, 2, "OMPI_COMM_WORLD_SIZE", "pmix"),
    ),
    "mpiexec of MPICH in sbatch": (PROXY_STEP | HYDRA_RANK, Promise(HYDRA, 4, 3, 2, "PMI_SIZE", "pmi")),
    "mpiexec of MPICH in srun -n1 --mpi=pmi2": (
        STEP_OF_ONE | {"SLURM_MPI_TYPE": "pmi2", "PMI_JOBID": "2.9"} | HYDRA_RANK,
        Promise(HYDRA, 4, 3, 2, "PMI_SIZE", "pmi"),
    ),
    "gforker in srun -n1": (
        STEP_OF_ONE | {"PMI_RANK": "1", "PMI_SIZE": "3"},
        Promise(PMI, 3, 1, None, "PMI_SIZE", "pmi"),
    ),
    "mpiexec of Open MPI in a rank of MPICH's": (
        HYDRA_RANK | OPEN_MPI_RANK,
        Promise(OPEN_MPI, 4, 3, 2, "OMPI_COMM_WORLD_SIZE", "pmix"),
    ),
    "values that are no numbers": (
        {"PMI_SIZE": "many", "SLURM_STEP_NUM_TASKS": "", "SLURM_STEP_ID": "batch"},
        Promise(NONE, 1, 0, 1, ""),
    ),
}

MPICH_PMIX_LIBRARY = MPICH_LIBRARY.replace("--with-pm=", "--with-pmix=/usr --with-pm=")
INTEL_LIBRARY = "Intel(R) MPI Library 2021.10 for Linux* OS\n"


@pytest.mark.parametrize(("env", "wanted"), SEEN.values(), ids=SEEN)
def test_promise_of_the_innermost_launcher(env, wanted):
    assert promise(env) == wanted


@pytest.mark.parametrize(
    ("layout", "node", "tasks"),
    [("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4", 0, 4), ("2(x2)", 5, None), ("", 0, None)],
)
def test_tasks_of_a_node(layout, node, tasks):
    assert promise(STEP | {"SLURM_STEP_TASKS_PER_NODE": layout, "SLURM_NODEID": str(node)}).local_size == tasks


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        (OMPI_LIBRARY, ("openmpi", "Open MPI v5.0.11")),
        (MPICH_LIBRARY, ("mpich", "MPICH 5.0.2")),
        (INTEL_LIBRARY, ("other", "Intel(R) MPI Library 2021.10 for Linux* OS")),
        ("MPI VERSION    : CRAY MPICH version 8.1.28", ("other", "MPI VERSION : CRAY MPICH version 8.1.28")),
        ("", ("other", "an unknown MPI library")),
    ],
)
def test_library_by_name(version, wanted):
    assert launch.library(version) == wanted


@pytest.mark.parametrize("library", [OMPI_LIBRARY, MPICH_LIBRARY], ids=["Open MPI", "MPICH"])
@pytest.mark.parametrize("env", [env for env, _ in SEEN.values()], ids=SEEN)
def test_the_world_that_was_promised_is_no_trouble(env, library):
    made = promise(env)
    assert check(made, made.size, library) is None


OWN = "/venv/bin/mpiexec"
SINGLETONS = {
    "Open MPI, srun pmi2": (
        STEP_PMI2,
        OMPI_LIBRARY,
        ("--mpi=pmi2 announced 4", "--mpi=pmix", "PMIX_PREFIX=/venv"),
    ),
    "Open MPI, srun none": (STEP, OMPI_LIBRARY, ("--mpi=none announced 4", "--mpi=pmix", OWN)),
    "MPICH, srun none": (STEP, MPICH_LIBRARY, ("--mpi=none announced 4", "--mpi=pmi2", OWN)),
    "Intel, srun none": (STEP, INTEL_LIBRARY, ("--mpi=none announced 4", "srun --mpi=list")),
    "Open MPI, MPICH's mpiexec": (HYDRA_RANK, OMPI_LIBRARY, ("of MPICH", "announced 4", "PMI_SIZE", OWN)),
    "MPICH, Open MPI's mpiexec": (OPEN_MPI_RANK, MPICH_LIBRARY, ("of Open MPI", "announced 4", OWN)),
}


@pytest.mark.parametrize(("env", "library", "words"), SINGLETONS.values(), ids=SINGLETONS)
def test_a_silent_singleton_is_told_with_its_remedy(env, library, words):
    message = check(promise(env), 1, library, prefix="/venv")
    assert message is not None and "world of 1" in message
    for word in words:
        assert word in message
    assert ("srun" in message) == ("SLURM_STEP_ID" in env)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_world_of_another_size_is_legal(world):
    assert check(promise(STEP_PMIX), world, OMPI_LIBRARY) is None


@pytest.mark.parametrize("env", [STEP_PMIX, OPEN_MPI_RANK])
def test_mpich_without_pmix_must_not_be_initialised_under_it(env):
    message = check(promise(env), None, MPICH_LIBRARY, prefix="/venv")
    assert message is not None and "does not speak PMIx" in message and "/venv/bin/mpiexec" in message


@pytest.mark.parametrize(
    ("env", "library"),
    [
        (STEP_PMIX, OMPI_LIBRARY),
        (STEP_PMIX, MPICH_PMIX_LIBRARY),
        (STEP_PMIX, INTEL_LIBRARY),
        (STEP_PMI2, MPICH_LIBRARY),
        (HYDRA_RANK, MPICH_LIBRARY),
        ({}, MPICH_LIBRARY),
    ],
)
def test_mpi_may_be_initialised_where_it_may_work(env, library):
    assert check(promise(env), None, library) is None


def test_one_process_speaks():
    whole, alone, last = promise(STEP_PMIX | {"SLURM_PROCID": "0"}), promise({}), promise(STEP_PMIX)
    assert launch.speaks(whole, 0, 4) and not launch.speaks(last, 3, 4)
    assert launch.speaks(whole, 0, 1) and not launch.speaks(last, 0, 1)
    assert launch.speaks(alone, 0, 1)


def test_no_mpi_names_both_extras_and_the_site():
    error = RuntimeError("cannot load MPI library\n/nowhere/libmpi.so: cannot open shared object file")
    message = launch.no_mpi_message(error)
    for word in (
        "mpiddl[openmpi]",
        "mpiddl[mpich]",
        "module load",
        "conda",
        "MPI4PY_LIBMPI",
        "/nowhere/libmpi.so",
    ):
        assert word in message
    assert "\n" not in message


def test_nothing_of_mpi_is_loaded():
    modules = "mpiddl.machine.launch, mpiddl.machine.threads, mpiddl.doctor"
    loaded = f"import sys, {modules}; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


@pytest.mark.parametrize("fabric", [True, False])
def test_open_mpi_is_told_not_to_look_for_a_fabric_where_there_is_none(monkeypatch, tmp_path, fabric):
    from types import SimpleNamespace

    from mpiddl.machine import launch
    from mpiddl.transport import start

    for name in start.WITHOUT_FABRIC:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(start, "FABRICS", ("/nowhere", str(tmp_path) if fabric else "/nowhere"))
    told = {}
    start.initialise(SimpleNamespace(Init_thread=lambda level: told.update(os.environ), THREAD_MULTIPLE=3), launch.promise({}))
    told = {name: value for name, value in told.items() if name in start.WITHOUT_FABRIC}
    assert told == ({} if fabric else start.WITHOUT_FABRIC)


WINDOW = """
import mpi4py, os, subprocess, sys
from mpiddl.transport import start
start.FABRICS, start.threads.launcher_cores = (), lambda: 0  # a machine without a fabric, with fewer cores than ranks
MPI = start.start_mpi(os.environ)
windows = [MPI.Win.Allocate(80, 8, comm=MPI.COMM_WORLD), MPI.Win.Create(bytearray(80), comm=MPI.COMM_WORLD)]
for window in windows:
    window.Free()
inherited = subprocess.run(["env"], stdout=subprocess.PIPE, text=True, check=True).stdout
sys.stdout.write(f"inherited: {[line for line in inherited.splitlines() if line.startswith('OMPI_MCA_')]}\\n")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_processes_do_not_inherit_the_settings_which_windows_do_not_need(mpirun, ranks):
    names = ("OMPI_MCA_osc", "OMPI_MCA_btl", "OMPI_MCA_mpi_yield_when_idle")
    ended = mpirun(ranks, sys.executable, "-c", WINDOW, env=dict.fromkeys(names))
    assert ended.returncode == 0, ended.stderr
    assert "UCX" not in ended.stderr
    assert not any(name in ended.stdout for name in names) and ended.stdout.count("inherited: [") == ranks, ended.stdout


def test_a_setting_of_the_user_stays(monkeypatch):
    from types import SimpleNamespace

    from mpiddl.machine import launch
    from mpiddl.transport import start

    monkeypatch.setattr(start, "FABRICS", ())
    name = "OMPI_MCA_osc"
    monkeypatch.setenv(name, "rdma")
    told = {}
    start.initialise(SimpleNamespace(Init_thread=lambda level: told.update(os.environ), THREAD_MULTIPLE=3), launch.promise({}))
    assert told[name] == os.environ[name] == "rdma"
