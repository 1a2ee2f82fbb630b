"""mpi4py's own tests, of the release that is installed, with `Communicator` in the place of COMM_WORLD and COMM_SELF."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest
from harness.tiers import more

PROGRAM = Path(__file__).parents[1] / "programs" / "mpi4py_tests.py"
TAKEN_OVER = ("test_cco_buf", "test_cco_nb_buf", "test_comm")
REFUSED = ("test_exceptions",)  # first: what is refused, such as Free, must not change what comes after it
OTHERS = ("test_cco_vec", "test_cco_obj", "test_p2p_buf")


def alone(*case):
    """A case that only `make test-more` runs, with one MPI library: MPICH takes three times as long on busy cores."""
    return pytest.param(*case, marks=[pytest.mark.more, pytest.mark.no_mpi])


def unpack(path, folder):
    """An archive's plain files, each below ``folder``; no links, no devices. (``filter="data"`` came with Python 3.11.4.)"""
    with tarfile.open(path) as archive:
        for member in filter(tarfile.TarInfo.isreg, archive):
            place = (folder / member.name).resolve()
            if not place.is_relative_to(folder.resolve()):
                raise ValueError(f"{path}: got {member.name}, expected names below the folder")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.extractfile(member).read())


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """The folder of mpi4py's tests."""
    folder, release = tmp_path_factory.mktemp("mpi4py"), version("mpi4py")
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    words += ["--no-binary", "mpi4py", f"mpi4py=={release}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    archives = list(folder.glob("mpi4py-*.tar.gz"))
    if not archives:
        pytest.skip(f"mpi4py {release}'s sources cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    unpack(archives[0], folder)
    return next(folder.glob("mpi4py-*/test"))


def test_the_number_of_a_handle_may_be_asked_for_after_finalize(mpirun):
    program = ("from mpi4py import MPI; from mpiddl import Communicator; late = Communicator(MPI.COMM_WORLD.Dup()).Dup(); "
               "MPI.Finalize(); print(late.handle)")
    done = mpirun(1, sys.executable, "-c", program)
    assert done.returncode == 0 and done.stdout.strip().isdigit(), done.stderr


@pytest.mark.limit(1200)  # 5 to 40 s alone; ranks that wait take each other's cores
@pytest.mark.parametrize("ranks", [alone(1), 2, more(3), alone(4)])
def test_mpi4py_cannot_tell(mpirun, suite, ranks):
    check(mpirun, suite, ranks, "rule", TAKEN_OVER, least=240)


@pytest.mark.limit(1200)
@pytest.mark.more
@pytest.mark.parametrize("ranks", [3])
def test_nor_by_the_calls_that_are_the_librarys(mpirun, suite, ranks):
    check(mpirun, suite, ranks, "rule", OTHERS, least=150)


@pytest.mark.limit(1200)
@pytest.mark.parametrize(("ranks", "forced"), [more(3, "two-step"), more(2, "read"), alone(3, "ring"), (2, "doubling")])
def test_nor_where_every_call_is_ours(mpirun, suite, ranks, forced):
    check(mpirun, suite, ranks, forced, REFUSED + TAKEN_OVER[:2], least=140)


@pytest.mark.no_mpi
@pytest.mark.parametrize("name", ["../out", "a/../../out", "{}/out", "link/out"])
def test_an_archive_writes_below_its_folder_alone(tmp_path, name):
    path, folder = tmp_path / "x.tar.gz", tmp_path / "in" / "folder"
    folder.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "in")
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo(name.format(tmp_path / "in")))
    with nullcontext() if name.startswith("link") else pytest.raises(ValueError, match="below the folder"):
        unpack(path, folder)
    assert [entry.name for entry in (tmp_path / "in").iterdir()] == ["folder"] and not (folder / "link").is_symlink()


def check(mpirun, suite, ranks, forced, modules, least):
    done = mpirun(ranks, sys.executable, PROGRAM, suite, forced, *modules)
    told = dict(re.findall(r"rank (\d+): (\d+ tests, \d+ failed)", done.stdout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(told) == ranks and all(int(words.split()[0]) >= least and words.endswith(" 0 failed") for words in told.values())
