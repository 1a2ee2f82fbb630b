"""What Open MPI cannot start without is said before it starts: HOME, and a folder for its session files."""

from __future__ import annotations

import os
import sys

import pytest
from harness import jobs
from harness.launchers import MPICH_LIBRARY, OMPI_LIBRARY, OPEN_MPI_RANK
from mpi4py import MPI

from mpiddl.transport.start import environment_trouble, memory_trouble

OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"
TRAIN = ("mpiddl", "train", "--data", "digits", "--epochs", "1", "--hidden", "8")
PROGRAM = (sys.executable, "-c", "import mpiddl; mpiddl.train('softmax', 'digits', epochs=1, quiet=True)")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_text("")
    return f"{tmp_path}/file"


@pytest.fixture(params=["no HOME", "no folder"])
def lacking(request, file):
    """An environment that Open MPI cannot start in, and what is said about it."""
    if request.param == "no HOME":
        return {"HOME": None}, "HOME: got no value, expected a folder", "export HOME=/"
    return {"TMPDIR": file}, f"TMPDIR: got '{file}' (Not a directory), expected a folder", "export TMPDIR=DIR"


def test_train_says_what_is_lacking_in_one_line(command, lacking):
    env, told, remedy = lacking
    finished = command(*TRAIN, env=env)
    if OPEN_MPI:
        assert finished.returncode == 1 and finished.stdout == ""
        assert finished.stderr.startswith(f"mpiddl: error: {told}") and remedy in finished.stderr
        assert finished.stderr.count("\n") == 1
    else:
        assert finished.returncode == 0, finished.stderr


def test_programs_say_it(command, lacking):
    env, told, remedy = lacking
    finished = command(*PROGRAM, env=env)
    if OPEN_MPI:
        assert finished.returncode == 1
        assert f"mpiddl: error: {told}" in finished.stderr and remedy in finished.stderr
        assert "MPI_Init" not in finished.stderr
    else:
        assert finished.returncode == 0, finished.stderr


def test_the_doctor_finds_it(command, lacking):
    env, told, remedy = lacking
    finished = command("mpiddl", "doctor", env={"COLUMNS": "300", **env})
    said = " ".join(finished.stdout.split())
    assert (told in said and remedy in said and "FAIL MPI start" in said) == OPEN_MPI
    assert finished.returncode == OPEN_MPI, finished.stdout + finished.stderr
    assert finished.stderr == ""


def test_home_comes_first(file):
    told, remedy = environment_trouble({"TMPDIR": file}, OMPI_LIBRARY)
    assert told.startswith("HOME: ") and remedy.startswith("export HOME=/")


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP"])
def test_the_variable_is_named_that_open_mpi_looks_at(file, tmp_path, name):
    later = {"TMPDIR": {"TEMP": f"{tmp_path}"}, "TEMP": {"TMP": f"{tmp_path}"}, "TMP": {}}[name]
    told, _ = environment_trouble({"HOME": "/", name: file, **later}, OMPI_LIBRARY)
    assert told.startswith(f"{name}: got '{file}'")


@pytest.mark.parametrize("folder", ["", "{0}/file", "{0}/file/below", "/proc/self", "/proc/self/below"])
def test_folders_that_cannot_be_written(file, tmp_path, folder):
    assert environment_trouble({"HOME": "/", "TMPDIR": folder.format(tmp_path)}, OMPI_LIBRARY)


@pytest.mark.parametrize(
    ("env", "version"),
    [
        ({"HOME": ""}, OMPI_LIBRARY),
        ({"HOME": "/nowhere", "TMPDIR": "{0}"}, OMPI_LIBRARY),
        ({"HOME": "/nowhere", "TMPDIR": "{0}/to/be/made"}, OMPI_LIBRARY),
        (OPEN_MPI_RANK | {"HOME": "/", "TMPDIR": "/proc/self"}, OMPI_LIBRARY),  # the launcher has made the session folder
        ({"TMPDIR": "/proc/self"}, MPICH_LIBRARY),
    ],
)
def test_what_mpi_starts_with_is_no_trouble(env, version, tmp_path):
    assert environment_trouble({name: value.format(tmp_path) for name, value in env.items()}, version) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.no_mpi
