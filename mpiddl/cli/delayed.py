"""``mpiddl bench delayed``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_counts

EPILOG = """
\b
"bound" is the longer of computation alone and communication alone. "of bound" is the measured steps per second divided by
those of the bound. Seconds are the mean over --steps steps of a short training run, after its first steps.

\b
Examples:
  mpiexec -n 2 mpiddl bench delayed --batch-per-rank 256
  mpiddl testbed run --hosts 4 --ranks-per-host 1 --rate 200mbit -- mpiddl bench delayed --batch-per-rank 64,512,2048
"""


@click.command(epilog=EPILOG)
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also plot steps per second against the batch "
                                                                              "size.")
@click.option("--hidden", default="2048,2048", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Sizes of the hidden layers.")
@click.option("--batch-per-rank", default="64,256,1024,2048", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Numbers of rows of each rank in a step. Each number is measured in turn.")
@click.option("--strategy", "strategies", multiple=True, default=("delayed:delay=1", "delayed:delay=2"), show_default=True,
              metavar="NAME", help="Strategy to measure. Repeat the option for several strategies.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=1), metavar="N", help="Steps of each sample.")
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="S",
              help="Time for each batch.")
def delayed(path: Path | None, plot: Path | None, hidden: tuple[int, ...], batch_per_rank: tuple[int, ...],
            strategies: tuple[str, ...], steps: int, seconds: float) -> None:
    """Compare delayed synchronisation with the speed limit of computation or communication. Start this command with mpiexec."""
    from mpiddl.bench import delayed as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path, plot)
    rows = module.run(os.environ, hidden, batch_per_rank, strategies, steps, seconds)
    if rows:
        show(f"{rows[0]['network']}, {rows[0]['topology']}", rows, ("p10", "p90", "steps_per_second", "of_bound"))
        for sentence in module.sentences(rows):
            click.echo(sentence)
    keep(os.environ, "delayed synchronisation", rows, path, plot, module.draw)
