"""``mpiddl bench gossip``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_counts, read_shares
from mpiddl.registry import MODELS

STRATEGIES = (
    "gossip@0.2",
    "gossip-adaptive:graph=complete,period=5,traffic=0.067,outer=0.5@0.15",
    "gossip:graph=complete,period=15,outer=0.5@0.15",
    "gossip-scheduled:graph=complete,share=0.067,outer=0.5@0.15",
    "gossip-adaptive:trigger=norm,threshold=slope,theta=12,tensors=1,graph=ring@0.1",
)

EPILOG = """
\b
First the command prints how much of a step of the first strategy is communication on these links, and the link rate at which it
would be 80 %. Then the strategies train in turns. A run ends when the mean of the models of all ranks reaches the highest
target on the validation rows, or after --epochs. Seconds are those of the slowest rank, without validation. The aim is that the
second strategy takes 52 % less time than the first.

\b
"counted" are the bytes that the strategies count, "link" the bytes that the kernel counted on the links of the hosts, and
"payload" the link bytes without headers of 66 bytes for each packet. "payload" should be within 2 % of "counted". Links are not
compared where ranks share a host.

\b
Examples:
  mpiddl testbed run --hosts 8 --ranks-per-host 1 --rate 400mbit -- mpiddl bench gossip --turns 0        find the --rate
  mpiddl testbed run --hosts 8 --ranks-per-host 1 --rate 400mbit -- mpiddl bench gossip --results runs.jsonl
  mpiexec -n 4 mpiddl bench gossip --data digits --hidden 32 --batch 64 --targets 0.9 --strategy gossip@0.1 \\
      --strategy gossip-adaptive:theta=0.1@0.1
"""


@click.command(epilog=EPILOG)
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw accuracy against time.")
@click.option("--results", type=click.Path(path_type=Path), metavar="FILE",
              help="File for finished runs. New runs are added to an existing file, and finished runs are not repeated.")
@click.option("--strategy", "strategies", multiple=True, default=STRATEGIES, show_default=True, metavar="NAME@RATE",
              help="Strategy and learning rate. Repeat the option for several strategies. The first strategy is the baseline.")
@click.option("--targets", default="0.84,0.86,0.88", show_default=True, callback=read_shares, metavar="X,...",
              help="Target accuracies on the validation rows, between 0 and 1.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(min=0), metavar="N",
              help="Number of runs of each strategy, each with a different seed. With 0, only the share of communication is "
                   "measured.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="N", help="Seed of the first turn.")
@click.option("--every", default=20, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Steps from one validation to the next.")
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="S",
              help="Time for measuring steps at the start.")
@click.option("--data", default="fashion-mnist", show_default=True, metavar="NAME", help="Data set.")
@click.option("--model", default="mlp", show_default=True, type=click.Choice(list(MODELS)), help="Network.")
@click.option("--hidden", default="256,128", show_default=True, callback=read_counts, metavar="N,...",
              help="Sizes of the hidden layers of an mlp.")
@click.option("--batch", default=2048, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Number of samples in a step, on all ranks together.")
@click.option("--epochs", default=20, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Number of epochs of the cosine schedule. Each run ends after this number of epochs at the latest.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="BLAS and numba threads of each rank.")
def gossip(path: Path | None, plot: Path | None, results: Path | None, **options: Any) -> None:
    """Measure time and bytes that gossip strategies need to reach a target accuracy. Start this command with mpiexec."""
    from mpiddl.bench import gossip as module
    from mpiddl.bench import gossip_rows
    from mpiddl.machine.disk import check_writable
    from mpiddl.study.output import check_files, keep

    check_files(path, plot)
    if results is not None:
        check_writable("results", results)
    study = module.Study(**options)
    rows = module.run(os.environ, study, results, lambda text: click.echo(text, err=True))
    if rows:
        gossip_rows.show(rows)
        for sentence in gossip_rows.sentences(rows):
            click.echo(sentence)
    keep(os.environ, "gossip", rows, path, plot, gossip_rows.draw)
