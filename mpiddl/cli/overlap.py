"""``mpiddl bench overlap``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import parse_size, read_counts

EPILOG = """
\b
"ideal" is the shortest step that the dependency graph allows: each bucket of the gradient is exchanged after it is complete and
after the bucket before it. The last line shows the share of communication that was hidden, and the largest possible share.

\b
Examples:
  mpiexec -n 2 mpiddl bench overlap
  mpiddl testbed run --hosts 4 --ranks-per-host 1 --rate 1gbit -- mpiddl bench overlap --hidden 2048,2048 --batch-per-rank 1024
"""


@click.command(epilog=EPILOG)
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw the timeline of the ideal step.")
@click.option("--hidden", default="2048,2048", show_default=True, callback=read_counts, metavar="N,N,...",
              help="Sizes of the hidden layers.")
@click.option("--batch-per-rank", default=1024, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Rows of each rank in a step.")
@click.option("--bucket", default="", metavar="SIZE",
              help="Smallest size of a bucket, such as 2MiB.  [default: the same size as in training]")
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(0, 86_400), metavar="S",
              help="Time for the measurement.")
def overlap(path: Path | None, plot: Path | None, hidden: tuple[int, ...], batch_per_rank: int, bucket: str,
            seconds: float) -> None:
    """Measure the share of communication that the backward pass hides, and the largest possible share.

    Start this command with mpiexec.
    """
    from mpiddl.bench import overlap as module
    from mpiddl.strategies.synchronous.auto import BUCKET_BYTES
    from mpiddl.study.output import check_files, keep, show

    check_files(path, plot)
    found = module.run(os.environ, hidden, batch_per_rank, seconds, parse_size(bucket, "bucket") if bucket else BUCKET_BYTES)
    rows = found.get("rows", [])
    if rows:
        show("overlap", rows, ("p10", "p90", "sent_bytes"))
        print(module.sentence(found["overlap"]))
        if not found["thread"]:
            print("no progress thread: the MPI library does not allow calls from several threads")
    keep(os.environ, "overlap", rows, path, plot, lambda file, title, rows: module.draw(file, found))
