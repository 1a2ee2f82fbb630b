"""The commands and their options. What they call is imported when they are called, so that ``--version`` is quick."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpiddl.cli import (
    coded,
    collectives,
    compare,
    decomposition,
    delayed,
    nonblocking,
    overlap,
    program,
    remote_memory,
    server,
    sklearn_mlp,
    start,
    testbed,
    torch_ddp,
    tuning,
)
from mpiddl.cli.files import json_option
from mpiddl.cli.flags import in_flags
from mpiddl.cli.grouped import GroupedCommand, GroupedOption
from mpiddl.cli.launching import show_launch_lines
from mpiddl.errors import UsageError
from mpiddl.training.job import ALIASES, FIELDS, OUTPUT, make_job, read_job_file, without_aliases
from mpiddl.version import __version__

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="mpiddl", message="%(prog)s %(version)s")
def mpiddl() -> None:
    """Train neural networks and compute PCA and SVD on many MPI ranks.

    \b
    Check this machine:   mpiddl doctor
    Train on one rank:    mpiddl train --data digits
    Train on four ranks:  mpiexec -n 4 mpiddl train --data digits
    """


_run_option = functools.partial(click.option, cls=GroupedOption, group=OUTPUT)


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    """A flag for each setting of `mpiddl.training.job.Job`; flags that are not given are None, so that a job file can speak."""
    for field in reversed(list(FIELDS.values())):
        command = _option(field)(command)
    for alias, name in ALIASES.items():
        kind = type(FIELDS[name].default)
        command = click.option(f"--{alias.replace('_', '-')}", type=kind, hidden=True)(command)
    return command


def _option(field: dataclasses.Field[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    kind: Any = type(field.default)
    text, group, choices, form = (field.metadata[key] for key in ("text", "group", "choices", "form"))
    known: dict[str, Any] = {"cls": GroupedOption, "group": group}
    if kind is bool:
        name, usual = field.name.replace("_", "-"), "yes" if field.default else "no"
        return click.option(f"--{name}/--no-{name}", default=None, help=f"{_sentence(text)}  [default: {usual}]", **known)
    flag = "--" + field.name.replace("_", "-")
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    text = _sentence(text) + (f"  [default: {default}]" if default != "" else "")
    if kind is tuple:
        return click.option(flag, callback=_numbers, metavar="N,N,...", help=text, **known)
    if field.metadata["user_code"]:
        choices = ()  # the text lists them
    metavar = form or ("|".join(choices) if choices else {int: "N", float: "X", str: "NAME"}[kind])
    return click.option(flag, type=kind, metavar=metavar, help=text, **known)


def _sentence(text: str) -> str:
    """``text`` with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


_own_model = click.option("--model", metavar="MODULE:CLASS[:key=value,...]",
                          help="Your own model class, named as in training. The networks of mpiddl do not need this option.")


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(",") if part)
    except ValueError:
        raise UsageError(f"{parameter.name}: got {value!r}, expected whole numbers separated by commas") from None


