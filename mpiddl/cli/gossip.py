"""``mpiddl bench gossip``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from mpiddl.cli.sizes import read_counts, read_shares

STRATEGIES = (
    "gossip@0.2",
    "gossip-adaptive:graph=complete,period=5,traffic=0.067,outer=0.5@0.15",
    "gossip:graph=complete,period=15,outer=0.5@0.15",
    "gossip-scheduled:graph=complete,share=0.067,outer=0.5@0.15",
    "gossip-adaptive:trigger=norm,threshold=slope,theta=12,tensors=1,graph=ring@0.1",
)

EPILOG = """
\b
It says first which part of a step of the first strategy is communication on these links, and at which rate of theirs it would
be 80 %. Then each strategy trains, turn by turn, until the mean of the ranks' models has reached the highest target on the
validation rows, or its epochs are over. Seconds are the slowest rank's, without validation. The second strategy is wanted to
take 52 % less time than the first.

\b
"counted" are the bytes that the strategies say they have sent, "link" those of the kernel's counters of the hosts' links,
"payload" the same without headers, 66 bytes a packet: wanted within 2 % of what is counted. Ranks that share a host are not
compared with links.

\b
Examples:
  mpiddl testbed run --hosts 8 --ranks-per-host 1 --rate 400mbit -- mpiddl bench gossip --turns 0        which --rate to take
  mpiddl testbed run --hosts 8 --ranks-per-host 1 --rate 400mbit -- mpiddl bench gossip --results runs.jsonl
  mpiexec -n 4 mpiddl bench gossip --data digits --hidden 32 --batch 64 --targets 0.9 --strategy gossip@0.1 \\
      --strategy gossip-adaptive:theta=0.1@0.1
"""


@click.command(epilog=EPILOG)
@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw accuracy over seconds.")
@click.option("--results", type=click.Path(path_type=Path), metavar="FILE",
              help="Finished runs; made, or added to: what is in it is not run again.")
@click.option("--strategy", "strategies", multiple=True, default=STRATEGIES, show_default=True, metavar="NAME@RATE",
              help="What trains, at which rate; may be given several times. Others are compared with the first.")
@click.option("--targets", default="0.84,0.86,0.88", show_default=True, callback=read_shares, metavar="X,...",
              help="Accuracies on the validation rows, 0 to 1.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(min=0), metavar="N",
              help="Runs of each strategy, each with another seed. 0: only say what part of a step is communication.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="N", help="Of the first turn.")
@click.option("--every", default=20, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Steps from one validation to the next.")
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="S",
              help="How long steps are measured before all.")
@click.option("--data", default="fashion-mnist", show_default=True, metavar="NAME", help="Data set.")
@click.option("--model", default="mlp", show_default=True, type=click.Choice(["mlp", "softmax"]), help="Network.")
@click.option("--hidden", default="256,128", show_default=True, callback=read_counts, metavar="N,...",
              help="Widths of an mlp.")
@click.option("--batch", default=2048, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Samples a step, over all ranks.")
@click.option("--epochs", default=20, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Which the learning rate's cosine spans; no run is longer.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="BLAS and numba threads a rank.")
def gossip(path: Path | None, plot: Path | None, results: Path | None, **options: Any) -> None:
    """Time and bytes to an accuracy with gossip that exchanges every step or seldom. Start it under mpiexec."""
    from mpiddl.bench import gossip as module
    from mpiddl.bench import gossip_rows
    from mpiddl.bench.output import check_files, keep
    from mpiddl.disk import check_writable

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
