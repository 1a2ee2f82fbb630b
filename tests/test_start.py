"""What Open MPI cannot start without is said before it starts: HOME, and a folder for its session files."""

from __future__ import annotations

import os
import sys

import pytest
from harness.launchers import MPICH_LIBRARY, OMPI_LIBRARY, OPEN_MPI_RANK
from mpi4py import MPI

from mpiddl.transport.start import environment_trouble

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