def _settings(job_file: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Of a job: the file's, and the flags, which override them."""
    settings = read_job_file(job_file) if job_file else {}
    make_job(settings)  # before flags win, so that nothing wrong in the file goes unseen
    return settings | without_aliases({name: value for name, value in flags.items() if value is not None})


def _folder(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value == "":
        raise UsageError(f"{parameter.name}: got an empty name, expected a folder (is a shell variable unset?)")
    return None if value is None else Path(value)


@mpiddl.command(cls=GroupedCommand, epilog="""
\b
Examples:
  mpiexec -n 4 mpiddl train --data digits --out runs/digits                    train on 4 ranks, keep the results
  mpiexec -n 4 mpiddl train --out runs/digits --resume --epochs 20             continue that run up to epoch 20
  MPIDDL_DATA=~/data mpiexec -n 4 mpiddl train --data fashion-mnist --hidden 256,128
  mpiexec -n 8 mpiddl train --data digits --reproducible                       the same weights as on 1, 2, 4 or 16 ranks
  mpiexec -n 4 mpiddl train --model nets:Wide:width=64                         class Wide of nets.py in this folder
  mpiexec -n 8 mpiddl train --strategy ddc-asgd                                ranks do not wait for each other
  mpiexec -n 8 mpiddl train --strategy asgd:servers=2,communication=two-sided  2 of the 8 ranks are parameter servers
  srun mpiddl train job.toml --out runs/x --max-seconds 3000 --resume          a Slurm job that can be submitted again
""")
@click.argument("job_file", required=False, type=click.Path(path_type=Path), metavar="[JOB.toml]")
@_job_options
@_run_option("--out", callback=_folder, metavar="DIR", help="Folder for settings, metrics, checkpoints, plots and summary.")
@_run_option("--resume", is_flag=True, help="Continue from the newest checkpoint in --out, or start a new run if there is no "
                                            "checkpoint.")
@_run_option("--resume-step", type=click.IntRange(min=0), metavar="N",
             help="Continue from the checkpoint of step N instead of the newest checkpoint.")
@_run_option("--overwrite", is_flag=True, help="Replace the run in --out.")
@_run_option("--dry-run", is_flag=True, help="Check the settings, print the settings and the shards of each rank, and do not "
                                             "train.")
@_run_option("--quiet", is_flag=True, help="Print only errors.")
def train(job_file: Path | None, out: Path | None, resume: bool, resume_step: int | None, overwrite: bool, dry_run: bool,
          quiet: bool, **flags: Any) -> None:
    """Train a network on all ranks.

    Settings are flags, or keys in JOB.toml. A key has the name of the flag, with underscores instead of hyphens. Flags
    override JOB.toml. --batch is the number of samples on all ranks together, so a step uses the same samples on 1 rank and
    on 100 ranks.
    """
    from mpiddl.training import run as training
    from mpiddl.training.request import Request

    request = Request(out=out, resume=resume, overwrite=overwrite, quiet=quiet, settings=_settings(job_file, flags),
                      resume_step=resume_step, spell=in_flags)
    if dry_run:
        click.echo(training.describe(request), nl=False)
    else:
        training.run(request)


@mpiddl.command("plan-memory", cls=GroupedCommand, epilog="""
\b
"made" is the line that computes a gradient, found by a trace of one mini-batch. "copies" are those that the model makes in
each step. "saved" are copies that are spared, compared with messages through buffers, which copy each array twice.

\b
Examples:
  mpiddl plan-memory --data digits                                  two virtual ranks
  mpiexec -n 4 mpiddl plan-memory --data digits --strategy ring:transport=verbs
  mpiexec -n 4 mpiddl plan-memory --model nets:Wide --data digits   your own model
""")
@click.argument("job_file", required=False, type=click.Path(path_type=Path), metavar="[JOB.toml]")
@_job_options
def plan_memory(job_file: Path | None, **flags: Any) -> None:
    """Show which arrays of a model cross between ranks in training, and how often they are copied.

    The settings are those of mpiddl train. Nothing is trained, and nothing is written.
    """
    from mpiddl.training import run as training
    from mpiddl.training.request import Request

    click.echo(training.plan_memory(Request(quiet=True, settings=_settings(job_file, flags), spell=in_flags)), nl=False)


@mpiddl.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", help="Data set.  [default: the data set used in training]", metavar="NAME")
@_own_model
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def evaluate(run: Path, data: str | None, model: str | None, as_json: bool) -> None:
    """Measure the loss and the accuracy of a trained model on test rows.

    RUN is a run folder or the folder of one checkpoint. In a run folder, the newest checkpoint is used.
    """
    from mpiddl.training.inference import evaluate_run

    found = evaluate_run(run, data, model=model)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        if value is None:  # a regression has no accuracy
            continue
        click.echo(f"{name:<14} {value:.4f}" if isinstance(value, float) else f"{name:<14} {value}")


@mpiddl.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("rows", metavar="ROWS")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The .npy file to write.")
@click.option("--raw", is_flag=True, help="Write the raw outputs of the model instead of classes.")
@_own_model
def predict(run: Path, rows: str, output: Path, raw: bool, model: str | None) -> None:
    """Apply a trained model to rows. Each rank computes its share of the rows.

    RUN is a run folder or the folder of one checkpoint. ROWS is a .npy file of shape (n, features), or the name of a data
    set with test rows. The output has one entry for each row, in the same order. An entry is the class number, the class
    name if the labels were strings, or the prediction of a regression.
    """
    from mpiddl.training.inference import predict_run

    count = predict_run(run, rows, output, raw, model=model)
    click.echo(f"{count} rows -> {output}")


@mpiddl.command()
def doctor() -> None:
    """Check MPI, launcher, ranks, threads, memory and disk. Print a remedy for each problem.

    Start this command in the same way as your job: directly, with mpiexec, or with srun. The exit code is 1 if a check fails.
    """
    from mpiddl.doctor import checks as module

    findings = module.run()
    module.show(findings)
    sys.exit(1 if any(finding.ok is False for finding in findings) else 0)


@mpiddl.group()
def bench() -> None:
    """Measure mpiddl against its alternatives."""


collectives.add_to(bench)
bench.add_command(nonblocking.iallreduce)
bench.add_command(overlap.overlap)
bench.add_command(coded.coded)
bench.add_command(delayed.delayed)
bench.add_command(remote_memory.remote_memory)
bench.add_command(server.server)
bench.add_command(sklearn_mlp.sklearn_mlp)
bench.add_command(start.start)
bench.add_command(torch_ddp.torch_ddp)
mpiddl.add_command(testbed.testbed)
mpiddl.add_command(compare.compare)
decomposition.add_to(mpiddl)
decomposition.add_bench_to(bench)
tuning.add_to(mpiddl, bench)


@bench.command()
@json_option
@click.option("--threads", default=1, show_default=True, help="Threads of every contender.")
@click.option("--seconds", default=8.0, show_default=True, help="Time for each case.")
def step(path: Path | None, threads: int, seconds: float) -> None:
    """Compare the training steps per second of mpiddl, PyTorch and plain numpy."""
    from mpiddl.bench import step as module
    from mpiddl.study.output import show, write

    rows = module.run(threads=threads, seconds=seconds)
    show("training steps", rows, ("p10", "p90", "gflops"))
    if path:
        write(path, rows)


@bench.command()
@json_option
@click.option("--data", default="digits", show_default=True, metavar="NAME", help="Data set.")
@click.option("--hidden", default="64", show_default=True, callback=_numbers, metavar="N,N,...",
              help="Sizes of the hidden layers.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(min=1), metavar="N", help="Samples in a step.")
@click.option("--shards", default=16, show_default=True, type=click.IntRange(min=1), metavar="N", help="Virtual shards.")
@click.option("--strategy", default="allreduce", show_default=True, metavar="NAME", help="Strategy to compare with.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Training steps before the checksum.")
@click.option("--seconds", default=8.0, show_default=True, type=click.FloatRange(min=0), help="Time for the measurement.")
def reproducible(path: Path | None, **options: Any) -> None:
    """Compare training speed with and without --reproducible, and print the checksum of the weights.

    The checksum is the same with Open MPI and MPICH, and on 1, 2, 4, ... ranks up to the number of shards.
    """
    from mpiddl.bench import reproducible as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, **options)
    if rows:
        show("training steps", rows, ("p10", "p90"))
        click.echo(f"sha256 of the weights after {rows[-1]['steps']} steps: {rows[-1]['sha256']}")
    keep(os.environ, "reproducible", rows, path)


@bench.command()
@json_option
@click.option("--data", default="digits", show_default=True, metavar="NAME", help="Data set.")
@click.option("--hidden", default="64", show_default=True, callback=_numbers, metavar="N,N,...",
              help="Sizes of the hidden layers.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=1), metavar="N", help="Training steps.")
def agreement(path: Path | None, data: str, hidden: tuple[int, ...], steps: int) -> None:
    """Measure the distance between the weights after training on 1, 2, 4, ... ranks. Start this command with mpiexec."""
    from mpiddl.bench import agreement as module
    from mpiddl.study.output import check_files, keep, show

    check_files(path)
    rows = module.run(os.environ, data, hidden, steps, ("float32", "float64"))
    if rows:
        show("agreement", rows, ("distance", "same_bits"))
    keep(os.environ, "agreement", rows, path)


mpiddl.add_command(program.run)
show_launch_lines(mpiddl)