@pytest.mark.parametrize(("mib", "ranks", "version", "told"), [
    (8, 4, MPICH_LIBRARY, False), (16, 2, MPICH_LIBRARY, True), (24, 2, MPICH_LIBRARY, False), (24, 4, MPICH_LIBRARY, True),
    (64, 4, MPICH_LIBRARY, False), (0, 4, MPICH_LIBRARY, False), (16, 1, MPICH_LIBRARY, False), (16, 4, OMPI_LIBRARY, False),
])  # fmt: skip
def test_where_mpich_crashes_for_want_of_shared_memory(monkeypatch, mib, ranks, version, told):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, mib << 8, 0, 0, 0, 0, 0, 0, 255)))
    env = {"PMI_SIZE": f"{ranks}", "PMI_RANK": "0", "MPI_LOCALNRANKS": f"{ranks}"}
    trouble = memory_trouble(env, version)
    assert (trouble is not None) == told
    assert not told or trouble[0].startswith(f"/dev/shm: got {mib}.0 MiB in all, expected {16 + 4 * ranks} MiB or more")


SMALL = """
import numpy as np, sys, warnings
from mpi4py import MPI
import mpiddl

world, x = MPI.COMM_WORLD, np.full(4 << 20, MPI.COMM_WORLD.rank + 1.0)
comm, size, y = mpiddl.Communicator(world), world.size, np.zeros_like(x)
forced = mpiddl.Communicator(world.Dup(), algorithms={"allreduce": "two-step"})
for n in (1000, 100_000, x.size):
    for op, wanted in ((MPI.MAX, size), (MPI.SUM, size * (size + 1) / 2), (MPI.MIN, 1)):
        for one in (comm, forced, world):
            one.Allreduce(x[:n], y[:n], op)
            assert (y[:n] == wanted).all()
        comm.Iallreduce(x[:n], y[:n], op).Wait()
        assert (y[:n] == wanted).all()
    comm.Reduce(x[:n], y[:n]), comm.Bcast(y[:n]), comm.Reduce_scatter_block(x[:n], y[: n // size])
    dup = comm.Dup()
    dup.Prepare()
    dup.Allreduce(x[:n], y[:n])
    dup.Free()
print("well", comm.why("allreduce", x.nbytes).algorithm, flush=True)
"""


@pytest.mark.limit(200)
def test_a_communicator_works_in_little_shared_memory(command, tmp_path):
    """A container has 64 MiB. The doctor says why MPICH cannot start in 16 MiB."""
    (tmp_path / "small.py").write_text(SMALL)
    unshare = ("unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), "--mount", "sh", "-c")
    if command(*unshare, "mount -t tmpfs none /dev/shm").returncode != 0:
        pytest.skip("this kernel lets us mount no file system of our own")

    def in_little(mib, *words):
        words = jobs.mpi_command(2, [str(word) for word in words], jobs.environment(sys.executable))
        root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"  # which an ordinary user is, in there
        return command(*unshare, f"mount -t tmpfs -o size={mib}m none /dev/shm; exec env {root} {' '.join(words)}")

    for mib in (64, 16 if OPEN_MPI else 24):
        done = in_little(mib, sys.executable, tmp_path / "small.py")
        assert done.returncode == 0 and done.stdout.count("well") == 2, done.stderr
        assert done.stderr.count("the MPI library's algorithm is used") == 1
    done = in_little(16, "mpiddl", "doctor")
    assert done.returncode == (not OPEN_MPI), done.stdout + done.stderr
    assert ("expected 24 MiB or more for 2 ranks; MPICH may crash" in " ".join(done.stdout.split())) != OPEN_MPI


WORKERS = """
import multiprocessing, sys

def fit(_):
    import numpy as np
    from mpiddl.decomposition import PCA
    return PCA(1).fit(np.eye(10, 3)).n_samples_  # 20 if two ranks were to fit together

def main():
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print("samples", pool.map(fit, range(2)), flush=True)
    MPI.COMM_WORLD.Barrier()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_worker_process_is_no_rank(command, tmp_path, method):
    """A second process that joins MPI as the same rank would end the job with a crash, or hang."""
    (tmp_path / "workers.py").write_text(WORKERS)
    done = command(*jobs.mpi_command(2, [sys.executable, f"{tmp_path}/workers.py", method], jobs.environment(sys.executable)))
    if method == "spawn":
        assert done.returncode == 0 and done.stdout.count("samples [10, 10]") == 2, done.stderr
    else:
        assert done.returncode != 0 and "MPI: got a worker process in which MPI is that of rank" in done.stderr
