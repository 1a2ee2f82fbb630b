"""``mpiddl bench sklearn-mlp``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mpiddl.cli.files import json_option


@click.command("sklearn-mlp")
@json_option
@click.option("--cases", default="batch-200", show_default=True, metavar="NAME,NAME,...", help="Fits to measure, or all.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of either side.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Fits of either side.")
def sklearn_mlp(path: Path | None, cases: str, threads: int, rounds: int) -> None:
    """Compare the seconds of a training step of MLPClassifier with scikit-learn's."""
    from mpiddl.bench import sklearn_mlp as module
    from mpiddl.study.output import check_files, show, write
    from mpiddl.training.request import search_path

    check_files(path)
    names = list(module.CASES) if cases == "all" else cases.split(",")
    rows = module.run(names, search_path(os.environ), threads, rounds, lambda text: click.echo(text, err=True))
    show("training steps", rows, ("least_ratio", "limit_seconds", "products", "accuracy", "baseline_accuracy"))
    if path:
        write(path, rows)
