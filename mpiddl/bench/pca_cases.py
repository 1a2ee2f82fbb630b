"""The matrices of ``mpiddl bench pca``: made from a seed, with spectra that are known, and two of real images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.data import open_data
from mpiddl.errors import UsageError
from mpiddl.machine.disk import writing

BLOCK = 20_000
LARGE_BLOCK = 4096


@dataclass(frozen=True)
class Case:
    """A matrix, the components wanted, and whether its mean is subtracted; ``data``, the data set that it is made of."""

    name: str
    make: Callable[[Sequence[str]], Any]
    k: int = 10
    center: bool = True
    data: str = ""


def check_cases(names: Sequence[str], search: Sequence[str]) -> None:
    """Raise, before anything is made, a `UsageError` for a case that does not exist or has no data."""
    for name in names:
        if name not in CASES:
            raise UsageError(f"cases: got {name!r}, expected one or more of {', '.join(CASES)}")
        if CASES[name].data:
            open_data(CASES[name].data, search)


def gaussian(n: int, d: int, spectrum: np.ndarray, dtype: str, seed: int, exact: bool = False) -> np.ndarray:
    """Rows Z sqrt(spectrum) V^T with Z Gaussian and V a random rotation, columns centred.

    ``exact``: Z is made white first, so that the rows' own spectrum is the one asked for.
    """
    rng = np.random.default_rng(seed)
    turned = np.sqrt(spectrum)[:, None] * np.linalg.qr(rng.standard_normal((d, d)))[0].T
    x = np.empty((n, d), dtype)
    if exact:
        z = rng.standard_normal((n, d), np.float32)
        z -= z.mean(axis=0, dtype=np.float64).astype(np.float32)
        moments = np.zeros((d, d))
        for begin in range(0, n, BLOCK):
            part = z[begin : begin + BLOCK].astype(np.float64)
            moments += part.T @ part
        turned = np.linalg.solve(np.linalg.cholesky(moments / n), np.eye(d)).T @ turned
    for begin in range(0, n, BLOCK):
        rows = min(BLOCK, n - begin)
        x[begin : begin + rows] = (z[begin : begin + rows] if exact else rng.standard_normal((rows, d))) @ turned
    x -= x.mean(axis=0, dtype=np.float64).astype(dtype)
    return x


def write_large(path: Path, n: int = 1_000_000, d: int = 4096) -> Path:
    """A file of n x d numbers, 16 GB: spectrum (1 + i/10)^-1, turned by four reflections; not made again if it is there."""
    rng = np.random.default_rng(7)
    scale = np.sqrt((1 + np.arange(d) / 10) ** -1.0).astype(np.float32)
    mirrors = rng.standard_normal((4, d), np.float32)
    mirrors /= np.linalg.norm(mirrors, axis=1)[:, None]
    if not path.exists() or path.stat().st_size < n * d * 4:
        aside = path.with_name(f".writing-{path.name}")
        with writing(path.parent), open(aside, "wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (n, d)}
            np.lib.format.write_array_header_1_0(file, header)
            for begin in range(0, n, LARGE_BLOCK):
                rows = rng.standard_normal((min(LARGE_BLOCK, n - begin), d), np.float32) * scale
                for mirror in mirrors:
                    rows -= 2 * np.outer(rows @ mirror, mirror)
                file.write(rows.data)
            aside.replace(path)
    return path


def large(search: Sequence[str]) -> np.ndarray:
    """The large file, mapped, from the last place of ``search``."""
    if not search:
        raise UsageError("folder: got no folder, expected --folder DIR with 16 GB of free space for the large file")
    return np.load(write_large(Path(search[-1]) / "mpiddl-large.npy"), mmap_mode="r")


def wide() -> np.ndarray:
    """Case c: 200 directions above white noise in 20,000 columns."""
    rng, n, d, rank = np.random.default_rng(3), 20_000, 20_000, 200
    basis = np.linalg.qr(rng.standard_normal((d, rank)))[0]
    scaled = (np.sqrt((1 + np.arange(rank) / 4) ** -1.5)[:, None] * basis.T).astype(np.float32)
    x = np.empty((n, d), np.float32)
    for begin in range(0, n, 2000):
        rows = min(2000, n - begin)
        noise = rng.standard_normal((rows, d), np.float32) * np.float32(2e-4**0.5)
        x[begin : begin + rows] = rng.standard_normal((rows, rank), np.float32) @ scaled + noise
    x -= x.mean(axis=0, dtype=np.float64).astype(np.float32)
    return x


def words(n: int = 200_000, d: int = 50_000, topics: int = 40) -> Any:
    """Case sparse: word counts of documents, log1p x idf, rows of length one; CSR."""
    from scipy import sparse

    rng = np.random.default_rng(4)
    zipf = 1 / (np.arange(d) + 20.0)
    zipf /= zipf.sum()
    common = np.cumsum(zipf)
    share = (1 + np.arange(topics) / 4) ** -1.0
    topic, length = rng.choice(topics, n, p=share / share.sum()), np.maximum(5, rng.poisson(75, n))
    rows, columns = [], []
    for number in range(topics):
        own = np.zeros(d)
        own[rng.choice(d, 3000, replace=False, p=zipf)] = 1 / (np.arange(3000) + 5.0)
        special, documents = np.cumsum(own / own.sum()), np.flatnonzero(topic == number)
        total = int(length[documents].sum())
        drawn = rng.random(total)
        which = np.where(rng.random(total) < 0.5, np.searchsorted(common, drawn), np.searchsorted(special, drawn))
        rows.append(np.repeat(documents, length[documents]))
        columns.append(np.minimum(which, d - 1))
    place = np.concatenate(rows), np.concatenate(columns)
    x = sparse.coo_matrix((np.ones(len(place[0])), place), shape=(n, d)).tocsr()
    x.sum_duplicates()
    rarity = np.log(n / np.maximum(1, np.bincount(x.indices, minlength=d)))
    x.data = np.log1p(x.data) * rarity[x.indices]
    sizes = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).reshape(-1))
    return (sparse.diags(1 / sizes) @ x).tocsr()


def images(name: str, search: Sequence[str]) -> np.ndarray:
    """Training and test images of a data set, float32."""
    data = open_data(name, search)
    parts = [source.read([range(source.n)])[0][0] for source in (data.train, data.test) if source is not None]
    return np.concatenate([part.reshape(len(part), -1) for part in parts]).astype(np.float32)


def _power(d: int, scale: float, power: float) -> np.ndarray:
    return (1 + np.arange(d) / scale) ** power


def _gap(gap: float) -> np.ndarray:
    top = 0.97 ** np.arange(10)
    return np.concatenate([top, top[-1] * (1 - gap) * _power(502, 4, -1)])


def _cluster() -> np.ndarray:
    return np.concatenate([[1], np.linspace(0.99, 0.9, 20), 0.9 * _power(235, 2, -1)])


CASES = {
    case.name: case
    for case in (
        Case("a", lambda search: gaussian(60_000, 784, _power(784, 4, -1.8), "float32", 1)),
        Case("a64", lambda search: gaussian(60_000, 784, _power(784, 4, -1.8), "float64", 1)),
        Case("b", lambda search: gaussian(1_000_000, 256, _power(256, 3, -1.5), "float32", 2)),
        Case("c", lambda search: wide()),
        Case("e10", lambda search: gaussian(100_000, 512, _gap(1e-3), "float64", 5, exact=True)),
        Case("h", lambda search: gaussian(1_000_000, 256, _cluster(), "float32", 9, exact=True), k=1),
        Case("large", lambda search: large(search)),
        Case("sparse", lambda search: words(), k=20, center=False),
        Case("fashion-mnist", lambda search: images("fashion-mnist", search), data="fashion-mnist"),
        Case("cifar10", lambda search: images("cifar10", search), data="cifar10"),
    )
}
"""Shapes and spectra are those of docs/decomposition.md."""
