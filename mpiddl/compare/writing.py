"""The report of a comparison, written: report.html, report.md with its pictures, report.json, and compare.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddl.bench.output import environment
from mpiddl.compare import markdown, page, plots
from mpiddl.compare.advice import Advice, advise
from mpiddl.compare.document import report
from mpiddl.compare.figures import rows
from mpiddl.compare.grid import Cell, as_plain
from mpiddl.compare.study import Study


def remember(study: Study) -> None:
    """Keep what is compared, so that another job in the same folder can be told from it."""
    plain = {**as_plain(study.grid), "place": study.place.about, "data": study.facts.data, "versions": study.versions}
    study.store.write("compare.json", json.dumps(plain, indent=1) + "\n")


def write_report(study: Study, command: str) -> tuple[list[Advice], Path]:
    """Write what the runs that there are say; returns the advice and the page.

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


def spoken(advice: Advice, several: bool) -> str:
    """An advice as lines for a terminal."""
    first = f"{advice.workers} workers:\n" if several else ""
    return first + "".join(f"- {reason}\n" for reason in advice.reasons)


def _about(study: Study, found: Mapping[Cell, Mapping[str, Any]]) -> dict[str, str]:
    """Facts for the report: where, on what, with which versions."""
    facts = environment()
    libraries = sorted({outcome["mpi"] for outcome in found.values() if outcome.get("mpi")})
    data = study.facts.data
    sizes = sorted({f"{outcome['parameters']:,}" for outcome in found.values() if outcome.get("parameters")})
    return {
        "where": study.place.words(),
        "rows": f"{data['rows']} to train and validate, {data['test_rows']} to test",
        "parameters": ", ".join(sizes) or "-",
        "messages by": ", ".join(libraries) or "-",
        "machine": f"{facts['processor']}, {facts['cores']} cores",
        "versions": ", ".join(f"{name} {facts[name]}" for name in ("mpiddl", "python", "numpy", "numba") if name in facts),
    }
