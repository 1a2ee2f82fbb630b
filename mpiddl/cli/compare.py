"""``mpiddl compare``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpiddl.cli.signals import end_on_signals
from mpiddl.errors import UsageError
from mpiddl.launch import promise

if TYPE_CHECKING:
    from mpiddl.compare.places import Place

EPILOG = """
\b
JOB.toml:
  [train]                          what all runs share: settings of `mpiddl train`
  data = "digits"
  hidden = [64]
  epochs = 10
  batch = 128
  optimiser = "nesterov"
  [compare]
  strategies = ["two-step", "local-sgd:period=8", {strategy = "asgd", rate = 0.02}]
  workers = [4, 8]                 ranks that compute; each number is a grid of its own
  seeds = 3                        runs of each strategy, or a list: [1, 2, 3]
  target = 0.95                    tell how long it takes to this accuracy on the validation rows
  # samples, seconds or bytes      another budget than [train]'s epochs, equal for all
  # baseline, margin, limit        docs/compare.md tells these

\b
Examples:
  mpiddl compare examples/compare.toml --simulate 8           on the simulated clock: no cluster needed
  mpiddl compare examples/compare.toml --testbed 8:200mbit    on 8 hosts with links of 200 Mbit/s, on this machine
  mpiddl compare examples/compare.toml                        on this machine's MPI ranks
  mpiddl compare examples/compare.toml --show                 the report of the runs that there are
  sbatch --array=1-8 slurm/compare.sbatch                     on a cluster, eight parts at a time

\b
A comparison that was stopped or killed goes on where it was when it is started again: finished runs are kept in --out as they
come. Runs that failed are tried again.
"""


def _workers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """None: not simulated. Nothing: as many as the file says."""
    if value is None:
        return None
    parts = [part for part in value.split(",") if part]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"simulate: got {value!r}, expected whole numbers from 1, such as 8 or 4,8, or nothing behind it")
    return tuple(map(int, parts))


def _part(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int]:
    number, slash, count = (value or "1/1").partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"part: got {value!r}, expected N/COUNT, N from 1 to COUNT, such as 2/8")
    return int(number), int(count)


@click.command(epilog=EPILOG)
@click.argument("job_file", type=click.Path(path_type=Path), metavar="JOB.toml")
@click.option("--simulate", is_flag=False, flag_value="", callback=_workers, metavar="[W,...]",
              help="On the simulated clock, with so many workers, or as many as the file says.")
@click.option("--testbed", metavar="HOSTS:RATE", help="On a cluster of this machine, shaped to a rate.")
@click.option("--out", metavar="DIR", help="Folder for runs and report.  [default: runs/, and the name of JOB.toml]")
@click.option("--show", is_flag=True, help="Run nothing; write the report of the runs that there are.")
@click.option("--part", callback=_part, metavar="N/COUNT", help="Run one of so many parts of the grid; --show joins them.")
@click.option("--jobs", default=0, metavar="N", help="Simulated runs at a time; others go one by one.  [default: cores]")
@click.option("--mpi", metavar="openmpi|mpich", help="Whose mpiexec; usually the one beside this Python.")
@click.option("--launch", default="", metavar="WORDS", help="Another launcher, given -n: 'srun --mpi=pmix'.")
@click.option("--quiet", is_flag=True, help="Print nothing but the recommendation.")
def compare(job_file: Path, simulate: tuple[int, ...] | None, testbed: str | None, out: str | None, show: bool,
            part: tuple[int, int], jobs: int, quiet: bool, **options: Any) -> None:
    """Which strategy for my job? Run several on it, at an equal budget, and write what came out.

    A grid of strategies, numbers of workers and seeds. The report tells accuracy, time to a target, bytes, staleness and
    how far ranks are apart, with intervals over the seeds, and recommends one: report.html, which holds all it shows, report.md
    and report.json, in --out. Start it alone: it starts the ranks.
    """
    from mpiddl.compare.check import check
    from mpiddl.compare.grid import read_grid
    from mpiddl.compare.places import check_shared
    from mpiddl.compare.store import Store
    from mpiddl.compare.study import Study
    from mpiddl.compare.writing import remember, spoken, write_report
    from mpiddl.request import search_path

    if promise(os.environ).size > 1:
        raise UsageError(f"ranks: got {promise(os.environ).size}, expected one: the comparison starts the ranks itself")
    grid = read_grid(job_file, simulate or ())
    place = _place(simulate, testbed, jobs, options)
    if out == "":
        raise UsageError("out: got an empty name (an unset variable?), expected a folder")
    folder = Path(out) if out else Path("runs", job_file.stem)
    if testbed:
        check_shared(folder)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    facts = check(grid, place, search_path(os.environ))
    store = Store(folder, part, say)
    if show and not list(folder.glob("cells*.jsonl")):
        raise UsageError(f"out: {folder}: there are no runs to show")
    if not show:
        store.take()
    study, whole = Study(grid, place, store, facts, say), part[1] == 1
    again = _command(job_file, folder, simulate, {"testbed": testbed, **options})
    end_on_signals()
    try:
        store.open()
        if not show:
            study.begin(part)
            remember(study)
            study.run(part)
    except (KeyboardInterrupt, SystemExit):
        say(f"{len(store)} runs are in {folder}; the same command goes on from there, and --show tells what they say")
        raise
    finally:
        store.close()
    if not (whole or show):
        say(f"part {part[0]} of {part[1]} is over; when all are: {again} --show")
        return
    advice, written = write_report(study, again)
    click.echo("\n".join(spoken(each, len(advice) > 1) for each in advice), nl=False)
    say(f"report: {written}")
    if failed := sum(bool(outcome.get("error")) for outcome in study.found().values()):
        say(f"{failed} runs failed: {folder / 'failed'} has what they printed; the same command tries them again")
    if not any(each.choice for each in advice):
        sys.exit(1)


def _place(simulate: tuple[int, ...] | None, testbed: str | None, jobs: int, options: dict[str, Any]) -> Place:
    from mpiddl.compare.places import Here, OnTestbed, Simulated

    asked = {"--simulate": simulate is not None, "--testbed": testbed, "--launch": options["launch"]}
    given = [name for name, came in asked.items() if came]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: got both, expected one of them")
    if jobs < 0 or (jobs > 1 and simulate is None):
        wanted = "1: runs on real ranks are timed" if jobs > 0 else "1 or more, or 0: as many as there are cores"
        raise UsageError(f"jobs: got {jobs}, expected {wanted}")
    if simulate is not None:
        return Simulated(jobs, os.environ)
    if testbed is not None:
        return OnTestbed(testbed, options["mpi"], os.environ)
    return Here(options["launch"], options["mpi"], os.environ)


def _command(job_file: Path, folder: Path, simulate: tuple[int, ...] | None, options: dict[str, str | None]) -> str:
    """What makes the report again."""
    words = ["mpiddl", "compare", str(job_file), "--out", str(folder)]
    if simulate is not None:
        words += ["--simulate", *([",".join(map(str, simulate))] if simulate else [])]
    return shlex.join([*words, *(word for name, value in options.items() if value for word in (f"--{name}", value))])
