"""Programs of the backend "mpiddl" as jobs: how they start, how they end, and what is said when ranks differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

PROGRAM = """
import datetime, sys, threading
import torch, torch.distributed as dist
how = sys.argv[1]
{before}
dist.init_process_group("mpiddl", timeout=datetime.timedelta(seconds={timeout}))
rank, data = dist.get_rank(), torch.ones(3)
if rank == 1:
    {one}
{all}
"""


@pytest.fixture
def job(mpirun: Any, tmp_path: Path) -> Any:
    """``job(all="...", one="...")`` runs statements of all ranks and, before them, of rank 1 alone, on 2 ranks."""

    def start(*, before: str = "import mpiddl.torch", one: str = "pass", timeout: float = 600, ranks: int = 2, env: Any = None,
              **all: str) -> Any:
        text = PROGRAM.format(before=before, one=one, timeout=timeout, all=all["all"])
        path = tmp_path / "program.py"
        path.write_text(text)
        return mpirun(ranks, sys.executable, path, "x", env=env)

    return start


SUM = "dist.all_reduce(data); print('sum', data[0].item(), flush=True)"


def test_the_plug_in_is_enough(job: Any) -> None:
    """No import of mpiddl, no address, no destroy_process_group; ``import torch`` has started no MPI."""
    before = "assert 'mpi4py' not in sys.modules and 'numba' not in sys.modules"
    done = job(before=before, all=SUM + "; dist.new_group([0, 1]); dist.all_reduce(data, async_op=True)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


def test_without_a_launcher(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(before="", one="pass", timeout=60, all=SUM))
    done = command(sys.executable, path, "x")
    assert done.returncode == 0, done.stderr
    assert "sum 1.0" in done.stdout


FAILURES = {
    "environment": ({"env": {"RANK": "5"}, "all": SUM}, "got RANK=5 on rank 0 of 2 MPI ranks, expected rank 0 and 2 ranks"),
    "arguments": ({"before": "dist.init_process_group('mpiddl', rank=0, world_size=3)", "all": SUM},
                  "got world_size=3 on rank 0 of 2 MPI ranks"),
    "exception": ({"one": "raise KeyError('of rank one')", "all": SUM}, "KeyError: 'of rank one'"),
    "timeout": ({"one": "threading.Event().wait()", "timeout": 2, "all": SUM},
                "allreduce: got no result in"),
    "missing": ({"one": "threading.Event().wait()", "timeout": 2, "all": "dist.barrier()"},
                "ranks [1] of the group have not come to it"),
    "leaves": ({"one": "sys.exit(3)", "all": SUM}, "ranks [1] of the group have left the program"),
    "receiver alone": ({"one": "sys.exit(0)", "all": "dist.recv(data, 1)"},
                       "s, because that rank has left the program or destroyed the group"),
    "limited wait": ({"one": "threading.Event().wait()", "all":
                      "dist.all_reduce(data, async_op=True).wait(datetime.timedelta(seconds=1))"},
                     "allreduce: got no result in 1 s"),
    "cleans up": ({"one": "data = None", "all": "try:\n    dist.all_reduce(data)\nfinally:\n    dist.destroy_process_group()"},
                  "Invalid function argument"),
}


LONG = ("exception", "missing", "leaves", "cleans up")
"""Ranks wait 10 s for others before the job ends."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.more if name in LONG else ()) for name in FAILURES])
def test_a_failure_ends_the_job(job: Any, name: str) -> None:
    """Whatever one rank does, all end, and what it was is said."""
    how, told = FAILURES[name]
    done = job(**how)
    assert done.returncode != 0
    assert told in done.stderr + done.stdout
