"""What a check of `mpiddl.doctor.checks` found, in one value, and what a person sees of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpiddl.machine import terminal

SEVERITY = (False, None, True)
# What has to be one and the same on every rank.
SAME = ("versions", "MPI library")


@dataclass(frozen=True)
class Finding:
    """What one check found.

    ``ok`` is True, False (something will not work) or None (worth a look, or it could not be checked);
    ``value`` says what came, ``remedy`` what to do about it.
    """

    name: str
    ok: bool | None
    value: str
    remedy: str = ""


def worst(findings: Sequence[Finding]) -> Finding:
    """One finding for all ranks, from the finding of each rank."""
    chosen = min(findings, key=lambda finding: SEVERITY.index(finding.ok))
    ranks: dict[str, list[int]] = {}
    for rank, finding in enumerate(findings):
        ranks.setdefault(finding.value, []).append(rank)
    if len(ranks) == 1:
        return chosen
    if chosen.name in SAME:
        value = "; ".join(f"{value} ({spell(those)})" for value, those in ranks.items())
        return replace(chosen, ok=False, value=value, remedy="start every rank in the same environment")
    return replace(chosen, value=f"{chosen.value} ({spell(ranks[chosen.value])}; others differ)")


def spell(ranks: Sequence[int]) -> str:
    """Ascending ranks in words.

    Examples
    --------
    >>> spell([0, 1, 2, 5])
    'ranks 0-2,5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def show(findings: Sequence[Finding]) -> None:
    """Print the findings as a table on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {True: ("ok", "green"), None: ("note", "yellow"), False: ("FAIL", "bold red")}
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        table.add_row(Text(*marks[finding.ok]), finding.name, Text(finding.value + remedy))
    width = terminal.columns(sys.stdout.fileno()) if sys.stdout.isatty() else None
    Console(width=width or 110, color_system="auto" if width else None).print(table)
