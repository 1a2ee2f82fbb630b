"""``mpiddl compare``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpiddl.cli.compare_program import compare_program
from mpiddl.cli.signals import end_on_signals
from mpiddl.errors import UsageError
from mpiddl.machine.launch import promise

if TYPE_CHECKING:
    from mpiddl.compare.backends import Here, OnTestbed, Place

EPILOG = """
\b
JOB.toml:
  [train]                          settings of `mpiddl train`, the same for all runs
  data = "digits"
  hidden = [64]
  epochs = 10
  batch = 128
  optimiser = "nesterov"
  [compare]
  strategies = ["two-step", "local-sgd:period=8", {strategy = "asgd", rate = 0.02}]
  workers = [4, 8]                 numbers of ranks that compute; compared separately
  seeds = 3                        runs of each strategy, or a list: [1, 2, 3]
  target = 0.95                    report the time to this accuracy on the validation rows
  # samples, seconds or bytes      a budget other than the epochs of [train], the same for all
  # rates = [0.01, 0.02, 0.04]     learning rates to try; the validation rows choose one for each strategy
  # baseline, margin, limit, batch_per_worker, tune_workers        see docs/compare.md

\b
PROGRAM.py is a program for `mpiddl run`. Each run's result is the last number that --metric finds in its output. {seed} in
its arguments becomes the seed of the run.

\b
Examples:
  mpiddl compare examples/compare.toml --simulate 8           on the simulated clock: no cluster needed
  mpiddl compare examples/compare.toml --testbed 8:200mbit    on 8 emulated hosts with links of 200 Mbit/s
  mpiddl compare examples/compare.toml                        on MPI ranks of this machine
  mpiddl compare examples/compare.toml --show                 report on the finished runs, run nothing
  sbatch --array=1-8 slurm/compare.sbatch                     on a cluster, in eight parts
  mpiddl compare --program train.py --metric 'accuracy: (.*)%' --strategy auto --strategy gossip -- --epochs 3 --seed {seed}

