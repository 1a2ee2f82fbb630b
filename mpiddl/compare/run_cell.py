"""One run of a comparison: ``python -m mpiddl.compare.run_cell SETTINGS.json OUTCOME.json``, alone or under a launcher.

OUTCOME is written at the end and in one piece: if it exists, it is complete. With ``--with-parent``, a run of one process ends
when its standard input ends, which happens when its parent is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WITH_PARENT = "--with-parent"
ORPHANED = 75


def main(arguments: Sequence[str]) -> None:
    settings, path, *more = arguments
    if WITH_PARENT in more:
        threading.Thread(target=_until_input_ends, daemon=True).start()
    from mpiddl.errors import UsageError
    from mpiddl.training.run import train

    result = train(quiet=True, **json.loads(Path(settings).read_text(encoding="utf-8")))
    if result.summary["test_accuracy"] is None:
        raise UsageError("model: got a model without accuracy, which compare reports, expected one whose gradient returns a "
                         "Score with `correct`")
    if result.rank == 0:
        aside = Path(path).with_suffix(".part")
        aside.write_text(json.dumps(outcome(result.summary, result.history)), encoding="utf-8")
        aside.replace(path)


def outcome(summary: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept of a run, as plain values.

    Parameters
    ----------
    summary, history
        Of a `mpiddl.training.run.Result`.

    Returns
    -------
    dict
        ``accuracy`` on the test rows; ``seconds`` of training, without validation, on the rank that took longest; ``bytes`` of
        payload, each message counted once; ``hosts``, what each host's link sent and received, where that is counted;
        ``staleness`` where gradients are late; ``curve``, a point for each validation, the last one of the finished model.
    """
    ranks = summary["per_rank"]
    return {
        "accuracy": summary["test_accuracy"],
        "loss": summary["test_loss"],
        "seconds": max(rank["compute"] + rank["communication"] + rank["waiting"] for rank in ranks),
        "phases": {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ("compute", "communication", "waiting")},
        "bytes": sum(rank["bytes"] for rank in ranks),
        "messages": sum(rank["messages"] for rank in ranks),
        "hosts": summary.get("hosts", []),
        "staleness": summary.get("staleness"),
        "curve": [_point(line, summary["train_rows"]) for line in history if "validation_loss" in line],
        "steps": summary["steps"],
        "epochs": summary["epochs"],
        "samples": round(summary["epochs"] * summary["train_rows"]),
        "ended": summary["ended"],
        "ranks": summary["ranks"],
        "parameters": summary["parameters"],
        "strategy": summary["strategy"],
        "mpi": summary["mpi"],
        "mpiddl": summary["mpiddl"],
    }


def _point(line: Mapping[str, Any], train_rows: int) -> dict[str, Any]:
    return {
        "samples": round(line["epoch"] * train_rows),
        "seconds": round(line["elapsed"] - line["aside"], 4),
        "bytes": line["bytes"],
        "accuracy": line["validation_accuracy"],
        "distance": line["distance"],
    }


def _until_input_ends() -> None:
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)


if __name__ == "__main__":
    main(sys.argv[1:])
