"""``mpiddl bench staleness``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_counts
from mpiddl.errors import UsageError
from mpiddl.machine.launch import promise

EPILOG = """
\b
First the learning rate of each rule is chosen on validation rows. Differences are between runs with the same seed, with 95 %
confidence intervals. The aims: from 8 workers on the first rule is better than all others, and at 8, 16 and 32 workers it
is within 0.3, 0.8 and 2 points of sequential SGD with momentum. "?" means that the interval does not decide it.

\b
A study takes hours. Finished runs are kept in --results. A study that is started again continues from there, and another study
uses the runs that both have in common.

\b
Examples:
  mpiddl bench staleness --plot staleness.png                                   456 runs
  mpiddl bench staleness --rules ddc-asgd,asgd --workers 8 --patterns equal --seeds 2
  mpiddl bench staleness --rules ddc-asgd,ddc-asgd:damping=0,ddc-asgd:growth=0
  mpiddl bench staleness --data cifar10 --results cifar10.jsonl
  mpiddl bench staleness --show                                                 the results so far
"""


def _list(kind: Callable[[str], Any], wanted: str) -> Callable[..., Any]:
    """The callback of an option that takes several values."""

    def read(context: click.Context, parameter: click.Parameter, value: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in value.split(",") if part)
        except ValueError:
            raise UsageError(f"{parameter.name}: got {value!r}, expected {wanted} separated by commas") from None

    return read


def _rules(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Rules are separated by commas, as the parameters of a rule are: these have a sign of equality and no colon."""
    rules: list[str] = []
    for part in filter(None, value.split(",")):
        if rules and "=" in part and ":" not in part:
            rules[-1] += f",{part}"
        else:
            rules.append(part)
    return tuple(rules)


_rates, _words = _list(float, "numbers"), _list(str, "words")


@click.command(epilog=EPILOG)
@click.option("--rules", default="ddc-asgd,dc-asgd-momentum,dc-asgd-a,staleness-aware,dana,asgd", show_default=True,
              callback=_rules, metavar="RULE,...",
              help="Parameter-server strategies (see docs/strategies.md). The first strategy is compared with the others.")
@click.option("--workers", default="4,8,16,32", show_default=True, callback=read_counts, metavar="N,...",
              help="Numbers of workers.")
@click.option("--patterns", default="equal,spread,straggler", show_default=True, callback=_words, metavar="NAME,...",
              help="Speeds of the workers. equal: all the same. spread: 1 to 4 times as slow. straggler: one worker is 8 times "
                   "as slow.")
@click.option("--seeds", default=5, show_default=True, metavar="N", help="Runs of each case.")
@click.option("--epochs", default=6, show_default=True, metavar="N",
              help="Number of passes over the training rows, by all workers together.")
@click.option("--grid", default="0.01,0.0141,0.02,0.0283,0.04,0.0566,0.08,0.113,0.16,0.226,0.32,0.453,0.64", show_default=True,
              callback=_rates, metavar="X,...",
              help="Step sizes to try. With momentum mu, the learning rate is the step size times (1 - mu).")
@click.option("--tune-workers", default=8, show_default=True, metavar="N",
              help="Number of workers in the runs that choose the learning rates.")
@click.option("--data", default="fashion-mnist", show_default=True, metavar="NAME", help="Data set.")
@click.option("--hidden", default="256,128", show_default=True, callback=read_counts, metavar="N,...",
              help="Sizes of the hidden layers.")
@click.option("--batch", default=32, show_default=True, metavar="N", help="Samples in a step of one worker.")
@click.option("--jobs", default=0, metavar="N", help="Number of processes, with one thread each.  [default: cores]")
@click.option("--results", default="staleness.jsonl", show_default=True, type=click.Path(path_type=Path), metavar="FILE",
              help="File for finished runs. New runs are added to an existing file.")
@click.option("--show", "only", is_flag=True, help="Start no runs. Show the results of the finished runs.")
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
              help="Also plot accuracy against the number of workers.")
def staleness(data: str, jobs: int, results: Path, only: bool, path: Path | None, plot: Path | None, **options: Any) -> None:
    """Compare the accuracy of update rules with stale gradients, in simulated time. Start this command without mpiexec."""
    from mpiddl.bench import staleness as module
    from mpiddl.bench import staleness_rows
    from mpiddl.bench.staleness_runs import OUTCOME, Runner
    from mpiddl.machine.disk import check_writable
    from mpiddl.machine.threads import cores
    from mpiddl.study.journal import Journal
    from mpiddl.study.output import check_files, write
    from mpiddl.training.request import search_path

    if promise(os.environ).size > 1:
        raise UsageError(f"ranks: got {promise(os.environ).size}, expected 1, because workers are "
                         "simulated. Set the number of processes with --jobs")
    if jobs < 0:
        raise UsageError(f"jobs: got {jobs}, expected 1 or more, or 0 for one process per core")
    check_files(path, plot)
    check_writable("results", results)
    study = module.Study(**options)

    def say(text: str) -> None:
        click.echo(text, err=True)

    journal, runner = Journal(results, say, OUTCOME), Runner(data, search_path(os.environ))
    try:
        rows = (module.rows(study, runner, journal) if only else
                module.run(study, runner, journal, jobs or len(cores().ids), say))
    except KeyboardInterrupt:
        say(f"{len(journal)} runs are in {results}. The same command continues from there")
        raise
    if not rows:
        say(f"{results}: there are no two runs yet that can be compared")
        return
    staleness_rows.show(rows)
    if path:
        write(path, rows)
    if plot:
        staleness_rows.draw(plot, data, rows)
