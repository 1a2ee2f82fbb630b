"""``mpiddl bench gossip``: its arithmetic, its runs, what links carry beside what is counted, and what it says to nonsense."""

from __future__ import annotations

import json
from importlib.util import find_spec
from math import inf

import pytest

from mpiddl.bench import gossip_rows
from mpiddl.bench.gossip_runs import Rhythm
from mpiddl.testbed import Testbed

ADAPTIVE = "gossip-adaptive:theta=0.1@0.1"
SMALL = ("mpiddl", "bench", "gossip", "--data", "digits", "--batch", "64", "--seconds", "0", "--strategy", "gossip@0.1",
         "--strategy", ADAPTIVE)  # fmt: skip


def outcome(*points, links=((1000, 1000, 5, 5), (1000, 1000, 5, 5)), sent=(600, 680)):
    """Of a run whose ``points`` are steps, seconds, bytes and accuracy."""
    return {"points": [[steps, seconds, nbytes, 1, accuracy] for steps, seconds, nbytes, accuracy in points],
            "links": links, "sent": sent, "messages": [2, 4], "computing": 1.0, "step": 5.0, "wire": 1e6, "share": 0.8}


def test_rows_are_medians_of_turns_and_savings_of_pairs():
    slow = {0: outcome((10, 1.0, 100, 0.5), (20, 2.0, 200, 0.8)), 1: outcome((10, 4.0, 100, 0.8), (20, 8.0, 200, 0.6))}
    fast = {0: outcome((10, 0.5, 10, 0.8)), 1: outcome((10, 1.0, 10, 0.4), (20, 3.0, 20, 0.9))}
    rows = list(gossip_rows.rows((0.5, 0.8), {"a": slow, "b": fast}))
    assert [(row["target"], row["contender"]) for row in rows] == [(0.5, "a"), (0.5, "b"), (0.8, "a"), (0.8, "b")]
    assert rows[2]["seconds"] == 3.0 and rows[3]["seconds"] == 1.75
    assert rows[2]["saved"] == 0 and rows[3]["saved"] == pytest.approx(1 - (0.5 / 2 + 3 / 4) / 2)
    assert rows[3]["sent_bytes"] == 7.5 and rows[3]["sent_share"] == 15 / 150
    assert rows[3]["wanted"] == gossip_rows.SAVED and rows[2]["wanted"] is None
    assert rows[0]["link_ratio"] == 2000 / 1280 and rows[0]["payload_ratio"] == (2000 - 660) / 1280


def test_who_does_not_arrive_saves_nothing():
    there, never = {0: outcome((10, 1.0, 100, 0.9))}, {0: outcome((10, 1.0, 100, 0.2))}
    found = list(gossip_rows.rows((0.8,), {"a": there, "b": never}))
    assert (found[1]["seconds"], found[1]["saved"], found[1]["reached"]) == (None, None, 0)
    assert "- to 0.8; expected 52%: not reached to 0.8" in next(gossip_rows.sentences(found))
    assert list(gossip_rows.arrival(never[0], 0.8)) == [inf] * 5


def test_ranks_that_share_a_host_are_not_compared_with_links():
    found = list(gossip_rows.rows((0.5,), {"a": {0: outcome((1, 1.0, 1, 0.9), links=((1000, 1000, 5, 5),))}}))
    assert "link_bytes" not in found[0]


def test_the_rate_for_a_part_of_the_step():
    rhythm = Rhythm(computing=0.01, step=0.05, wire=100e6)
    assert rhythm.share == pytest.approx(0.8) and rhythm.rate_for(0.8) == pytest.approx(100e6)
    assert rhythm.rate_for(0.5) == pytest.approx(400e6)


