"""Is everything in place? Checks of the installation, the launcher, the node and MPI itself, each with its remedy.

The checks run alone, under mpiexec and under srun, each guarded by itself: one that fails becomes a finding and the
others go on. The checks that communicate run on all ranks in the same order. A rank that fails in one of them may leave
the others waiting for ever, and blocking calls cannot be given a time limit; so a timer watches each such check, and when
its time is up the ranks say where they are and the job ends (`Watch`).

What is known to break, and therefore tried: shared windows where the ranks of a host are in containers of their own;
one-sided operations on some fabrics (open-mpi/ompi#14174, #10633); large messages where small ones pass, because processes
may not read each other's memory; MPI_Init itself, on fabrics that are half configured.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpiddl import launch, threads
from mpiddl.version import __version__

LIMIT_S = 30.0
LEAST_FREE = 64 << 20  # bytes; a checkpoint of a few million float32 parameters with two moments
LARGE = 4 << 20  # bytes; beyond the eager limit of every transport, so that the rendezvous path is tried


@dataclass(frozen=True)
class Finding:
    """What one check found.

    ``ok`` is True, False (something will not work; the doctor exits with 1) or None (worth a look, or it could not be
    checked); ``value`` what came; ``remedy`` what to do, empty where nothing is to be done.
    """

    name: str
    ok: bool | None
    value: str
    remedy: str = ""


def run(comm: Any = None, *, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> list[Finding]:
    """Every finding of `examine`, as a list; the same on every rank."""
    return list(examine(comm, env=env, limit_s=limit_s))


def examine(
    comm: Any = None, *, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> Iterator[Finding]:
    """Check one thing after the other.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks to check; None starts MPI, if that is possible, and takes ``MPI.COMM_WORLD``.
    env : mapping, optional
        The environment that the launcher set; None means ``os.environ``.
    limit_s : float
        Seconds that a check which communicates may take before the job is ended.

    Yields
    ------
    Finding
        The same on every rank. Where ranks differ, the worst of them, with the ranks it was found on.

    Communication
    -------------
    Collective over ``comm``: every rank must take every finding. Works on a duplicate, which is freed.
    """
    env = os.environ if env is None else env
    MPI, findings = _start(comm, env, limit_s)
    local = [_alone(name, check, env) for name, check in LOCAL.items()]
    if MPI is None:
        yield from [*local, *findings]
        return
    comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
    with Watch(comm, "comparing what the ranks found", limit_s):
        per_rank = comm.allgather([*local, *findings])
    yield from map(_worst, zip(*per_rank, strict=True))
    for name, check in TOGETHER.items():
        yield _together(comm, name, check, env, limit_s)
    comm.Free()


def show(findings: Sequence[Finding]) -> None:
    """Print the findings as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = {True: "[green]ok[/]", False: "[red]FAIL[/]", None: "[yellow]note[/]"}[finding.ok]
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        table.add_row(mark, finding.name, Text(f"{finding.value}{remedy}"))
    Console().print(table)
