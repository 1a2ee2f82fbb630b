"""Comparisons that train nothing, for the tests of ``mpiddl compare``."""

from __future__ import annotations

import json
from pathlib import Path

from mpiddl.compare.backends import Simulated
from mpiddl.compare.grid import Cell, make_grid
from mpiddl.compare.preflight import Facts
from mpiddl.compare.processes import Ended
from mpiddl.compare.store import Store
from mpiddl.compare.study import Study

TRAIN = {"epochs": 2, "hidden": [8], "optimiser": "nesterov"}
FACTS = Facts(1000, {"rows": 1100, "test_rows": 100, "features": 64, "checksum": 7})
HOSTS = [{"sent": 2_000_000, "received": 2_000_000}] * 2


def grid_of(*strategies, **asked):
    return make_grid(TRAIN, {"strategies": list(strategies), "workers": 2, "seeds": 3, **asked})


def outcome(validation=0.9, test=None, seconds=10.0, sent=4_000_000, **more):
    """A run as `mpiddl.compare.run_cell` keeps it: two validations, of which the last is of the finished model."""
    curve = [{"samples": 1000 * k, "seconds": seconds * k / 2, "bytes": sent * k // 2, "distance": 0.1,
              "accuracy": validation - 0.05 * (2 - k)} for k in (1, 2)]  # fmt: skip
    return {"accuracy": validation if test is None else test, "loss": 0.3, "seconds": seconds, "bytes": sent, "samples": 2000,
            "epochs": 2.0, "curve": curve, "wall": 1.0, "hosts": HOSTS, "staleness": None, "strategy": "Ring()", "ranks": 2,
            "phases": {"compute": seconds, "communication": 0.0, "waiting": 0.0}, "parameters": 100, "mpi": "none", **more}


def found_of(grid, *told):
    """The outcome of each cell. Each argument after ``grid`` lists the outcomes of one strategy, one per seed; None: no run."""
    return {Cell(contender, 2, seed): made for contender, several in zip(grid.contenders, told, strict=True)
            for seed, made in zip(grid.seeds, several, strict=True) if made}


class Told(Simulated):
    """Trains nothing: runs end as ``act`` says, or with an outcome."""

    def __init__(self, act=lambda cell: None):
        super().__init__(1, {})
        self.done, self._act = [], act

    def run(self, cell, files, mark, limit_s):
        self.done.append(cell)
        ended = self._act(cell)
        if not isinstance(ended, Ended):
            Path(files[1]).write_text(json.dumps(ended or outcome(0.9 + 0.01 * cell.seed)))
        return ended if isinstance(ended, Ended) else Ended(0, "")


def compared(folder, grid, place=None, say=lambda text: None):
    """The study of ``grid`` after what was missing in ``folder/out`` has run."""
    store = Store(folder / "out", (1, 1), lambda text: None)
    store.take()
    try:
        made = Study(grid, place or Told(), store, FACTS, say)
        made.begin()
        made.run()
    finally:
        store.close()
    return made
