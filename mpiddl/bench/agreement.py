"""Do P ranks take the steps of one? The same job on 1, 2, 4, ... ranks, and how far the weights are apart.

A row's ``distance`` is ||w - w'|| / ||w'|| of all parameters against one rank's; ``same_bits`` says whether a rerun gave the
same weights bit for bit. Seconds are of the training loop, without start-up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiddl.training.run import train
from mpiddl.transport.mpi import MpiComm, world


def run(env: Any, data: str, hidden: tuple[int, ...], steps: int, dtypes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train on the first 1, 2, 4, ... ranks of the world and on all; rows as every bench gives them, on rank 0.

    Communication
    -------------
    Collective over ``COMM_WORLD``: the training runs, one after the other.
    """
    with world(env) as link:
        return _rows(link, data, hidden, steps, dtypes)


def _rows(link: MpiComm, data: str, hidden: tuple[int, ...], steps: int, dtypes: tuple[str, ...]) -> list[dict[str, Any]]:
    world = link.raw
    sizes = sorted({1 << n for n in range(world.size.bit_length())} & set(range(world.size + 1)) | {world.size})
    job = {"hidden": hidden, "max_steps": steps, "epochs": 1_000_000, "schedule": "constant", "quiet": True}
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        runs = {size: _on(link, size, data, {**job, "dtype": dtype}) for size in sizes}
        rows += [_row(data, dtype, steps, size, runs) for size in sizes if world.rank == 0]
    return rows


def _on(link: MpiComm, size: int, data: str, job: dict[str, Any]) -> tuple[np.ndarray, bool, float]:
    """Weights after the job on the first ``size`` ranks, whether a rerun repeats them, and its seconds; on rank 0."""
    part = link.raw.Split(link.rank < size, link.rank)
    found = (np.empty(0), False, 0.0)
    if link.rank < size:
        first, again = (train("mlp", data, comm=part, **job) for _ in range(2))
        weights, repeated = (np.concatenate([array.ravel() for array in r.params.values()]) for r in (first, again))
        found = weights, weights.tobytes() == repeated.tobytes(), again.summary["seconds"]
    part.Free()
    link.patient_barrier()  # ranks that have nothing to do leave their cores to the others
    return found


def _row(data: str, dtype: str, steps: int, size: int, runs: dict[int, tuple[np.ndarray, bool, float]]) -> dict[str, Any]:
    (weights, same, seconds), (alone, _, alone_seconds) = runs[size], runs[1]
    return {
        "case": f"{data} {dtype} {steps} steps",
        "contender": f"{size} rank{'s' * (size > 1)}",
        "baseline": "1 rank",
        "seconds": seconds,
        "baseline_seconds": alone_seconds,
        "ratio": alone_seconds / seconds,
        "distance": float(np.linalg.norm(weights - alone) / np.linalg.norm(alone)),
        "same_bits": same,
    }
