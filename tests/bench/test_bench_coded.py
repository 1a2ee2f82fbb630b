"""``mpiddl bench coded``: bytes are those of the formulas, steps have the predictions of the laws, and nonsense is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from harness.tiers import more

from mpiddl.coding.step_times import published_seconds

pytestmark = pytest.mark.no_mpi


def rows_of(mpirun, tmp_path, ranks, *options):
    out = tmp_path / "rows.json"
    done = mpirun(ranks, "mpiddl", "bench", "coded", "--size", "8KiB", "--repeats", "2", "--json", out, *options)
    assert done.returncode == 0, done.stderr
    return {row["contender"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.more
@pytest.mark.plots
def test_bytes_of_every_scheme(mpirun, tmp_path):
    picture = tmp_path / "rows.png"
    plot = ["--plot", picture] if find_spec("matplotlib") else []
    rows = rows_of(mpirun, tmp_path, 3, "--redundancies", "1,2,3", "--published", "--rate", "1gbit", *plot)
    assert not plot or picture.stat().st_size > 1000
    assert set(rows) == {"ring", "mds by multicast, r=2"} | {f"{name}, r={r}" for r in (1, 2, 3) for name in
                                                           ("slices by multicast", "slices in rings", "published")}
    for row in rows.values():
        assert row["sent_once_bytes"] - row["late_bytes"] == row["formula_bytes"]
    assert rows["ring"]["formula_bytes"] == 4 * 8192
    assert rows["mds by multicast, r=2"]["formula_bytes"] == 3 * 4096


@pytest.mark.more
def test_steps_of_the_published_law(mpirun, tmp_path):
    rows = rows_of(mpirun, tmp_path, 3, "--redundancies", "1,2,3", "--law", "4")
    for r in (1, 2, 3):
        assert rows[f"published, r={r}"]["predicted"] == pytest.approx(published_seconds(3, r, 1.0, 4.0))
    assert rows["multicast, not coded"]["predicted"] == 3


@pytest.mark.more
@pytest.mark.parametrize(("slow", "predicted"), [
    (1, {"no redundancy": 13, "slices, r=2": 2 + 4, "mds, r=2": 2 + 6, "slices, r=4": 4}),
    (5, {"no redundancy": 13, "slices, r=2": 2 + 4, "mds, r=2, stragglers=1": 2 + 4 * 2, "slices, r=4": 4}),
])
def test_steps_of_sums(mpirun, tmp_path, slow, predicted):
    rows = rows_of(mpirun, tmp_path, 4, "--redundancies", "2,4", "--steps", "12", "--slow", str(slow))
    found = {name: row["predicted"] for name, row in rows.items()}
    assert found == pytest.approx(predicted)
    assert all(row["saved"] == pytest.approx(1 - row["seconds"] / rows["no redundancy"]["seconds"]) for row in rows.values())


@pytest.mark.parametrize(("options", "message"), [
    (["--redundancies", "3"], "redundancies: got 3 with 2 ranks, expected whole numbers from 1 to 2"),
    (["--law", "8", "--steps", "8"], "--law, --steps: got both, expected one of them"),
    more(["--law", "8", "--rate", "1gbit"], "--rate: got it with --law, expected it without"),
    more(["--steps", "8", "--published"], "--published: got it with --steps, expected it without"),
    more(["--slow", "5"], "--slow: got 5 without --steps, expected it with --steps"),
    more(["--rate", "fast"], "rate: got 'fast'"),
])
def test_nonsense(mpirun, options, message):
    done = mpirun(2, "mpiddl", "bench", "coded", *options)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
