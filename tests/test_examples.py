"""Each example runs as its header says, on one rank and on several."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from harness.tiers import only

pytestmark = pytest.mark.no_mpi

EXAMPLES = Path(__file__).parents[1] / "examples"
CASES = {  # what the output must hold
    "own_model.py": "largest error 0.00",
    "own_strategy.py": "MB sent by all ranks",
    "own_optimiser.py": "exactly 0: 25 of 25",
    "own_solver.py": "own_solver:OrthogonalIteration: variances [9.472073 8.597602 7.786479]",
    "virtual_ranks.py": "    16     0.9",
    "late_and_seldom.py": "hierarchical:period=8",
    "fashion_mnist.py": "of 1000:",
    "sum_in_place.py": "equal True",
    "eof_analysis.py": "seesaw: EOF 1, pattern correlation 0.99",
    "numpy_loop.py": "accuracy: 0.899",
    "torch_digits.py": "accuracy: 9",
    "eigen_images.py": "1437 images, 74% of their variance in 10 components",
}
SHORT = {"own_strategy.py", "sum_in_place.py"}


def data_folder():
    folders = [*os.environ.get("MPIDDL_DATA", "").split(os.pathsep), str(EXAMPLES.parents[1] / "shared" / "data")]
    return next((folder for folder in folders if folder and Path(folder, "fashion-mnist").is_dir()), None)


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", only(SHORT, CASES))
def test_example(command, mpirun, name, tmp_path):
    env, args = {}, []
    if name == "fashion_mnist.py":
        if not data_folder():
            pytest.skip("Fashion-MNIST is neither in MPIDDL_DATA nor in ../shared/data")
        env, args = {"MPIDDL_DATA": data_folder()}, ["1"]
    if name == "torch_digits.py":
        pytest.importorskip("torch")
        args = ["--epochs", "5"]
    alone = name in ("virtual_ranks.py", "late_and_seldom.py")  # they bring their ranks with them
    where = {"env": env, "cwd": tmp_path}
    runner = ["-m", "mpiddl", "run"] if name == "torch_digits.py" else []
    whole = sys.executable, *runner, EXAMPLES / name, *args
    done = command(*whole, **where) if alone else mpirun(2, *whole, **where)
    assert done.returncode == 0, done.stderr
    assert CASES[name] in done.stdout


def test_the_same_ten_lines_alone(command):
    done = command(sys.executable, EXAMPLES / "own_model.py")
    assert done.returncode == 0 and CASES["own_model.py"] in done.stdout