To continue a comparison that was stopped or killed, start the same command again. Finished runs are kept in --out. Failed runs
are tried again.
"""


def _workers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """None: not simulated. Empty: the numbers of the file."""
    if value is None:
        return None
    parts = [part for part in value.split(",") if part]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"simulate: got {value!r}, expected whole numbers of 1 or more, such as 8 or 4,8, or no value")
    return tuple(map(int, parts))


def _part(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int]:
    number, slash, count = (value or "1/1").partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UsageError(f"part: got {value!r}, expected N/COUNT with N from 1 to COUNT, such as 2/8")
    return int(number), int(count)


def _ranks(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    parts = [part for part in (value or "").split(",") if part]
    if not all(part.isdecimal() and int(part) for part in parts) or len({*parts}) < len(parts):
        raise UsageError(f"workers: got {value!r}, expected different whole numbers of 1 or more, such as 2 or 2,4")
    return tuple(map(int, parts))


@click.command(epilog=EPILOG)
@click.argument("words", nargs=-1, metavar="JOB.toml | -- ARGS", type=click.UNPROCESSED)
@click.option("--program", type=click.Path(path_type=Path), metavar="PROGRAM.py",
              help="Compare strategies on a program that `mpiddl run` distributes, instead of a job. ARGS are its arguments.")
@click.option("--metric", metavar="PATTERN",
              help="With --program: regular expression for the result, with ( ) around the number. The last match counts.")
@click.option("--lower", is_flag=True, help="With --program: a lower result is better, such as a loss.")
@click.option("--strategy", "strategies", multiple=True, metavar="NAME",
              help="With --program: a strategy to compare. Give it several times. The first is the baseline.  [default: auto]")
@click.option("--workers", callback=_ranks, metavar="W,...", help="With --program: numbers of ranks.  [default: 2]")
@click.option("--seeds", type=click.IntRange(1, 1000), metavar="N", help="With --program: runs of each strategy, with the "
                                                                         "seeds 1 to N.  [default: 3]")
@click.option("--margin", type=click.FloatRange(min=0), metavar="X",
              help="With --program: results that differ by at most X are equal.  [default: 0, only noise]")
@click.option("--limit", type=click.FloatRange(min=1), metavar="SECONDS",
              help="With --program: a run that takes longer is ended and counts as failed.  [default: 86400, one day]")
@click.option("--simulate", is_flag=False, flag_value="", callback=_workers, metavar="[W,...]",
              help="Run on the simulated clock with W workers.  [default: the numbers of workers in JOB.toml]")
@click.option("--testbed", metavar="HOSTS:RATE", help="Run on emulated hosts, such as 8:200mbit for 8 hosts with links of 200 "
                                                      "Mbit/s.")
@click.option("--out", metavar="DIR", help="Folder for the runs and the report.  [default: runs/JOB]")
@click.option("--show", is_flag=True, help="Start no runs. Write the report of the finished runs.")
@click.option("--part", callback=_part, metavar="N/COUNT",
              help="Run part N of COUNT parts of the comparison. --show reports on all parts together.")
@click.option("--jobs", default=0, metavar="N",
              help="Number of simulated runs at the same time. Real runs always run one after the other.  [default: cores]")
@click.option("--mpi", metavar="openmpi|mpich", help="MPI library whose mpiexec starts the ranks.  [default: the library of "
                                                     "this Python]")
@click.option("--launch", default="", metavar="COMMAND",
              help="Launcher to use instead of mpiexec, such as 'srun --mpi=pmix'. It must accept -n for the number of ranks.")
@click.option("--quiet", is_flag=True, help="Print only the verdict.")
def compare(words: tuple[str, ...], program: Path | None, simulate: tuple[int, ...] | None, testbed: str | None,
            out: str | None, show: bool, part: tuple[int, int], jobs: int, quiet: bool, mpi: str | None, launch: str,
            **of_program: Any) -> None:
    """Compare strategies on your job or program, and recommend one.

    Each strategy runs with each number of workers and each seed. The command prints a verdict. It writes report.html (one
    file with all pictures), report.md and report.json to --out. The reports contain accuracy, time to a target, bytes,
    staleness, and distance between ranks. The verdict uses validation rows, and the reported accuracy is that on test rows.
    Start this command without mpiexec, because it starts the ranks itself.
    """
    if promise(os.environ).size > 1:
        raise UsageError(f"ranks: got {promise(os.environ).size}, expected 1. Start mpiddl compare without mpiexec or srun, "
                         "because this command starts the ranks itself")  # fmt: skip
    options = {"mpi": mpi, "launch": launch}
    if out == "":
        raise UsageError("out: got an empty name, expected a folder (is a shell variable unset?)")
    if program is not None:
        if simulate is not None or part != (1, 1) or jobs:
            raise UsageError("program: got --simulate, --part or --jobs, expected real ranks and the whole comparison")
        if testbed and launch:
            raise UsageError("got --testbed and --launch, expected only one of these options")
        compare_program(program, words, _real_place(testbed, options), out, show, quiet, **of_program)
        return
    if given := [name.replace("strategies", "strategy") for name, value in of_program.items() if value]:
        raise UsageError(f"{given[0]}: got this option without --program; for a job file it stands under [compare]")
    if len(words) != 1:
        raise UsageError(f"JOB.toml: got {' '.join(words) or 'nothing'}, expected one job file, or --program")
    _compare_job(Path(words[0]), simulate, testbed, out, show, part, jobs, quiet, options)


def _compare_job(job_file: Path, simulate: tuple[int, ...] | None, testbed: str | None, out: str | None, show: bool,
                 part: tuple[int, int], jobs: int, quiet: bool, options: dict[str, Any]) -> None:
    from mpiddl.compare.backends import check_shared
    from mpiddl.compare.grid import read_grid
    from mpiddl.compare.numbers import counted
    from mpiddl.compare.preflight import check
    from mpiddl.compare.store import Store
    from mpiddl.compare.study import Study
    from mpiddl.compare.writing import remember, spoken, write_report
    from mpiddl.training.request import search_path

    grid = read_grid(job_file, simulate or ())
    place = _place(simulate, testbed, jobs, options)
    folder = Path(out) if out else Path("runs", job_file.stem)
    if testbed:
        check_shared(folder)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    facts = check(grid, place, search_path(os.environ))
    store = Store(folder, part, say)
    if show and not list(folder.glob("cells*.jsonl")):
        raise UsageError(f"out: got {folder}, which contains no runs to show. Run the command without --show first")
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
        say(f"{counted(len(store), 'run')} kept in {folder}. The same command continues; --show reports on the finished runs")
        raise
    finally:
        store.close()
    if not (whole or show):
        say(f"part {part[0]} of {part[1]} is done. When all parts are done: {again} --show")
        return
    advice, written = write_report(study, again)
    click.echo(spoken(study, advice, quiet), nl=False)
    if failed := study.failed():
        say(f"{counted(failed, 'run')} failed. Their output is in {folder / 'failed'}. The same command tries them again")
    say(f"report: {written}")
    if failed or not any(each.choice for each in advice):
        sys.exit(1)


def _place(simulate: tuple[int, ...] | None, testbed: str | None, jobs: int, options: dict[str, Any]) -> Place:
    from mpiddl.compare.backends import Simulated

    asked = {"--simulate": simulate is not None, "--testbed": testbed, "--launch": options["launch"]}
    given = [name for name, came in asked.items() if came]
    if len(given) > 1:
        raise UsageError(f"got {' and '.join(given)}, expected only one of these options")
    if jobs < 0 or (jobs > 1 and simulate is None):
        wanted = "1, because runs on real ranks are timed" if jobs > 0 else "1 or more, or 0 for one per core"
        raise UsageError(f"jobs: got {jobs}, expected {wanted}")
    if simulate is not None:
        return Simulated(jobs, os.environ)
    return _real_place(testbed, options)


def _real_place(testbed: str | None, options: dict[str, Any]) -> Here | OnTestbed:
    from mpiddl.compare.backends import Here, OnTestbed

    if testbed is not None:
        return OnTestbed(testbed, options["mpi"], os.environ)
    return Here(options["launch"], options["mpi"], os.environ)


def _command(job_file: Path, folder: Path, simulate: tuple[int, ...] | None, options: dict[str, str | None]) -> str:
    """The command that makes the report again."""
    words = ["mpiddl", "compare", str(job_file), "--out", str(folder)]
    if simulate is not None:
        words += ["--simulate", *([",".join(map(str, simulate))] if simulate else [])]
    return shlex.join([*words, *(word for name, value in options.items() if value for word in (f"--{name}", value))])
