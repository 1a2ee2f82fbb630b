"""``mpiddl bench allreduce`` and its kin: what they write, and what they say to nonsense."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest
from harness.tiers import only

from mpiddl.bench.rivals import rivals
from mpiddl.study.interleaved import LEAST, Contender, take_turns
from mpiddl.transport.start import load_mpi

pytestmark = pytest.mark.no_mpi  # the measured programs have tests of their own with both libraries
WANTED = {"case", "contender", "baseline", "seconds", "baseline_seconds", "ratio", "size_bytes", "p10", "p90", "sent_bytes"}
OURS = {
    "allreduce": {"two-step, in place", "two-step", "ring", "doubling"},
    "bcast": {"chain", "scatter", "binomial"},
    "allgather": {"ring"},
    "reduce-scatter": {"ring"},
}


@pytest.mark.plots
@pytest.mark.parametrize("name", only({"allreduce"}, OURS))
def test_rows_of_every_contender(mpirun, tmp_path, name):
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    plot = ["--plot", picture] if find_spec("matplotlib") else []
    done = mpirun(2, "mpiddl", "bench", name, "--sizes", "4KiB,20B", "--seconds", "0.02", "--json", out, *plot)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["environment"]["cores"] >= 1 and (not plot or picture.stat().st_size > 1000)
    rows = found["rows"]
    settings = {row["contender"] for row in rows if row["contender"].startswith("library, ")}
    assert {row["contender"] for row in rows} - {"read"} - settings == OURS[name] | {"library"}
    assert settings >= {"library, ^han", "library, sm"} or not load_mpi().Get_library_version().startswith("Open MPI")
    assert name != "allreduce" or not settings or "library, tuned recursive_doubling" in settings
    assert sorted({row["size_bytes"] for row in rows}) == [20, 4096]
    for row in rows:
        assert set(row) >= WANTED and row["baseline"] == "library" and isinstance(row["size_bytes"], int)
        assert row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"])
        assert row["p10"] <= row["seconds"] <= row["p90"] and 0 < row["call_seconds"] < row["p90"]
        library = min(other["seconds"] for other in rows if other["size_bytes"] == row["size_bytes"]
                      and other["contender"].startswith("library"))
        assert row["best_ratio"] == pytest.approx(library / row["seconds"])
        assert row["best_library"] in settings | {"library"}
    sent = {row["contender"]: row["sent_bytes"] for row in rows if row["size_bytes"] == 4096}
    least = {"allreduce": 4096, "bcast": 4096, "allgather": 2048, "reduce-scatter": 2048}[name]
    assert all(sent[way] == least for way in OURS[name] - {"two-step, in place", "two-step", "scatter"})
    assert sent.get("two-step, in place", 0) == 0


@pytest.mark.more
def test_some_algorithms(mpirun, tmp_path):
    out = tmp_path / "rows.json"
    done = mpirun(2, "mpiddl", "bench", "bcast", "--sizes", "4KiB", "--seconds", "0.02", "--algorithms", "chain", "--json", out)
    assert done.returncode == 0, done.stderr
    assert {row["contender"] for row in json.loads(out.read_text())["rows"]} == {"library", "chain"}
    done = mpirun(1, "mpiddl", "bench", "bcast", "--algorithms", "chain,tree")
    assert "algorithms: got 'tree', expected some of chain, scatter, binomial, multicast" in done.stderr


def test_each_call_has_new_inputs_and_its_result_is_read(link, monkeypatch):
    """By a clock of which writing takes 100, a call 1 and reading 10."""
    clock, seen = [0.0], []

    def takes(seconds):
        clock[0] += seconds
        seen.append(seconds)

    monkeypatch.setattr("mpiddl.study.interleaved.now", lambda: clock[0])
    contender = Contender(lambda: takes(1), write=lambda: takes(100), read=lambda: takes(10))
    take_turns(link, {"one": contender}, 0.0)
    assert seen[:2] == [100, 1] and seen[2:] == [100, 1, 10] * ((len(seen) - 2) // 3)
    assert set(contender.seconds) == {11.0} and set(contender.call_seconds) == {1.0}
    assert len(contender.seconds) == len(contender.call_seconds) >= LEAST


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["allreduce", "bcast"])
def test_every_setting_of_the_library_gives_the_same(link, call):
    x, level = np.full(1000, link.rank + 1.0), load_mpi().Query_thread()
    with rivals(link, call) as settings:
        assert load_mpi().Query_thread() == level
        assert bool(settings) == link.library().startswith("Open MPI")
        assert not settings or {"^han", "sm", "tuned chain" if call == "bcast" else "tuned ring"} <= set(settings)
        for comm in settings.values():
            total, sent = np.zeros(1000), x.copy()
            comm.Allreduce(x, total)
            comm.Bcast(sent, 1)
            assert (total == link.size * (link.size + 1) / 2).all() and (sent == 2).all()


@pytest.mark.no_mpi
@pytest.mark.more
def test_requests_against_the_librarys(mpirun, tmp_path):
    out = tmp_path / "rows.json"
    flags = ("--sizes", "4KiB", "--requests", "1,3", "--seconds", "0.02", "--json", out)
    done = mpirun(2, "mpiddl", "bench", "iallreduce", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["library", "Communicator", "thread"] * 4
    assert [row["requests"] for row in rows] == [1] * 6 + [3] * 6
    assert [row["computing"] > 0 for row in rows] == ([False] * 3 + [True] * 3) * 2
    assert all(row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"]) for row in rows)


def test_alone_there_is_nothing_to_send(command):
    done = command("mpiddl", "bench", "allreduce", "--sizes", "1KiB", "--seconds", "0.01")
    assert done.returncode == 0 and "1 node x 1 rank" in done.stdout


NONSENSE = [
    (("--sizes", "12 parsecs"), "sizes: got '12 parsecs', expected a size in B, KiB"),
    (("--sizes", "0"), "sizes: got '0'"),
    (("--sizes", ","), "sizes: got ''"),
    (("--sizes", "90000GiB"), "sizes: got 90000 GiB, expected at most"),
    (("--rate", "fast"), "rate: got 'fast', expected a number with kbit, mbit or gbit"),
    (("--dtype", "float16"), "got dtype float16, expected an integer, float or complex dtype"),
    (("--dtype", "words"), "dtype: got 'words'"),
    (("--seconds", "-1"), "seconds"),
    (("--plot", "/nowhere/at/all.png"), "plot: /nowhere/at/all.png"),
    (("--json", "/nowhere/at/all.json"), "json: /nowhere/at/all.json"),
]


@pytest.mark.parametrize(("flags", "said"), NONSENSE)
def test_nonsense_is_told(command, flags, said):
    done = command("mpiddl", "bench", "allreduce", "--seconds", "0", "--sizes", "64", *flags)
    assert done.returncode != 0 and done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_nonsense_is_told_once_by_several_ranks(mpirun):
    done = mpirun(2, "mpiddl", "bench", "bcast", "--sizes", "90000GiB")
    assert done.returncode == 2 and done.stderr.count("sizes: got 90000 GiB") == 1, done.stderr


def test_a_file_that_rank_0_cannot_write_ends_all(mpirun, tmp_path):
    done = mpirun(2, "mpiddl", "bench", "allgather", "--seconds", "0", "--sizes", "64", "--json", tmp_path)
    assert done.returncode != 0 and done.stderr.count(f"json: {tmp_path}") == 1, done.stderr
