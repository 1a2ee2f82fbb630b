"""Training under a real Slurm on the testbed: srun, and the job script that users start from."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpiddl import launch
from mpiddl.testbed import Testbed, TestbedError

SCRIPT = Path(__file__).resolve().parent.parent / "slurm" / "train.sbatch"
MPI_TYPE = {"openmpi": "pmix", "mpich": "pmi2"}.get(launch.library(MPI.Get_library_version())[0], "none")


@pytest.fixture(scope="module")
def bed():
    """Two hosts with Slurm."""
    try:
        with Testbed(hosts=2, slurm=True) as bed:
            yield bed
    except TestbedError as error:
        pytest.skip(f"{error}")


@pytest.mark.limit(120)
def test_srun_trains_over_hosts(bed, tmp_path):
    train = ["mpiddl", "train", "--data", "digits", "--max-steps", "5", "--out", str(tmp_path / "run")]
    done = bed.exec("login", ["srun", "-N2", "-n4", f"--mpi={MPI_TYPE}", *train], timeout_s=100)
    assert done.returncode == 0, done.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ranks"] == 4


@pytest.mark.limit(180)
def test_the_job_script_trains(bed, tmp_path):
    settings = {"VENV": sys.prefix, "MPI_TYPE": MPI_TYPE, "EPOCHS": "1", "OUT": str(tmp_path / "run")}
    words = [f"{name}={value}" for name, value in settings.items()]
    sbatch = ["sbatch", "--parsable", "--cpus-per-task=1", "--time=5", str(SCRIPT)]
    done = bed.exec("login", ["env", *words, *sbatch], cwd=str(tmp_path), timeout_s=60)
    assert done.returncode == 0, done.output
    state = _end(bed, done.output.split()[-1])
    assert "JobState=COMPLETED" in state, state + "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ranks"] == 4


@pytest.mark.limit(180)
def test_the_job_script_decomposes(bed, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((400, 12)))
    settings = {"VENV": sys.prefix, "MPI_TYPE": MPI_TYPE, "FILE": str(tmp_path / "x.npy"), "K": "3"}
    settings["OUT"] = str(tmp_path / "out")
    words = [f"{name}={value}" for name, value in settings.items()]
    sbatch = ["sbatch", "--parsable", "--cpus-per-task=1", "--time=5", str(SCRIPT.with_name("pca.sbatch"))]
    done = bed.exec("login", ["env", *words, *sbatch], cwd=str(tmp_path), timeout_s=60)
    assert done.returncode == 0, done.output
    state = _end(bed, done.output.split()[-1])
    assert "JobState=COMPLETED" in state, state + "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["ranks"] == 4


def _end(bed, job):
    """What Slurm says of a job that has ended; `sbatch --wait` would look every half a minute."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        state = bed.exec("login", ["scontrol", "show", "job", job], timeout_s=30).output
        if not any(f"JobState={word}" in state for word in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")):
            break
        time.sleep(0.5)
    return state
