"""What ``mpiddl pca`` and ``mpiddl svd`` do: a file's rows are dealt to the ranks and decomposed; results go into a folder.

    OUT/
        components.npy    (k, d), the file's columns; orthonormal rows
        mean.npy          (d,)
        scores.npy        (n, k), in the order of the file's rows, each rank writes its own
        summary.json      variances, errors, what it cost, and how it went
        scree.png         variance of each component, and their sum
        scores.png        the first two scores of (some) rows
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import issparse

from mpiddl.data.matrix import Matrix, open_matrix
from mpiddl.decomposition.estimator import fit_telling
from mpiddl.decomposition.pca import PCA
from mpiddl.decomposition.pictures import draw
from mpiddl.decomposition.solve import Moment
from mpiddl.decomposition.truncated_svd import TruncatedSVD
from mpiddl.disk import writing
from mpiddl.errors import ConvergenceError, UsageError
from mpiddl.layout import block
from mpiddl.transport.agree import agreed
from mpiddl.transport.mpi import connected

CONTENTS = ("components.npy", "mean.npy", "scores.npy", "summary.json", "scree.png", "scores.png")
CHUNK_BYTES = 1 << 26
"""Of rows whose scores are made at a time."""


def decompose_file(file: str, out: Path, kind: str = "pca", overwrite: bool = False,
                   tell: Callable[[int, Moment], None] | None = None, comm: Any = None, **settings: Any) -> dict[str, Any]:
    """Decompose a file's rows and write what comes of it.

    Parameters
    ----------
    file : str
        As `mpiddl.data.matrix.open_matrix` takes it.
    out : Path
        Folder for the results; made if it is not there.
    kind : {"pca", "svd"}
    overwrite : bool
        Replace results that are there.
    tell : callable, optional
        Called on every rank, with its number, after each pass.
    settings
        Of `PCA` or `TruncatedSVD`.

    Returns
    -------
    dict
        What summary.json holds, the same on every rank.

    Raises
    ------
    ConvergenceError
        On every rank; the results written are the best so far.

    Communication
    -------------
    Collective: what the solver costs; scores are made and written by each rank for itself.
    """
    with connected(comm, os.environ) as link:
        with agreed(link):
            matrix = open_matrix(file)
            if link.rank == 0:
                _prepare(out, overwrite)
        with agreed(link):
            part = block(matrix.n, link.size, link.rank)
            rows = matrix.read(part)
        model = (PCA if kind == "pca" else TruncatedSVD)(comm=link, **settings)
        failure: ConvergenceError | None = None
        try:
            fit_telling(model, rows, partial(tell, link.rank) if tell else None)
        except ConvergenceError as error:
            failure = error
        summary = _summary(model, matrix, link, failure)
        _write(link, model, matrix, part, rows, out, summary)
        if failure is not None:
            raise failure
    return summary


def _prepare(out: Path, overwrite: bool) -> None:
    there = [name for name in CONTENTS if (out / name).exists()]
    if there and not overwrite:
        raise UsageError(f"output: {out} holds {', '.join(there)}; wanted an empty folder, or --overwrite")
    with writing(out, UsageError):
        out.mkdir(parents=True, exist_ok=True)
        for name in there:
            (out / name).unlink()


def _summary(model: Any, matrix: Matrix, link: Any, failure: Exception | None) -> dict[str, Any]:
    names = ("explained_variance_", "explained_variance_ratio_", "singular_values_", "explained_variance_error_")
    found = {name.rstrip("_"): getattr(model, name).tolist() for name in names if hasattr(model, name)}
    sent = max(link.allgather(model.n_bytes_))
    return {
        "file": matrix.name, "rows": matrix.n, "columns": matrix.d, "shape": list(matrix.shape),
        "dtype": str(matrix.dtype),
        "ranks": link.size, "components": int(model.n_components_), "solver": model.solver_, "why": model.why_,
        "tol": model.tol,
        "converged": failure is None, "passes": model.n_passes_, "rounds": model.n_rounds_, "bytes_sent_by_a_rank": sent,
        "seconds": model.seconds_, **found, "history": [moment._asdict() for moment in model.history_],
    }  # fmt: skip


def _write(link: Any, model: Any, matrix: Matrix, part: range, rows: Any, out: Path,
           summary: dict[str, Any]) -> None:  # fmt: skip
    aside = out / ".writing-scores.npy"
    try:
        with agreed(link):
            if link.rank == 0:
                with writing(out):
                    np.save(out / "components.npy", model.components_)
                    if hasattr(model, "mean_"):
                        np.save(out / "mean.npy", model.mean_)
                    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
                    np.lib.format.open_memmap(aside, "w+", matrix.dtype, (matrix.n, summary["components"])).flush()
                    with open(aside, "r+b") as file:  # a mapped page that finds no room on the disk would end the process
                        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        with agreed(link), writing(out):
            _write_scores(model, part, rows, aside)
        with agreed(link), writing(out):
            if link.rank == 0:
                aside.replace(out / "scores.npy")
                draw(out, summary)
    finally:
        if link.rank == 0:
            aside.unlink(missing_ok=True)


def _write_scores(model: Any, part: range, rows: Any, aside: Path) -> None:
    if not part:
        return
    target = np.lib.format.open_memmap(aside, "r+")
    chunk = max(1, CHUNK_BYTES // (8 * rows.shape[1])) if not issparse(rows) else 65_536
    for begin in range(0, len(part), chunk):
        some = rows[begin : begin + chunk]
        target[part.start + begin : part.start + begin + some.shape[0]] = model.transform(some)
    target.flush()
