"""Writes the report of a comparison: report.html, report.md with its pictures, report.json, and compare.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiddl.compare import html as page
from mpiddl.compare import markdown, plots
from mpiddl.compare.advice import Advice, advise
from mpiddl.compare.columns import results
from mpiddl.compare.document import figures_table, report
from mpiddl.compare.grid import Cell, Grid, as_plain
from mpiddl.compare.numbers import aligned, counted
from mpiddl.compare.statistics import rows
from mpiddl.compare.study import Study
from mpiddl.study.output import environment


def remember(study: Study) -> None:
    """Keep what is compared, so that another job in the same folder is noticed."""
    plain = {**as_plain(study.asked), "place": study.place.about, "data": study.facts.data, "versions": study.versions}
    study.store.write("compare.json", json.dumps(plain, indent=1) + "\n")


def write_report(study: Study, command: str) -> tuple[list[Advice], Path]:
    """Write the report of the finished runs; returns the advice and the path of the page.

    Raises
    ------
    OutputError
        A file cannot be written.
    """
    grid, store, found = study.grid, study.store, study.found()
    simulated = study.place.about["place"] == "simulated"
    figures = rows(grid, found)
    advice = [advise(grid, found, workers, simulated) for workers in grid.workers]
    drawn = {workers: list(plots.pictures(grid, found, workers)) for workers in grid.workers} if plots.available() else None
    blocks = report(grid, figures, advice, drawn, study.place.words(), _about(study, found), command)
    for picture in (picture for several in (drawn or {}).values() for picture in several):
        store.write(picture.name, picture.png)
    told = {"comparison": as_plain(grid), "place": study.place.about, "environment": environment(), "rows": figures,
            "advice": [each._asdict() for each in advice],
            "runs": [{**outcome, "strategy": cell.contender.label, "workers": cell.workers, "seed": cell.seed,
                      "in_full": outcome.get("strategy")} for cell, outcome in found.items()]}  # fmt: skip
    store.write("report.json", json.dumps(told, indent=1) + "\n")
    store.write("report.md", markdown.render(blocks))
    return advice, store.write("report.html", page.render(blocks))


def spoken(study: Study, advice: Sequence[Advice], quiet: bool) -> str:
    """The advice for a terminal: the verdict, and unless ``quiet`` the results and the warnings."""
    figures = rows(study.grid, study.found())
    parts = ["\n".join(_spoken(study.grid, figures, each, quiet)) for each in advice]
    return "\n\n".join(parts) + "\n"


def _spoken(grid: Grid, figures: Sequence[Mapping[str, Any]], advice: Advice, quiet: bool) -> list[str]:
    first = [f"{counted(advice.workers, 'worker')}:"] if len(grid.workers) > 1 else []
    if quiet:
        return [*first, *advice.verdict]
    there = [row for row in figures if row["workers"] == advice.workers]
    table = figures_table(there, advice.choice, results(grid, there))
    lines = aligned([table.heads, *table.rows], [not column for column in range(len(table.heads))])
    return [*first, *advice.verdict, "", *("  ".join(cells).rstrip() for cells in lines), "",
            *(f"Note: {text}" for text in advice.warnings)]  # fmt: skip


def _about(study: Study, found: Mapping[Cell, Mapping[str, Any]]) -> dict[str, str]:
    """Facts for the report: place, data, machine and versions."""
    facts = environment()
    libraries = sorted({outcome["mpi"] for outcome in found.values() if outcome.get("mpi")})
    data = study.facts.data
    sizes = sorted({f"{outcome['parameters']:,}" for outcome in found.values() if outcome.get("parameters")})
    return {
        "place": study.place.words(),
        "rows": f"{data['rows']} for training and validation, {data['test_rows']} for the test",
        "parameters": ", ".join(sizes) or "-",
        "MPI": ", ".join(libraries) or "-",
        "machine": f"{facts['processor']}, {facts['cores']} cores",
        "versions": ", ".join(f"{name} {facts[name]}" for name in ("mpiddl", "python", "numpy", "numba") if name in facts),
    }
