"""numba without a folder that it may write: kernels are kept among temporary files; told not to compile: one line says so."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness.tiers import more

from mpiddl.errors import OutputError
from mpiddl.machine import kernel_cache

SAYS = "mpiddl: numba cache: got no folder that can be written"
TRAIN = ("mpiddl", "train", "--data", "digits", "--epochs", "1", "--hidden", "8")
USES = {
    "train": "mpiddl.train('softmax', 'digits', epochs=1, quiet=True)",
    "pca": "mpiddl.decomposition.PCA(2).fit(np.random.default_rng(0).random((600, 500)))",
}
pytestmark = pytest.mark.no_mpi

USE = "import numpy as np, mpiddl, mpiddl.decomposition; from mpi4py import MPI; {}; print('done')"


@pytest.fixture
def nowhere(tmp_path):
    """An environment in which numba finds no folder, for root neither; temporary files are in ``tmp_path``."""
    (tmp_path / "file").write_text("")
    return {
        "NUMBA_CACHE_DIR": f"{tmp_path}/file/cache",
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
        "TMPDIR": f"{tmp_path}",
    }


@pytest.fixture
def folder(tmp_path):
    """The folder among temporary files, with what is compiled already: that takes long."""
    from numba.core.caching import UserProvidedCacheLocator

    from mpiddl import kernels

    path = tmp_path / f"mpiddl-numba-{os.geteuid()}"
    path.mkdir(0o700)
    compiled = kernels.sgd.stats.cache_path
    (path / UserProvidedCacheLocator.get_suitable_cache_subpath(kernels.__file__)).symlink_to(compiled)
    return path


@pytest.mark.parametrize("ranks", [1, more(3)])
def test_train_keeps_kernels_among_temporary_files_and_says_so_once(mpirun, nowhere, folder, ranks):
    finished = mpirun(ranks, *TRAIN, env=nowhere)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count(SAYS) == finished.stderr.count(str(folder)) == 1
    assert "export NUMBA_CACHE_DIR=" in finished.stderr


@pytest.mark.more
def test_pca_too(command, nowhere, folder, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((600, 500)))
    finished = command("mpiddl", "pca", tmp_path / "x.npy", "-k", 2, "-o", tmp_path / "out", env=nowhere)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr and finished.stderr.count(SAYS) == 1


def test_the_doctor_shows_it_with_the_remedy(command, nowhere, folder):
    look = "from mpiddl.doctor import checks as doctor; print(doctor.LOCAL['numba cache']('numba cache', {}))"
    said = command(sys.executable, "-c", look, env=nowhere).stdout
    assert "ok=None" in said and str(folder) in said and "export NUMBA_CACHE_DIR=" in said


@pytest.mark.parametrize("ranks", [1, more(3)])
def test_without_any_folder_one_line_says_so(mpirun, nowhere, tmp_path, ranks):
    (tmp_path / f"mpiddl-numba-{os.geteuid()}").write_text("in the way")
    finished = mpirun(ranks, *TRAIN, env=nowhere)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("mpiddl: error: numba cache: got no folder") == 1
    assert finished.stderr.count("export NUMBA_CACHE_DIR=") == 1


@pytest.fixture
def among(tmp_path, monkeypatch):
    """Where the folder is to be, in this process."""
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path))
    kernel_cache.temporary_folder.cache_clear()
    yield tmp_path / f"mpiddl-numba-{os.geteuid()}"
    kernel_cache.temporary_folder.cache_clear()


def test_the_folder_is_the_users_own(among):
    old = os.umask(0)
    try:
        assert kernel_cache.temporary_folder() == str(among)
    finally:
        os.umask(old)
    assert stat.S_IMODE(among.stat().st_mode) == 0o700


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(0o700)
    path.symlink_to(path.parent / "elsewhere")


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def _of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make a folder of another user")
    path.mkdir(0o700)
    os.chown(path, 65534, 65534)


def _in_a_folder_of_all(path: Path) -> None:
    path.parent.chmod(0o777)


def _in_a_folder_of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make a folder of another user")
    os.chown(path.parent, 65534, 65534)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_link, "is no folder"),
        (_open_to_all, "is open to other users"),
        (_of_another_user, "belongs to another user"),
        (_in_a_folder_of_all, "could be replaced by other users"),
        (_in_a_folder_of_another_user, "could be replaced by other users"),
    ],
)
def test_a_folder_that_another_user_could_write_is_not_taken(among, prepare, words):
    prepare(among)
    with pytest.raises(OutputError, match=words):
        kernel_cache.temporary_folder()


def test_numbas_own_setting_is_put_back(among):
    from numba.core import config

    before, made, kernel = config.CACHE_DIR, [], SimpleNamespace(_cache=SimpleNamespace(save_overload=None))

    def make():
        made.append(config.CACHE_DIR)
        if len(made) == 1:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return kernel

    assert kernel_cache.define(make) is kernel
    assert made == [before, str(among)]
    assert before == config.CACHE_DIR


def test_a_full_disk_leaves_kernels_that_work(monkeypatch, tmp_path, capfd):
    from numba import njit
    from numba.core import caching, config

    def fails(*args):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "save", fails)
    twice = kernel_cache.define(lambda: njit(cache=True)(_twice))
    assert (twice(2), twice(2.5)) == (4, 5.0)
    said = capfd.readouterr().err
    assert said.count("Disk quota exceeded") == said.count(str(tmp_path)) == said.count("export NUMBA_CACHE_DIR=") == 1


def _twice(x):
    return 2 * x


@pytest.mark.parametrize("ranks", [1, more(3)])
@pytest.mark.parametrize("what", ["train", "pca"])
def test_numba_told_not_to_compile_is_one_line(mpirun, tmp_path, what, ranks):
    np.save(tmp_path / "x.npy", np.ones((600, 500)))
    words = {"train": TRAIN, "pca": ("mpiddl", "pca", tmp_path / "x.npy", "-k", 2, "-o", tmp_path / "out")}[what]
    finished = mpirun(ranks, *words, env={"NUMBA_DISABLE_JIT": "1"})
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("mpiddl: error: NUMBA_DISABLE_JIT: got 1, expected 0") == 1
    assert finished.stderr.count("unset NUMBA_DISABLE_JIT") == 1


def test_a_communicator_says_it_at_its_first_long_sum(mpirun):
    use = "mpiddl.Communicator(MPI.COMM_WORLD).Allreduce(np.ones(1 << 20, 'f4'), np.empty(1 << 20, 'f4'))"
    finished = mpirun(2, sys.executable, "-c", USE.format(use), env={"NUMBA_DISABLE_JIT": "1"})
    assert finished.returncode == 1 and "done" not in finished.stdout
    assert "Traceback" not in finished.stderr and finished.stderr.count("NUMBA_DISABLE_JIT: got 1, expected 0") == 1


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_is_an_error_in_programs_too(command, use):
    finished = command(sys.executable, "-c", USE.format(use), env={"NUMBA_DISABLE_JIT": "1"})
    assert finished.returncode == 1
    assert "mpiddl: error: NUMBA_DISABLE_JIT: got 1, expected 0" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_program_on_two_ranks_says_it_once(mpirun):
    finished = mpirun(2, sys.executable, "-c", USE.format(USES["train"]), env={"NUMBA_DISABLE_JIT": "1"})
    assert finished.returncode == 1 and "done" not in finished.stdout
    assert "Traceback" not in finished.stderr and finished.stderr.count("NUMBA_DISABLE_JIT: got 1, expected 0") == 1


def test_the_doctor_says_that_numba_is_told_not_to_compile(command):
    finished = command("mpiddl", "doctor", env={"NUMBA_DISABLE_JIT": "1"})
    assert finished.returncode == 1
    assert "Traceback" not in finished.stdout + finished.stderr
    assert "FAIL  numba cache" in finished.stdout and "unset NUMBA_DISABLE_JIT" in finished.stdout


def test_a_kernel_is_filed_under_the_sources_of_all_kernels():
    from mpiddl.kernels import jit

    def doubled(x):
        return 2 * x

    assert jit.kernel(doubled)(2) == 4 and doubled.__qualname__.endswith(f"doubled-{jit._fingerprint()}")
