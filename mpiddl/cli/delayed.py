"""``mpiddl bench delayed``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.sizes import read_counts

EPILOG = """
\b
"bound" is the longer of computing alone and communication alone, "of bound" the share of its steps per second that was reached.
Seconds are the mean of --steps steps of a short training run, without its first ones, in which nothing is late yet.

\b
Examples:
  mpiexec -n 2 mpiddl bench delayed --batch-per-rank 256
  mpiddl testbed run --hosts 4 --ranks-per-host 1 --rate 200mbit -- mpiddl bench delayed --batch-per-rank 64,512,2048
"""


@click.command(epilog=EPILOG)
@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw steps per second over the batch.")
@click.option("--hidden", default="2048,2048", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Widths of the hidden layers.")
@click.option("--batch-per-rank", default="64,256,1024,2048", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Rows a rank, one case each.")
@click.option("--strategy", "strategies", multiple=True, default=("delayed:delay=1", "delayed:delay=2"), show_default=True,
              metavar="NAME", help="What is late; may be given several times.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=1), metavar="N", help="Steps of a sample.")
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="S",
              help="Time for each batch.")
def delayed(path: Path | None, plot: Path | None, hidden: tuple[int, ...], batch_per_rank: tuple[int, ...],
            strategies: tuple[str, ...], steps: int, seconds: float) -> None:
    """Steps per second when sums come late, against the longer of computing and communicating. Start it under mpiexec."""
    from mpiddl.bench import delayed as module
    from mpiddl.bench.output import check_files, keep, show

    check_files(path, plot)
    rows = module.run(os.environ, hidden, batch_per_rank, strategies, steps, seconds)
    if rows:
        show(f"{rows[0]['network']}, {rows[0]['topology']}", rows, ("p10", "p90", "steps_per_second", "of_bound"))
        for sentence in module.sentences(rows):
            click.echo(sentence)
    keep(os.environ, "delayed synchronisation", rows, path, plot, module.draw)
