"""The columns of the tables of figures: head, meaning, and the text of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpiddl.compare.grid import Grid
from mpiddl.compare.numbers import NONE, percent, told
from mpiddl.study.intervals import Mean

Row = Mapping[str, Any]
"""Of `mpiddl.compare.statistics.rows`."""

RUNS = ("runs with a result, of all that were planned. A run without a result failed, diverged or was not run. The means of "
        "its strategy are over the other runs")  # fmt: skip
VALIDATION = "share of the validation rows that the finished model gets right. It decides the choice"
TEST = "share of the test rows that the finished model gets right"
AGAINST = "test accuracy minus that of the baseline, over runs with the same seed"
TARGET = ("seconds of training until this share of the validation rows was right. Times are known to the interval between two "
          "validations. \"Not reached\": with no seed. \"2 of 3\": with two of three seeds")  # fmt: skip
TRAINING = ("duration of the training on the rank (the process of a worker) that took longest, without the time for validation "
            "and test rows")  # fmt: skip
SENT = ("payload of all messages of the strategy, each counted once. For a collective operation of the MPI library, which "
        "cannot be observed, it is the least that such an operation can send. 0 where ranks share memory")  # fmt: skip
COMPUTING = "share of the ranks' time spent on computation. The rest is messages and waiting"
EGRESS = "data that the network links of all hosts sent from the first to the last step, headers included (kernel counters)"
PAYLOAD = "egress without the headers of packets. It holds what the MPI library adds to messages; compare it with MB sent"
STALENESS = ("how late gradients are: the number of updates by other workers between reading the parameters and applying the "
             "gradient computed from them. Median; 95th percentile. \"-\": workers step together")  # fmt: skip
DISTANCE = ("how far the parameters of the ranks have moved apart, at the validations: distance from the common model, in % of "
            "that model's norm (root mean square). 0: all ranks hold the same parameters")  # fmt: skip


class Column(NamedTuple):
    """Of a table of figures: its head, what it means, and the text of a row."""

    head: str
    meaning: str
    text: Callable[[Row], str]


def results(grid: Grid, rows: Sequence[Row]) -> list[Column]:
    """The columns of the table of results."""
    partly = any(len(row["seeds"]) < len(grid.seeds) for row in rows)
    return [
        Column("runs", RUNS, lambda row: _runs(row) if partly else NONE),
        Column("validation accuracy, %", VALIDATION, lambda row: _mean(row["validation"])),
        Column("test accuracy, %", TEST, lambda row: _mean(row["accuracy"])),
        Column(f"against {grid.baseline}, points", AGAINST, lambda row: _mean(row["difference"], "+")),
        *([Column(f"time to {percent(grid.target)}, s", TARGET, _until_target)] if grid.target else []),
        Column("training, s", TRAINING, lambda row: _mean(row["seconds"])),
        Column("MB sent", SENT, lambda row: _mean(row["sent_mb"])),
    ]


MEANWHILE = (
    Column("computing, %", COMPUTING, lambda row: _mean(row["computing"])),
    Column("egress, MB", EGRESS, lambda row: _mean(row["egress_mb"])),
    Column("payload, MB", PAYLOAD, lambda row: _mean(row["payload_mb"])),
    Column("ingress, MB", "the same, received", lambda row: _mean(row["ingress_mb"])),
    Column("staleness", STALENESS, lambda row: _staleness(row["staleness"])),
    Column("distance, %", DISTANCE, lambda row: _mean(row["distance"])),
)
"""The columns of what happened during training."""


def filled(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    """Those in which some row has a figure."""
    return [column for column in columns if any(column.text(row) != NONE for row in rows)]


def _runs(row: Row) -> str:
    """How many runs have a result, and what became of the others."""
    lost = {what: len(row[what]) for what in ("diverged", "failed", "missing")}
    parts = [f"{number} {what.replace('missing', 'not run')}" for what, number in lost.items() if number]
    return f"{len(row['seeds'])} of {len(row['seeds']) + sum(lost.values())}" + (f" ({', '.join(parts)})" if parts else "")


def _until_target(row: Row) -> str:
    of, reached = len(row["seeds"]), row["reached"]
    if not of:
        return NONE
    if not reached:
        return "not reached"
    return _mean(row["seconds_to_target"]) + ("" if reached == of else f" ({reached} of {of})")


def _mean(value: Mapping[str, Any] | None, sign: str = "") -> str:
    return told(Mean(**value) if value else None, sign)


def _staleness(late: Mapping[str, Any] | None) -> str:
    return f"{late['median']}; {late['of_95']}" if late else NONE