@pytest.mark.plots
@pytest.mark.more
def test_finished_runs_are_not_run_again(mpirun, tmp_path):
    out, kept, picture = tmp_path / "rows.json", tmp_path / "runs.jsonl", tmp_path / "time.png"
    plot = ["--plot", picture] if find_spec("matplotlib") else []
    flags = ("--hidden", "16", "--epochs", "2", "--every", "7", "--targets", "0.5,0.99", "--results", kept, "--json", out)
    for turns in (1, 2):
        done = mpirun(2, *SMALL, *flags, *plot, "--turns", turns)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in kept.read_text().splitlines()]
        assert len(lines) == 2 * turns
    rows = json.loads(out.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["gossip@0.1", ADAPTIVE] * 2
    assert [row["reached"] for row in rows] == [2, 2, 0, 0] and rows[2]["seconds"] is None
    for line in lines:
        steps = [point[0] for point in line["outcome"]["points"]]
        assert steps[:-1] == list(range(7, steps[-1], 7))  # the last one is the end's
    assert done.stdout.count("expected 52%") == 1 and "of what is counted" not in done.stdout
    assert not plot or picture.stat().st_size > 1000
    others = [{**line, "outcome": {**line["outcome"], "wire": 1e9}} for line in lines]
    kept.write_text("".join(json.dumps(line) + "\n" for line in others))
    done = mpirun(2, *SMALL, *flags, "--turns", 1)
    assert done.returncode == 2 and done.stderr.count("got a file of runs over links of 1000 Mbit/s") == 1, done.stderr


@pytest.mark.limit(900)
@pytest.mark.more
def test_links_carry_what_is_counted(namespaces, tmp_path):
    words = [*SMALL, "--hidden", "256,128", "--epochs", "2", "--every", "10", "--targets", "0.995", "--turns", "1",
             "--json", str(tmp_path / "rows.json")]  # fmt: skip
    with Testbed(hosts=2) as bed:
        for _ in range(3):  # on a busy machine TCP may send again what is late
            done = bed.run(words, ranks_per_host=1, timeout_s=250)
            assert done.returncode == 0, done.output
            rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
            if all(row["payload_ratio"] < 1 + gossip_rows.COUNTED for row in rows):
                break
    assert rows[0]["counted_bytes"] > 5e6
    for row in rows:  # were the meetings' averages not left out, there would be a tenth of gossip's bytes more
        assert 1 <= row["payload_ratio"] < 1 + gossip_rows.COUNTED, row
        assert row["payload_bytes"] < row["link_bytes"]
    assert "expected within 2%: reached" in done.output


@pytest.mark.parametrize(("flags", "said"), [
    (("--strategy", "gossip"), "strategy: got 'gossip', expected NAME@RATE"),
    (("--strategy", "gossip@-1"), "strategy: got 'gossip@-1', expected NAME@RATE"),
    (("--strategy", "gossip@nan"), "strategy: got 'gossip@nan', expected NAME@RATE"),
    (("--strategy", "gosip@0.1"), "strategy: got 'gosip', expected one of"),
    (("--strategy", "gossip@0.1", "--strategy", "gossip@0.1"), "expected one or more values, each only once"),
    (("--targets", "0.5,2"), "targets: got '0.5,2', expected numbers between 0 and 1"),
    (("--results", "/nowhere/at/all.jsonl"), "results: /nowhere/at/all.jsonl"),
    ((), "bench gossip: got 1 rank, expected 2 or more"),
])
def test_nonsense_is_told(command, flags, said):
    done = command("mpiddl", "bench", "gossip", *flags)
    assert done.returncode != 0 and done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("flags", "said"), [
    (("--data", "no-such-data"), "got 'no-such-data', expected the built-in data set 'digits'"),
    (("--batch", "100000"), "batch: got 100000, expected at most"),
    (("--strategy", "gossip:pace=own@0.1"), "strategy: got 'gossip:pace=own', expected a synchronous strategy"),
    (("--strategy", "asgd@0.1"), "strategy: got 'asgd', expected a synchronous strategy"),
    (("--strategy", "gossip:graph=matching@0.1"), "graph: got matching on 3 ranks"),
])
@pytest.mark.more
def test_what_ranks_learn_together_is_told_once(mpirun, flags, said):
    done = mpirun(3, *SMALL, *flags)
    assert done.returncode != 0 and done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr
