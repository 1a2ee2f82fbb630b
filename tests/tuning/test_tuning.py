"""Which algorithm for which size: the table, the rule, and who is asked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from mpiddl.bench import communicator as bench
from mpiddl.errors import DataError, UsageError
from mpiddl.node.topology import Topology
from mpiddl.transport import virtual
from mpiddl.tuning import Chooser, Entry, Place, Table, add_to_table, check_table, chooser, read_table, verbs, write_table
from mpiddl.tuning import choice as choices
from mpiddl.tuning.choice import between
from mpiddl.tuning.fit import fit
from mpiddl.tuning.place import cluster_name, processor_name, table_path
from mpiddl.tuning.rule import CANDIDATES, candidates
from mpiddl.tuning.table import LARGEST_FILE, node_map, text_of

HERE = Place("nodes", 'a "fast" one', "Open MPI v5.0.11", "2+2")
TWO_NODES = Topology([0, 0, 2, 2])


def entry(call="allreduce", place=HERE, **seconds):
    return Entry(place, call, (1000, 10_000, 100_000), seconds or {
        "library": (1e-6, 1e-5, 1e-4), "ring": (5e-6, 6e-6, 2e-4), "two-step": (9e-6, 9e-6, 5e-5)})


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = Table((entry(), entry("bcast", library=(1e-6, 2e-6, 3e-6), chain=(1e-6, 1e-6, 1e-6))))
    path = tmp_path / "new" / "tune.toml"
    write_table(path, table)
    assert read_table(path) == table
    assert [file.name for file in path.parent.iterdir()] == ["tune.toml"]


def test_a_newer_measurement_takes_the_place_of_an_older_one():
    old, new = entry(), entry(library=(1e-6, 1e-6, 1e-6))
    elsewhere = entry(place=HERE._replace(ranks="4"))
    table = Table((old, elsewhere)).merged([new, entry("barrier", library=(1e-6, 1e-6, 1e-6))])
    assert table.find(HERE, "allreduce") is new and table.find(elsewhere.place, "allreduce") is elsewhere
    assert len(table.entries) == 3


GOOD = text_of(Table((entry(),)))
DAMAGED = {
    "half": GOOD[: len(GOOD) // 2], "empty": "", "version": GOOD.replace("version = 1", "version = 2"), "text": "hello",
    "call": GOOD.replace('"allreduce"', '"alltoall"'), "algorithm": GOOD.replace("ring =", "rings ="),
    "order": GOOD.replace("1000, 10000", "10000, 1000"), "length": GOOD.replace("1000, 10000,", "1000,"),
    "negative": GOOD.replace("6e-06", "-1.0"), "nan": GOOD.replace("6e-06", "nan"), "true": GOOD.replace("6e-06", "true"),
    "no library": GOOD.replace("library = [", "ring2 = ["), "place": GOOD.replace('"nodes"', "3"),
    "huge": GOOD.replace("6e-06", "1" + 400 * "0"), "digits": GOOD.replace("6e-06", 5000 * "9"), "deep": "x = " + 20_000 * "[",
    "huge size": GOOD.replace("100000]", "1" + 400 * "0" + "]"), "tiny": GOOD.replace("6e-06", "1e-320"),
    "hex": "version = 0x" + 6000 * "f", "hex place": GOOD.replace('"nodes"', "0x" + 6000 * "f"),
    "hex size": GOOD.replace("100000]", "0x" + 6000 * "f" + "]"), "long call": GOOD.replace("allreduce", 100_000 * "x"),
    "not entries": "version = 1\nmeasured = 3", "not tables": "version = 1\nmeasured = [3]",
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_table_is_said_and_not_used(tmp_path, how):
    path = tmp_path / "tune.toml"
    path.write_text(DAMAGED[how])
    with pytest.raises(DataError, match=re.escape(str(path))):
        read_table(path)
    with pytest.raises(DataError, match=r"^.{1,400}$"):
        read_table(path)
    (choice,) = virtual.run(1, lambda comm: chooser(comm, {}, path))
    assert "the built-in rule (table" in choice.source


@pytest.mark.parametrize("kind", ["fifo", "long", "folder", "loop"])
def test_what_cannot_be_read_is_said_and_not_used(tmp_path, kind):
    path = tmp_path / ("x" * 300 if kind == "long" else "tune.toml")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    (choice,) = virtual.run(1, lambda comm: chooser(comm, {}, path))
    assert choice.source.startswith("the built-in rule (")


def test_measurements_of_others_stay(tmp_path):
    path = tmp_path / "tune.toml"
    add_to_table(path, [entry()])
    add_to_table(path, [entry("bcast", library=(1e-6, 2e-6, 3e-6))])
    assert [one.call for one in read_table(path).entries] == ["allreduce", "bcast"]
    assert [file.name for file in tmp_path.iterdir()] == ["tune.toml"]


def test_whatever_goes_wrong_with_a_table_all_ranks_learn_it(tmp_path, monkeypatch):
    path = tmp_path / "tune.toml"
    path.touch()

    def fails(path):
        raise MemoryError

    monkeypatch.setattr(choices, "read_table", fails)
    for choice in virtual.run(3, lambda comm: chooser(comm, {}, path)):
        assert choice.source == f"the built-in rule (table {path}: MemoryError)"


def test_a_link_and_rights_stay(tmp_path):
    path, link = tmp_path / "there" / "shared.toml", tmp_path / "tune.toml"
    path.parent.mkdir()
    write_table(path, Table())
    path.chmod(0o640)
    link.symlink_to(path)
    add_to_table(link, [entry()])
    assert link.is_symlink() and read_table(path).entries == (entry(),) and path.stat().st_mode & 0o777 == 0o640


def test_bytes_and_folders_are_no_tables(tmp_path):
    path = tmp_path / "tune.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not text"):
        read_table(path)
    with pytest.raises(UsageError, match="got a folder or special file, expected a file written by mpiddl tune"):
        read_table(tmp_path)


@pytest.mark.parametrize("odd", [0, 1])
def test_what_is_too_long_is_not_read_in_part(tmp_path, odd):
    path = tmp_path / "tune.toml"
    path.write_text(GOOD + "#" * (1 + odd) + (LARGEST_FILE // 2) * "\u00e9", "utf-8")  # so few characters, but bytes count
    with pytest.raises(DataError, match="more than 4 MiB"):
        read_table(path)


def test_the_choice_changes_where_the_measured_lines_cross():
    choice = Chooser(TWO_NODES, HERE, Table((entry(),)), "measured, here")
    names = [choice.algorithm("allreduce", size) for size in (0, 1000, 4000, 8000, 10_000, 30_000, 100_000, 10**9)]
    assert names == ["library", "library", "library", "ring", "ring", "two-step", "two-step", "two-step"]
    begins = {name: begin for begin, name in choice.steps("allreduce")}
    for before, after in (("library", "ring"), ("ring", "two-step")):
        at = begins[after]
        assert between(entry(), after, at) == pytest.approx(between(entry(), before, at), rel=0.05)
    assert choice.floor("allreduce") == begins["ring"]
    told = choice.choose("allreduce", 10_000)
    assert told.measured == pytest.approx(6e-6) and told.predicted > 0 and "predicted" in str(told)
    assert choice.choose("allreduce", 10**7).measured is None and "outside" in str(choice.choose("allreduce", 10**7))


def test_what_was_measured_by_reading_is_not_taken_where_that_is_forbidden():
    seconds = {"library": (1e-6, 1e-5, 1e-4), "ring": (2e-6, 5e-6, 5e-5), "read": (2e-6, 2e-6, 2e-6)}
    for reads, taken in ((True, "read"), (False, "ring")):
        choice = Chooser(TWO_NODES, HERE, Table((entry(**seconds),)), "measured, here", reads=reads)
        assert choice.algorithm("allreduce", 10**6) == choice.choose("allreduce", 10**6).algorithm == taken
        assert ("read" in dict(map(reversed, choice.steps("allreduce")))) == reads


def test_verbs_are_measured_between_nodes_where_they_work():
    verbs = {"ring-verbs", "two-step-verbs"}
    for homes, works in (([0, 0], True), ([0, 1], False), ([0, 1], True)):
        found = verbs & set(candidates(Topology(homes), "allreduce", reads=False, verbs=works))
        assert found == (verbs if works and homes == [0, 1] else set())


def test_the_library_is_taken_where_it_is_as_fast():
    as_fast = entry(library=(1e-6, 1.01e-5, 1e-4), ring=(1e-6, 1e-5, 0.99e-4))
    assert as_fast.best == ("library",) * 3


@pytest.mark.parametrize("library", ["Open MPI v5.0.11", "MPICH Version: 5.0.2", "Another MPI 1.0"])
@pytest.mark.parametrize("call", CANDIDATES)
@pytest.mark.parametrize("reads", [True, False])
def test_the_rule_names_what_there_is(reads, call, library):
    for homes in ([0], [0, 0], [0] * 8, [0, 0, 2, 2], [0, 1, 2, 3]):
        choice = Chooser(Topology(homes), HERE._replace(library=library), Table(), "the rule", reads=reads)
        steps = choice.steps(call)
        assert steps[0][0] == 0 and [begin for begin, _ in steps] == sorted({begin for begin, _ in steps})
        assert {name for _, name in steps} <= set(candidates(Topology(homes), call, reads))
        assert len(homes) > 1 or steps == ((0, "library"),)


def test_the_rule_knows_where_a_library_is_slow():
    nodes = Topology([0, 0, 2, 2])
    taken = {library: Chooser(nodes, HERE._replace(library=library), Table(), "the rule").algorithm("allreduce", 64 << 10)
             for library in ("Open MPI v5.0.11", "MPICH Version: 5.0.2", "Another MPI 1.0")}  # fmt: skip
    assert taken == {"Open MPI v5.0.11": "two-step", "MPICH Version: 5.0.2": "library", "Another MPI 1.0": "library"}


def test_a_table_of_another_place_is_said_and_not_used(tmp_path):
    path = tmp_path / "tune.toml"
    write_table(path, Table((entry(),)))

    def program(comm):
        return chooser(comm, {}, path).source

    sources = set(virtual.run(3, program, nodes=[0, 0, 2]))
    assert len(sources) == 1 and "ranks '2+2' instead of '2+1'" in sources.pop()
    assert "there is no table" in virtual.run(1, lambda comm: chooser(comm, {}, tmp_path / "none").source)[0]


def test_the_model_fits_lines_and_never_goes_below_zero():
    assert fit([1, 2, 3], [3.0, 2.0, 1.0]).beta == 0
    assert fit([10, 100], [1.0, 20.0]).alpha == 0
    assert fit([0], [5.0]) == pytest.approx((5.0, 0.0))


def test_places(monkeypatch):
    assert node_map(Topology([0, 0, 2, 3])) == "2+1+1" and node_map(Topology([0, 1, 0])) == "0 1 0"
    hosts = {"h3": "h", "cn-0042": "cn", "login-1a.hpc": "login", "vm": "vm", "42": "42"}
    assert {host: cluster_name({}, host) for host in hosts} == hosts
    assert processor_name("/nonexistent")
    assert str(table_path({"MPIDDL_TUNE": "/x/t"})) == "/x/t"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert table_path({}) is None
    assert str(table_path({"XDG_CONFIG_HOME": "/y"})) == "/y/mpiddl/tune.toml"


@pytest.mark.more
def test_tune_measures_writes_and_shows(mpirun, tmp_path):
    path, out = tmp_path / "tune.toml", tmp_path / "rows.json"
    tune = "mpiddl", "tune", "--out", path
    done = mpirun(2, *tune, "--sizes", "1KiB,64KiB", "--seconds", "0.01", "--calls", "allreduce,bcast")
    assert done.returncode == 0, done.stderr
    table = read_table(path)
    assert [found.call for found in table.entries] == ["allreduce", "bcast"]
    assert set(table.entries[0].seconds) - {"read"} == {"library", "two-step", "ring", "doubling"}
    done = mpirun(2, *tune, "--sizes", "1KiB", "--seconds", "0.01", "--calls", "barrier")
    assert done.returncode == 0 and len(read_table(path).entries) == 3
    done = mpirun(2, *tune, "--show", "--sizes", "2KiB")
    assert "measured, " in done.stdout and done.stdout.count("allreduce 2 KiB") == 1
    done = mpirun(2, "mpiddl", "bench", "communicator", "--table", path, "--calls", "allreduce,barrier", "--sizes", "8B,64KiB",
                  "--seconds", "0.01", "--json", out)
    assert done.returncode == 0, done.stderr
    rows, everything = json.loads(out.read_text())["rows"], done.stdout
    assert {row["case"].partition(",")[0] for row in rows} == {"allreduce 8 B", "allreduce 64 KiB", "barrier 0 B"}
    assert all(row["of_best"] == pytest.approx(row["best_seconds"] / row["seconds"]) for row in rows)
    done = mpirun(2, "mpiddl", "bench", "communicator", "--default-only", "--table", path, "--calls", "allreduce",
                  "--sizes", "64KiB", "--dtype", "int32", "--op", "max", "--seconds", "0.01", "--json", out)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["case"].startswith("allreduce int32 max 64 KiB") and row["best_seconds"] == row["baseline_seconds"]
    assert "of best" in everything and "of best" not in done.stdout


@pytest.mark.more
def test_the_bench_of_short_lived_communicators(mpirun, tmp_path):
    out = tmp_path / "rows.json"
    done = mpirun(2, "mpiddl", "bench", "short-lived", "--sizes", "12KiB,1MiB", "--seconds", "0.01", "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == [f"10 x {way}, Allreduce {size}, Free, 1 node x 2 ranks"
                                             for way in ("Dup", "Split") for size in ("12 KiB", "1 MiB")]
    assert all(row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"]) for row in rows)


@pytest.mark.parametrize(("args", "words"), [
    (["--calls", "sum"], "calls: got 'sum', expected one or more of allreduce"),
    (["--sizes", "big"], "sizes: got 'big'"),
    (["--seconds", "-1"], "seconds: got -1"),
])  # fmt: skip
def test_tune_refuses(command, tmp_path, args, words):
    done = command("mpiddl", "tune", "--out", tmp_path / "t", *args)
    assert done.returncode == 2 and words in done.stderr


def test_what_could_not_be_written_later_is_said_before_and_nothing_is_written(tmp_path):
    path = tmp_path / "new" / "tune.toml"
    check_table(path)
    assert list(path.parent.iterdir()) == []
    path.write_text("my notes")
    with pytest.raises(DataError, match="not TOML"):
        check_table(path)
    for nowhere in (Path("/proc/new/tune.toml"), Path("/proc/tune.toml"), tmp_path / ("x" * 300), path / "tune.toml"):
        with pytest.raises(UsageError, match="cannot be written"):
            check_table(nowhere)


def test_tune_that_is_ended_leaves_no_table(tmp_path, monkeypatch):
    def ended(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_entry", ended)
    with pytest.raises(KeyboardInterrupt):
        bench.tune({}, tmp_path / "tune.toml", ["barrier"])
    assert list(tmp_path.iterdir()) == []


def test_tune_does_not_replace_what_is_no_table(command, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    done = command("mpiddl", "tune", "--out", path, "--seconds", "0", "--sizes", "1KiB")
    assert done.returncode != 0 and path.read_text() == "my notes" and "Traceback" not in done.stderr


@pytest.mark.parametrize(("seconds", "wanted"), [
    ({"eager-verbs": (1e-6, 2e-6, 9e-6), "rendezvous-verbs": (3e-6, 3e-6, 4e-6)}, 10_000),
    ({"eager-verbs": (1e-6, 4e-6, 3e-6), "rendezvous-verbs": (3e-6, 3e-6, 4e-6)}, 1000),
    ({"eager-verbs": (4e-6, 4e-6, 9e-6), "rendezvous-verbs": (3e-6, 3e-6, 4e-6)}, 0),
    ({"eager-verbs": (1e-6, 2e-6, 3e-6), "rendezvous-verbs": (3e-6, 3e-6, 4e-6)}, 100_000),
    ({}, 8192),
])  # fmt: skip
def test_messages_are_copied_up_to_the_size_that_was_measured(tmp_path, monkeypatch, seconds, wanted):
    monkeypatch.setattr("socket.gethostname", lambda: "nodes-17")
    monkeypatch.setattr(verbs, "processor_name", lambda: HERE.processor)
    path, slow, fast = tmp_path / "tune.toml", {"library": (1.0, 1.0, 1.0)}, {"eager-verbs": (1e-6,) * 3}
    elsewhere = entry("message", HERE._replace(cluster="x"), **slow, **fast, **{"rendezvous-verbs": (2e-6,) * 3})
    older = entry("message", HERE._replace(library="MPICH"), **slow, **fast, **{"rendezvous-verbs": (1e-7,) * 3})
    newer = entry("message", HERE._replace(ranks="1+1"), **slow, **seconds)
    write_table(path, Table(((older, newer) if seconds else (newer,)) + (elsewhere,)))
    assert virtual.run(2, lambda comm: verbs.eager_bytes(comm, {}, path)) == [wanted] * 2
    path.write_text("my notes")
    assert virtual.run(2, lambda comm: verbs.eager_bytes(comm, {}, path)) == [8192] * 2


def test_a_table_does_not_fill_the_memory_with_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr(verbs, "_measured", lambda env, table: 1 << 20)
    for size in (2, 5):
        found = set(virtual.run(size, lambda comm: verbs.eager_bytes(comm, {}, None)))
        assert found == {verbs.BUFFERS_BYTES // (2 * 64 * size)}


def test_a_table_that_tells_of_messages_only_does_not_choose_algorithms(tmp_path):
    path = tmp_path / "tune.toml"
    here = virtual.run(1, lambda comm: chooser(comm, {}).place)[0]
    write_table(path, Table((entry("message", here, library=(1.0,) * 3),)))
    found = virtual.run(1, lambda comm: chooser(comm, {}, path))[0]
    assert found.unused and f"table {path} tells of messages only" in found.source
    choice = Chooser(TWO_NODES, HERE, Table((entry(),)), "measured, here")
    assert "measured, here" in str(choice.choose("allreduce", 1000))
    assert "the built-in rule: it was not measured" in str(choice.choose("bcast", 1000))
