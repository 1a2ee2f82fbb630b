"""``mpiddl bench overlap``: what it writes, and what it says to nonsense."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest


@pytest.mark.plots
@pytest.mark.more
def test_rows_and_the_share_of_the_overlap(mpirun, tmp_path):
    out, picture = tmp_path / "rows.json", tmp_path / "time.png"
    plot = ["--plot", picture] if find_spec("matplotlib") else []
    done = mpirun(2, "mpiddl", "bench", "overlap", "--hidden", "64", "--batch-per-rank", "16", "--seconds", "0.1",
                  "--bucket", "1KiB", "--json", out, *plot)
    assert done.returncode == 0, done.stderr
    assert "the dependency graph allows" in done.stdout
    found = json.loads(out.read_text())
    assert found["environment"]["cores"] >= 1 and (not plot or picture.stat().st_size > 1000)
    rows = {row["contender"]: row for row in found["rows"]}
    assert set(rows) == {"computing alone", "communication alone", "one after the other", "overlapped", "ideal"}
    assert rows["ideal"]["seconds"] >= rows["computing alone"]["seconds"] * 0.999
    assert all(row["p10"] <= row["seconds"] <= row["p90"] for row in rows.values())


@pytest.mark.parametrize(("flags", "said"), [
    (("--hidden", "wide"), "hidden: got 'wide', expected whole numbers"),
    (("--hidden", "0"), "hidden: got '0'"),
    (("--bucket", "lots"), "bucket: got 'lots'"),
    (("--plot", "/nowhere/at/all.png"), "plot: /nowhere/at/all.png"),
    ((), "got 1 rank, expected 2 or more"),
])
def test_nonsense_is_told(command, flags, said):
    done = command("mpiddl", "bench", "overlap", "--seconds", "0", *flags)
    assert done.returncode != 0 and done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr
