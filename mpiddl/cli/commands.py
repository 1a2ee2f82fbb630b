"""The commands and their options. What they call is imported when they are called, so that ``--version`` is quick."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpiddl.cli import collectives, compare, decomposition, delayed, gossip, overlap, server, staleness, testbed, tuning
from mpiddl.errors import UsageError
from mpiddl.job import ALIASES, FIELDS, make_job, read_job_file, without_aliases
from mpiddl.version import __version__

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="mpiddl", message="%(prog)s %(version)s")
def mpiddl() -> None:
    """Distributed learning as MPI programs: train, evaluate and predict on any number of ranks.

    \b
    mpiddl train --data digits                    on one rank
    mpiexec -n 4 mpiddl train --data digits       the same on four
    mpiexec -n 4 mpiddl doctor                    is everything in place?
    """


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    """A flag for each setting of `mpiddl.job.Job`; flags that are not given are None, so that a job file can speak."""
    for field in reversed(list(FIELDS.values())):
        command = _option(field)(command)
    for alias, name in ALIASES.items():
        kind = type(FIELDS[name].default)
        command = click.option(f"--{alias.replace('_', '-')}", type=kind, hidden=True)(command)
    return command


def _option(field: dataclasses.Field[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    kind: Any = type(field.default)
    choices = field.metadata["choices"]
    if kind is bool:
        name, usual = field.name.replace("_", "-"), "yes" if field.default else "no"
        return click.option(f"--{name}/--no-{name}", default=None, help=f"{field.metadata['text']}.  [default: {usual}]")
    flag = "--" + field.name.replace("_", "-")
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    text = f"{field.metadata['text']}.  [default: {default}]"
    if kind is tuple:
        return click.option(flag, callback=_numbers, metavar="N,N,...", help=text)
    if field.metadata["user_code"]:
        choices = ()  # the text has them
    metavar = "|".join(choices) if choices else {int: "N", float: "X", str: "NAME"}[kind]
    return click.option(flag, type=kind, metavar=metavar, help=text)


_own_model = click.option("--model", metavar="MODULE:CLASS[:key=value,...]",
                          help="Model of your own, as it was named in training. Not needed for mpiddl's networks.")


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(",") if part)
    except ValueError:
        raise UsageError(f"{parameter.name}: got {value!r}, expected whole numbers separated by commas") from None


def _folder(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value == "":
        raise UsageError(f"{parameter.name}: got an empty name (an unset variable?), expected a folder")
    return None if value is None else Path(value)


@mpiddl.command(epilog="""
\b
Examples:
  mpiexec -n 4 mpiddl train --data digits --out runs/digits
  MPIDDL_DATA=~/data mpiexec -n 4 mpiddl train --data fashion-mnist --hidden 256,128 --out runs/fashion
  mpiexec -n 4 mpiddl train --out runs/fashion --resume --epochs 20
  mpiexec -n 8 mpiddl train --data digits --reproducible --out runs/exact     the bits of 1, 2, 4 or 16 ranks
  mpiexec -n 8 mpiddl train --strategy ddc-asgd                               each rank at its own pace
  mpiexec -n 4 mpiddl train --model nets:Wide:width=64 --data digits          class Wide of nets.py, in this folder
  mpiexec -n 8 mpiddl train --strategy asgd:servers=2,communication=two-sided          two ranks serve the others
  srun mpiddl train job.toml --max-seconds 3000 --resume
