"""Files of a rank that does not write results: it reads what it has written, and those of rank 0 stay as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mpiddl.programs.own_files import OwnFiles

pytestmark = pytest.mark.no_mpi


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "of-rank-0.txt").write_text("rank 0")
    files = OwnFiles()
    yield files
    files.remove()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["of-rank-0.txt"]
    assert (tmp_path / "out" / "deep" / "of-rank-0.txt").read_text() == "rank 0"


def test_what_a_rank_writes_it_reads(files):
    os.makedirs("new/folder", exist_ok=True)
    os.makedirs("new/folder", exist_ok=True)
    with pytest.raises(FileExistsError):
        os.makedirs("new/folder")
    Path("new/folder/a.txt").write_text("mine")
    with open("out/deep/of-rank-0.txt", "a") as file:
        file.write(" and mine")
    assert Path("new/folder/a.txt").read_text() == "mine"
    assert Path("out/deep/of-rank-0.txt").read_text() == "rank 0 and mine"


def test_copies_have_the_mode_and_the_time_of_the_file(files):
    before = os.stat("out/deep/of-rank-0.txt")
    os.chmod("out/deep/of-rank-0.txt", 0o600)  # by rank 0 alone
    assert os.stat("out/deep/of-rank-0.txt").st_mode == before.st_mode
    Path("mine.txt").write_text("mine")
    os.chmod("mine.txt", 0o640)
    shutil.copy("mine.txt", "copy.txt")
    shutil.copy2("mine.txt", "copy2.txt")
    assert {os.stat(name).st_mode & 0o777 for name in ("mine.txt", "copy.txt", "copy2.txt")} == {0o640}
    assert os.stat("copy2.txt").st_mtime_ns == os.stat("mine.txt").st_mtime_ns


def test_a_folder_is_removed_for_this_rank_only(files):
    Path("out/deep/mine.txt").write_text("mine")
    shutil.rmtree("out")
    assert not os.path.exists("out")
    assert not os.path.exists("out/deep/of-rank-0.txt")
    with pytest.raises(FileNotFoundError):
        Path("out/deep/of-rank-0.txt").read_text()
    with pytest.raises(FileNotFoundError):
        shutil.rmtree("out")
    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out/deep")
    Path("out/deep/again.txt").write_text("mine")
    assert Path("out/deep/again.txt").read_text() == "mine"
    assert not os.path.exists("out/deep/of-rank-0.txt")


def test_files_are_removed_and_renamed_for_this_rank_only(files):
    os.rename("out/deep/of-rank-0.txt", "moved.txt")
    assert Path("moved.txt").read_text() == "rank 0"
    assert not os.path.exists("out/deep/of-rank-0.txt")
    os.remove("moved.txt")
    with pytest.raises(FileNotFoundError):
        os.remove("moved.txt")


def test_temporary_folders_and_caches_stay_where_they_are(files, monkeypatch):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "deep").mkdir()
        Path(folder, "deep", "a.txt").write_text("a")
        assert "a.txt" in os.listdir(Path(folder, "deep"))
    assert not os.path.exists(folder)
    cache = Path(tempfile.mkdtemp(), "torchinductor_root", "deep")
    os.makedirs(cache)
    assert os.listdir(cache.parent) == ["deep"]
    shutil.rmtree(cache.parents[1])


def test_h5py(files):
    h5py = pytest.importorskip("h5py")
    files.h5py(h5py)
    with h5py.File("out/a.h5", "w") as file:
        file["numbers"] = [1, 2]
    with h5py.File("out/a.h5", "a") as file:
        file["more"] = [3]
    with h5py.File("out/a.h5") as file:
        assert list(file) == ["more", "numbers"]


def test_torch_save(files):
    torch = pytest.importorskip("torch")
    files.torch(torch)
    torch.save({"a": torch.ones(2)}, "out/a.pt")
    torch.save({"b": torch.ones(2)}, Path("out/b.pt"))
    assert list(torch.load("out/a.pt")) + list(torch.load(Path("out/b.pt"))) == ["a", "b"]


@pytest.mark.parametrize(("leave", "code", "printed"), [
    ("sys.exit('too low')", 1, 1), ("sys.exit(3)", 3, 0), ("sys.exit(3 if rank else 0)", 3, 0)])
def test_a_program_that_leaves_has_its_message_once_and_its_exit_code(tmp_path, mpirun, leave, code, printed):
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n{leave}\n")
    done = mpirun(2, "mpiddl", "run", "--quiet", program)
    assert done.returncode == code
    assert done.stderr.count("too low") == printed
