"""``mpiddl compare --program``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpiddl.cli.signals import end_on_signals
from mpiddl.errors import UsageError

if TYPE_CHECKING:
    from mpiddl.compare.backends import Here, OnTestbed

DAY_S = 24 * 3600.0


def compare_program(program: Path, args: tuple[str, ...], place: Here | OnTestbed, out: str | None, show: bool, quiet: bool, *,
                    metric: str | None, lower: bool, strategies: tuple[str, ...], workers: tuple[int, ...], seeds: int | None,
                    margin: float | None, limit: float | None) -> None:
    """Run ``program`` with each strategy, number of workers and seed, and report."""
    from mpiddl.compare.backends import OnTestbed, check_shared
    from mpiddl.compare.program_report import write
    from mpiddl.compare.program_runs import ProgramRuns, ProgramStudy, contenders, whole
    from mpiddl.compare.store import Store

    if not metric:
        raise UsageError("metric: got none, expected a regular expression for the result in the output of the program, such as "
                         "'accuracy: (.*)%'")
    runs = ProgramRuns(program, args, metric, lower, contenders(strategies or ("auto",)), workers or (2,),
                       tuple(range(1, (seeds or 3) + 1)), limit or DAY_S)
    runs.check()
    folder = Path(out) if out else Path("runs", f"compare-{program.stem}")
    if isinstance(place, OnTestbed):
        check_shared(folder)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    store = Store(folder, (1, 1), say, whole)
    if show and not list(folder.glob("cells*.jsonl")):
        raise UsageError(f"out: got {folder}, which contains no runs to show. Run the command without --show first")
    study = ProgramStudy(runs, place, store, say)
    if not show:
        store.take()
    end_on_signals()
    try:
        store.open()
        if not show:
            study.run()
    except (KeyboardInterrupt, SystemExit):
        say(f"{len(store)} runs kept in {folder}. The same command continues; --show reports on the finished runs")
        raise
    finally:
        store.close()
    verdicts, spoken, written = write(study, margin or 0.0, shlex.join(["mpiddl", *sys.argv[1:]]))
    click.echo("\n".join(sentence for each in verdicts for sentence in each.sentences) if quiet else spoken)
    failed = sum(len(entry.failed) for workers in runs.workers for entry in study.entries(workers))
    if failed:
        say(f"{failed} runs failed. Their output is in {folder / 'failed'}. The same command tries them again")
    say(f"report: {written}")
    if failed or any(each.choice is None for each in verdicts):
        sys.exit(1)