""")
@click.argument("job_file", required=False, type=click.Path(path_type=Path), metavar="[JOB.toml]")
@click.option("--out", callback=_folder, metavar="DIR", help="Folder for settings, metrics, checkpoints, plots and summary.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out; start there if there is none.")
@click.option("--overwrite", is_flag=True, help="Replace the run that is in --out.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the settings and the dealing of shards, and stop.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@_job_options
def train(job_file: Path | None, out: Path | None, resume: bool, overwrite: bool, dry_run: bool, quiet: bool,
          **flags: Any) -> None:
    """Train a network on all ranks.

    Settings come from the flags below and from JOB.toml, whose keys are the flags' names with underscores; flags win.
    The batch is the global one: the same samples make a step on 1 rank and on 100.
    """
    from mpiddl import training

    settings = read_job_file(job_file) if job_file else {}
    make_job(settings)  # before flags win, so that nothing wrong in the file goes unseen
    settings |= without_aliases({name: value for name, value in flags.items() if value is not None})
    options: dict[str, Any] = {"out": out, "resume": resume, "overwrite": overwrite, "quiet": quiet}
    if dry_run:
        click.echo(training.describe(**options, **settings), nl=False)
    else:
        training.train(**options, **settings)


@mpiddl.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", help="Data set; by default the one it was trained on.", metavar="NAME")
@_own_model
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def evaluate(run: Path, data: str | None, model: str | None, as_json: bool) -> None:
    """Measure a trained model on test rows.

    RUN is a run's folder, of which the newest checkpoint is taken, or a checkpoint's folder.
    """
    from mpiddl.inference import evaluate_run

    found = evaluate_run(run, data, model=model)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name:<14} {value:.4f}" if isinstance(value, float) else f"{name:<14} {value}")


@mpiddl.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("rows", metavar="ROWS")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The .npy file to write.")
@click.option("--raw", is_flag=True, help="Write the model's outputs; by default classes where there are classes.")
@_own_model
def predict(run: Path, rows: str, output: Path, raw: bool, model: str | None) -> None:
    """Apply a trained model to rows, each rank to its share.

    RUN is a run's or a checkpoint's folder. ROWS is a .npy file of shape (n, features), or a data set, whose test rows
    are taken. OUTPUT gets one entry a row, in order: the class number, the class name where labels were strings, or the
    outputs of a regression.
    """
    from mpiddl.inference import predict_run

    count = predict_run(run, rows, output, raw, model=model)
    click.echo(f"{count} rows -> {output}")


@mpiddl.command()
def doctor() -> None:
    """Check that everything is in place: MPI, launcher, ranks, threads, memory, disk.

    Run it as you run your job: alone, under mpiexec, under srun. Exits with 1 if something is wrong, and says what to do.
    """
    from mpiddl import doctor as module

    findings = module.run()
    module.show(findings)
    sys.exit(1 if any(finding.ok is False for finding in findings) else 0)


@mpiddl.group()
def bench() -> None:
    """Measure mpiddl against the alternatives, interleaved in one run."""


collectives.add_to(bench)
bench.add_command(overlap.overlap)
bench.add_command(delayed.delayed)
bench.add_command(gossip.gossip)
bench.add_command(server.server)
bench.add_command(staleness.staleness)
mpiddl.add_command(testbed.testbed)
mpiddl.add_command(compare.compare)
decomposition.add_to(mpiddl)
decomposition.add_bench_to(bench)
tuning.add_to(mpiddl, bench)


@bench.command()
@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
@click.option("--threads", default=1, show_default=True, help="Threads for every contender.")
@click.option("--seconds", default=8.0, show_default=True, help="Time for each case.")
def step(path: Path | None, threads: int, seconds: float) -> None:
    """Training steps per second against PyTorch and plain numpy on the same network, batch and threads."""
    from mpiddl.bench import step as module
    from mpiddl.bench.output import show, write

    rows = module.run(threads=threads, seconds=seconds)
    show("training steps", rows, ("p10", "p90", "gflops"))
    if path:
        write(path, rows)


@bench.command()
@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
@click.option("--data", default="digits", show_default=True, metavar="NAME", help="Data set.")
@click.option("--hidden", default="64", show_default=True, callback=_numbers, metavar="N,N,...", help="Widths.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(min=1), metavar="N", help="Samples a step.")
@click.option("--shards", default=16, show_default=True, type=click.IntRange(min=1), metavar="N", help="Virtual shards.")
@click.option("--strategy", default="allreduce", show_default=True, metavar="NAME", help="What to compare with.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Steps of training of which the checksum is told.")
@click.option("--seconds", default=8.0, show_default=True, type=click.FloatRange(min=0), help="Time for measuring.")
def reproducible(path: Path | None, **options: Any) -> None:
    """What --reproducible costs: a training's steps with it and without, in turn, and the checksum of its weights.

    The checksum is the same on 1, 2, 4, ... ranks, one a shard at most, and with either MPI library.
    """
    from mpiddl.bench import reproducible as module
    from mpiddl.bench.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, **options)
    if rows:
        show("training steps", rows, ("p10", "p90"))
        click.echo(f"sha256 of the weights after {rows[-1]['steps']} steps: {rows[-1]['sha256']}")
    keep(os.environ, "reproducible", rows, path)


@bench.command()
@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
@click.option("--data", default="digits", show_default=True, metavar="NAME", help="Data set.")
@click.option("--hidden", default="64", show_default=True, callback=_numbers, metavar="N,N,...", help="Widths.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=1), metavar="N", help="Training steps.")
def agreement(path: Path | None, data: str, hidden: tuple[int, ...], steps: int) -> None:
    """How far the weights are apart that 1, 2, 4, ... ranks reach; start it under mpiexec."""
    from mpiddl.bench import agreement as module
    from mpiddl.bench.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, data, hidden, steps, ("float32", "float64"))
    if rows:
        show("agreement", rows, ("distance", "same_bits"))
    keep(os.environ, "agreement", rows, path)
