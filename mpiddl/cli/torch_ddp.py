"""``mpiddl bench torch-ddp``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import read_counts, read_seconds


@click.command("torch-ddp", epilog="""
\b
Both backends run in one program and take turns. "exchange" is an all_reduce of one float32 array. "step" is a training step of
a network of four square layers with as many parameters, in DistributedDataParallel. "ms" is the median over samples, each the
time of the slowest rank. On several hosts gloo uses the first interface that is not the loopback interface, unless
GLOO_SOCKET_IFNAME is set. With --strategy, a "round" of 16 steps is measured as well: mpiddl.torch.distribute takes part with
each strategy.
\b
Examples:
  mpiexec -n 2 mpiddl bench torch-ddp
  mpiexec -n 2 mpiddl bench torch-ddp --elements 10000000 --batch 128 --json ddp.json
  mpiddl testbed run --hosts 4 --rate 1gbit -- mpiddl bench torch-ddp
  mpiddl testbed run --hosts 4 --rate 200mbit -- mpiddl bench torch-ddp --strategy gossip:graph=complete,period=2,bits=2
""")
@json_option
@click.option("--elements", default="100000,1000000,10000000", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Elements of the gradient.")
@click.option("--batch", default=32, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Rows of each rank in a step.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Threads of PyTorch on each rank.")
@click.option("--strategy", "strategies", multiple=True, metavar="NAME",
              help="Measure this strategy, too. May be repeated.")
@click.option("--seconds", default=4.0, show_default=True, callback=read_seconds, metavar="S", help="Time for each case.")
def torch_ddp(path: Path | None, elements: tuple[int, ...], batch: int, threads: int, strategies: tuple[str, ...],
              seconds: float) -> None:
    """Compare DistributedDataParallel over the backend "mpiddl" with gloo. Start this command with mpiexec."""
    from mpiddl.bench import torch_ddp as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, elements, batch, threads, seconds, strategies)
    if rows:
        show("DistributedDataParallel", rows, ("p10", "p90"))
    keep(os.environ, "torch-ddp", rows, path)
