"""``mpiddl bench server``: what it writes, and what it says to nonsense."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from mpiddl.testbed import Testbed


@pytest.mark.more
def test_a_pull_against_a_copy_and_an_exchange_against_grpc(command, tmp_path):
    out = tmp_path / "rows.json"
    done = command("mpiddl", "bench", "server", "--seconds", "0", "--json", out)
    assert done.returncode == 0, done.stderr
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["pull"]["baseline"] == "memcpy" and rows["pull"]["size_bytes"] == 7_454_760
    assert ("gRPC: not installed" in done.stdout) == (find_spec("grpc") is None) == ("push and pull" not in rows)
    assert all(row["p10"] <= row["seconds"] <= row["p90"] for row in rows.values())


@pytest.mark.more
def test_between_hosts_against_the_wire(namespaces, tmp_path):
    with Testbed(hosts=2, rate="1gbit") as bed:
        words = ["mpiddl", "bench", "server", "--seconds", "0", "--rate", "1gbit", "--json", str(tmp_path / "rows.json")]
        done = bed.run(words, ranks_per_host=1, timeout_s=250)
    assert done.returncode == 0, done.output
    idle, computing = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert idle["baseline"] == "wire" and idle["baseline_seconds"] == pytest.approx(7_454_760 * 8 * 1.046 / 1e9)
    assert computing["contender"].startswith("pull while") and computing["baseline"] == "pull"


def test_nonsense_is_told(command):
    done = command("mpiddl", "bench", "server", "--rate", "fast")
    assert done.returncode != 0 and done.stderr.count("rate: got 'fast'") == 1, done.stderr
