"""What ``mpiddl pca`` and ``mpiddl svd`` do: a file's rows are dealt to the ranks and decomposed; results go into a folder.

    OUT/
        components.npy    (k, d), the file's columns; orthonormal rows; NaN in columns that were left out
        mean.npy          (d,), likewise
        scores.npy        (n, k), in the order of the file's rows, each rank writes its own
        summary.json      variances, errors, what it cost, and how it went
        scree.png         variance of each component, and their sum
        scores.png        the first two scores of (some) rows
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.data.matrix import Matrix, is_sparse, open_matrix
from mpiddl.data.npy import open_npy
from mpiddl.decomposition.plots import draw
from mpiddl.decomposition.principal_components import PrincipalComponents
from mpiddl.decomposition.rows.files import FileRows
from mpiddl.decomposition.singular_vectors import SingularVectors
from mpiddl.decomposition.solve import made
from mpiddl.decomposition.solvers.base import Moment
from mpiddl.errors import ConvergenceError, DataError, MpiddlError, UsageError
from mpiddl.layout import block
from mpiddl.machine import rank_count
from mpiddl.machine.disk import writing
from mpiddl.machine.footprint import Peak
from mpiddl.node.cores import node
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import AnyComm, Comm
from mpiddl.transport.mpi import connected

CONTENTS = ("components.npy", "mean.npy", "scores.npy", "summary.json", "scree.png", "scores.png")
CHUNK_BYTES = 1 << 26
"""Of rows whose scores are made at a time, and from which on a mapped file is read by chunks."""

MEMORY = 1 << 29
"""Bytes of a rank's rows up to which they are read once, if they are not mapped."""


def decompose_file(file: str | os.PathLike[str], out: Path, kind: str = "pca", overwrite: bool = False,
                   tell: Callable[[int, Moment], None] | None = None, comm: AnyComm | None = None, mask: str | None = None,
                   column_weights: str | None = None, memory: int = MEMORY, **settings: Any) -> dict[str, Any]:
    """Decompose a file's rows and write what comes of it.

    Parameters
    ----------
    file : str or Path
        As `mpiddl.data.matrix.open_matrix` takes it.
    out : Path
        Folder for the results; made if it is not there.
    kind : {"pca", "svd"}
    overwrite : bool
        Replace results that are there.
    tell : callable, optional
        Called on every rank, with its number, after each pass.
    mask : str, optional
        Columns to leave out, such as land: "auto", those that are missing (NaN, or what the file calls so) in the first
        row; or an ``.npy`` file of a row's shape, zero for those.
    column_weights : str, optional
        An ``.npy`` file of a row's shape: how much each column counts, such as areas; 0 leaves it out. Columns are
        multiplied by the roots: components are those of the weighted columns.
    memory : int
        Bytes of a rank's rows up to which they are kept; more are read anew in every pass, unless the file's format forbids.
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
            matrix = _columns(open_matrix(file), mask, column_weights)
            if link.rank == 0:
                _prepare(out, overwrite)
        with agreed(link):
            part = block(matrix.n, link.size, link.rank)
            solver = made(settings.get("solver", "auto"))
            rows = _own(matrix, part, memory if solver is None or solver.files else sys.maxsize)
        model = (PrincipalComponents if kind == "pca" else SingularVectors)(comm=link, **settings)
        failure: ConvergenceError | None = None
        with Peak() as peak:
            try:
                model._fit(rows, tell=partial(tell, link.rank) if tell else None, place=partial(_place, matrix, part))
            except ConvergenceError as error:
                failure = error
            except MpiddlError:
                raise
            except ValueError as error:  # of one rank alone, that numbers are not finite
                raise DataError(f"{matrix.name}: {error}") from None
        summary = _summary(model, matrix, link, failure, peak.bytes)
        _write(link, model, matrix, part, rows, out, summary)
        if failure is not None:
            raise failure
    return summary


def _place(matrix: Matrix, part: range, row: int, column: int) -> str:
    """What an entry of a rank's rows is called in the file."""
    whole = column if matrix.kept is None else int(np.flatnonzero(matrix.kept)[column])
    return f"row {part.start + row}, column {whole} of the file"


def _prepare(out: Path, overwrite: bool) -> None:
    there = [name for name in CONTENTS if (out / name).exists()]
    if there and not overwrite:
        raise UsageError(f"out: the folder {out} already holds {', '.join(there)}; name an empty folder, or use "
                         "`overwrite=True`")
    with writing(out, UsageError):
        out.mkdir(parents=True, exist_ok=True)


def _columns(matrix: Matrix, mask: str | None, column_weights: str | None) -> Matrix:
    """The matrix with the columns that are wanted."""
    if not matrix.n:
        raise DataError(f"{matrix.name}: got 0 rows, expected one or more")
    kept = np.ones(matrix.d, bool)
    if mask == "auto":
        kept = ~matrix.missing()
    elif mask is not None:
        given = _of_columns(matrix, mask, "mask")
        kept = (given != 0) & ~np.isnan(given)
    elif (gaps := matrix.missing()).any():
        raise DataError(f"{matrix.name}: {gaps.sum()} of {len(gaps)} columns are NaN or infinite in the first row, "
                        f"beginning with column {gaps.argmax()}; `mask='auto'` leaves these columns out")
    factors = None
    if column_weights is not None:
        weights = _of_columns(matrix, column_weights, "column_weights").astype(np.float64)
        if not (np.isfinite(weights[kept]).all() and (weights[kept] >= 0).all()):
            raise DataError(f"column_weights: {column_weights} holds NaN, infinity or negative numbers, expected finite "
                            "numbers of 0 or more")
        kept &= weights > 0
        factors = np.sqrt(weights, where=kept, out=np.zeros(len(weights)))
    if not kept.any():
        raise DataError(f"{matrix.name}: the mask or the weights leave out all {len(kept)} columns, expected at least one "
                        "to remain")
    return matrix if kept.all() and factors is None else matrix.select(kept, factors)


def _of_columns(matrix: Matrix, file: str, name: str) -> np.ndarray:
    """A number for each column of the matrix."""
    if not file.endswith(".npy"):
        wanted = "auto, or an .npy file with the shape of a row" if name == "mask" else "an .npy file with the shape of a row"
        raise UsageError(f"{name}: got {file!r}, expected {wanted}")
    array = open_npy(Path(file))
    if tuple(array.shape) not in (matrix.shape, (matrix.d,)) or array.dtype.kind not in "buif":
        raise DataError(f"{name}: {file} holds {array.dtype} of shape {tuple(array.shape)}, expected numbers "
                        f"of shape {matrix.shape}, the shape of a row")
    return array.read([range(array.shape[0])])[0].reshape(-1)


def _own(matrix: Matrix, part: range, memory: int) -> Any:
    """A rank's rows: as they are, or to be read in every pass."""
    size = len(part) * matrix.d * matrix.dtype.itemsize
    if not matrix.parts or size <= (min(memory, CHUNK_BYTES) if matrix.mapped and memory < sys.maxsize else memory):
        return matrix.read(part)

    def read(begin: int, end: int) -> np.ndarray:
        return matrix.read(range(part.start + begin, part.start + end))

    return FileRows(read, len(part), matrix.d, matrix.dtype)


def _summary(model: Any, matrix: Matrix, link: Comm, failure: Exception | None, peak: int) -> dict[str, Any]:
    names = ("explained_variance_", "explained_variance_ratio_", "singular_values_", "explained_variance_error_")
    found = {name.rstrip("_"): getattr(model, name).tolist() for name in names if hasattr(model, name)}
    sent, most = map(max, zip(*link.allgather((model.n_bytes_, peak)), strict=True))
    held_up = link.allgather(model.communication_seconds_)
    computing = [seconds - lost for seconds, lost in zip(link.allgather(model.seconds_), held_up, strict=True)]
    crowded = rank_count.shared_cores(link.allgather(node(link)))
    return {
        "file": matrix.name, "rows": matrix.n, "columns": matrix.d, "shape": list(matrix.shape),
        "dtype": str(matrix.dtype),
        "columns_left_out": 0 if matrix.kept is None else int((~matrix.kept).sum()),
        "ranks": link.size, "components": int(model.n_components_), "solver": model.solver_, "why": model.why_,
        "tol": model.tol,
        "converged": failure is None, "passes": model.n_passes_, "rounds": model.n_rounds_, "bytes_sent_by_a_rank": sent,
        "memory_of_a_rank": most,
        "seconds": model.seconds_,
        "per_rank": [{"compute": own, "communication": lost} for own, lost in zip(computing, held_up, strict=True)],
        "too_many_ranks": [text for text in (crowded, rank_count.small_job(computing, held_up)) if text],
        **found, "history": [moment._asdict() for moment in model.history_],
    }  # fmt: skip


def _write(link: Comm, model: Any, matrix: Matrix, part: range, rows: Any, out: Path, summary: dict[str, Any]) -> None:
    """All results, or none: they are made in a folder aside, and what was there before stays until they are."""
    aside = out / ".writing"
    try:
        with agreed(link):
            if link.rank == 0:
                with writing(out):
                    shutil.rmtree(aside, ignore_errors=True)
                    aside.mkdir()
                    np.save(aside / "components.npy", matrix.spread(model.components_))
                    if hasattr(model, "mean_"):
                        scale = 1 if matrix.factors is None else matrix.factors[matrix.kept].astype(matrix.dtype)
                        np.save(aside / "mean.npy", matrix.spread(model.mean_ / scale))
                    (aside / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
                    scores = aside / "scores.npy"
                    np.lib.format.open_memmap(scores, "w+", matrix.dtype, (matrix.n, summary["components"])).flush()
                    with open(scores, "r+b") as file:  # a mapped page that finds no room on the disk would end the process
                        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        with agreed(link), writing(out):
            _write_scores(model, part, rows, aside / "scores.npy")
        with agreed(link), writing(out):
            if link.rank == 0:
                draw(aside, summary)
                for name in CONTENTS:
                    if (aside / name).exists():
                        (aside / name).replace(out / name)
                    else:
                        (out / name).unlink(missing_ok=True)
    finally:
        if link.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _write_scores(model: Any, part: range, rows: Any, file: Path) -> None:
    if not part:
        return
    target = np.lib.format.open_memmap(file, "r+")
    begin = part.start
    for some in _chunks(rows):
        target[begin : begin + some.shape[0]] = model._scores(some)
        begin += some.shape[0]
    target.flush()


def _chunks(rows: Any) -> Iterator[Any]:
    """Some rows at a time, all in their order."""
    if isinstance(rows, FileRows):
        yield from (x for x, _ in rows.blocks(max(1, CHUNK_BYTES // (8 * rows.d))))
        return
    chunk = max(1, CHUNK_BYTES // (8 * rows.shape[1])) if not is_sparse(rows) else 65_536
    yield from (rows[begin : begin + chunk] for begin in range(0, rows.shape[0], chunk))
