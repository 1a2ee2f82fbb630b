"""``mpiddl compare`` doing runs: simulated ones, killed on the way; on MPI ranks; on a testbed with counted links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mpiddl.compare.backends import Here, Simulated
from mpiddl.compare.grid import make_grid
from mpiddl.compare.preflight import Facts
from mpiddl.compare.processes import run
from mpiddl.compare.store import Store
from mpiddl.compare.study import Study
from mpiddl.testbed.mpi import SESSIONS
from mpiddl.testbed.program import MARK, OUT_OF_TIME

JOB = """
[train]
epochs = {epochs}
model = "softmax"
optimiser = "nesterov"
[compare]
strategies = [{strategies}]
workers = 2
seeds = 1
target = 0.5
"""


@pytest.fixture
def job(tmp_path):
    """``job(epochs=2)``: a file for two strategies; returns the words that compare them, with a folder for what comes of it."""

    def make(epochs=2, strategies='"two-step", {strategy = "asgd", rate = 0.05}'):
        (tmp_path / "job.toml").write_text(JOB.format(epochs=epochs, strategies=strategies))
        return "compare", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out")

    return make


def read(tmp_path):
    """The rows of the report, and the runs."""
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    return told["rows"], told["runs"]


def marked(mark):
    """Processes that a comparison has started."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                found += [pid] * (f"{MARK}={mark}".encode() in file.read())
        except OSError:
            continue
    return found


# `mpiddl`, killed when it has begun its second run.
KILLED = """
import os, signal, subprocess
from mpiddl import cli
from mpiddl.compare import processes

class Popen(subprocess.Popen):
    begun = 0

    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        Popen.begun += 1
        if Popen.begun == 2:
            os.kill(os.getpid(), signal.SIGKILL)

processes.subprocess.Popen = Popen
cli.main()
"""


@pytest.mark.no_mpi
@pytest.mark.more
def test_a_comparison_that_is_killed_goes_on(job, tmp_path, command):
    asked, cells = [*job(), "--simulate", "--jobs", "1"], tmp_path / "out" / "cells.jsonl"
    killed = command(sys.executable, "-c", KILLED, *asked)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    words = [sys.executable, "-m", "mpiddl", *asked]
    before = cells.read_text()
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert cells.read_text().startswith(before) and len(cells.read_text().splitlines()) == 2
    assert "2 runs on the simulated clock: 1 done, 1 to do" in done.stderr, done.stderr
    until = time.monotonic() + 100
    while ranks(tmp_path) and time.monotonic() < until:  # a killed comparison's run ends by itself
        time.sleep(0.05)
    assert not ranks(tmp_path) and not list((tmp_path / "out").glob(".cell*"))
    (two_step, asgd), runs = read(tmp_path)
    assert all(row["seeds"] == [1] and row["accuracy"]["value"] > 50 and row["reached"] == 1 for row in (two_step, asgd))
    assert (two_step["ranks"], asgd["ranks"]) == (2, 3) and asgd["staleness"]["pushes"] == 2 * 2 * 21
    assert two_step["staleness"] is None and two_step["distance"]["value"] == 0 < asgd["distance"]["value"]
    assert [len(each["curve"]) for each in runs] == [2] * 2 and all(each["curve"][-1]["samples"] == 2 * 1293 for each in runs)
    ends = [each["curve"][-1] for each in runs]
    assert all(end["bytes"] == each["bytes"] > 0 for end, each in zip(ends, runs, strict=True))


def test_on_mpi_ranks(job, tmp_path, command):
    done = command(sys.executable, "-m", "mpiddl", *job(epochs=1, strategies='{strategy = "asgd", rate = 0.05}'))
    assert done.returncode == 0, done.stderr
    rows, _ = read(tmp_path)
    assert (rows[0]["ranks"], rows[0]["egress_mb"]) == (2, None)  # one host: no links
    assert rows[0]["accuracy"]["value"] > 30 and done.stdout.startswith("Take asgd")


def ranks(tmp_path):
    """Processes that are ranks of the run that is going on."""
    return [pid for pid in marked("compare-") if f"{tmp_path}/out/.cell" in cell_of(pid)]


def cell_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            words = file.read().split("\0")
    except OSError:
        return ""
    return words[3] if words[1:3] == ["-m", "mpiddl.compare.run_cell"] else ""  # not the launcher, which has these words, too


@pytest.mark.more
def test_a_run_that_loses_a_rank_is_told_and_run_again(job, tmp_path, command):
    words = [sys.executable, "-m", "mpiddl", *job(strategies='"two-step", "local-sgd"')]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while len(found := ranks(tmp_path)) < 2 and process.poll() is None:
            time.sleep(0.01)
        os.kill(int(found[0]), signal.SIGKILL)
        _, said = process.communicate()
    lost, kept = (json.loads(line)["outcome"] for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines())
    assert lost["error"] and "[1/2] two-step, 2 workers, seed 1: FAILED" in said
    assert kept["accuracy"] > 0.3  # the next one went on
    done = command(*words)
    assert done.returncode == 0 and "1 done, 1 to do" in done.stderr, done.stderr
    rows, runs = read(tmp_path)
    assert [row["seeds"] for row in rows] == [[1], [1]] and not rows[0]["failed"]
    assert all(run["samples"] == 2 * 1293 and len(run["curve"]) == 2 for run in runs) and not ranks(tmp_path)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.more
def test_on_a_testbed_links_are_counted(job, tmp_path, command):
    done = command(sys.executable, "-m", "mpiddl", *job(epochs=1), "--testbed", "2:200mbit")
    assert done.returncode == 0, done.stderr
    (two_step, asgd), _ = read(tmp_path)
    for row in (two_step, asgd):
        egress, ingress = row["egress_mb"]["value"], row["ingress_mb"]["value"]
        assert egress == pytest.approx(ingress, rel=0.02) and row["sent_mb"]["value"] > 0
    # Payload, headers, and a few words about each step; validation is left out.
    assert two_step["sent_mb"]["value"] < two_step["egress_mb"]["value"] < 1.2 * two_step["sent_mb"]["value"] + 0.05


@pytest.mark.usefixtures("namespaces")
@pytest.mark.limit(900)
@pytest.mark.more
def test_links_carry_what_is_counted(tmp_path, command):
    file = tmp_path / "job.toml"
    file.write_text("[train]\nepochs = 2\nhidden = [256, 128]\nvalidate_every = 10\nrate = 0.1\n"
                    '[compare]\nworkers = 2\nseeds = 1\nstrategies = ["gossip", "gossip-adaptive:theta=0.1"]')
    for attempt in "abc":  # on a busy machine TCP may send again what is late
        words = [sys.executable, "-m", "mpiddl", "compare", str(file), "--out", str(tmp_path / attempt), "--testbed", "2"]
        done = command(*words)
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / attempt / "report.json").read_text())
        ratios = [row["payload_mb"]["value"] / row["sent_mb"]["value"] for row in report["rows"]]
        if max(ratios) < 1.02:
            break
    assert report["rows"][0]["sent_mb"]["value"] > 5 and len(report["runs"][0]["curve"]) == 5  # 41 steps
    assert all(1 <= ratio < 1.02 for ratio in ratios), ratios  # with the validations' averages it would be a tenth more
    assert all(row["payload_mb"]["value"] < row["egress_mb"]["value"] for row in report["rows"])


@pytest.mark.no_mpi
def test_launchers_have_a_folder_of_their_own(tmp_path):
    """Open MPI's names one in it by its process number, and ends with 213 where another, that was killed, has left that."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\ncd "${SESSIONS}" && pwd && touch left\n')
    launcher.chmod(0o755)
    place = Here(str(launcher), None, os.environ)
    grid = make_grid({"epochs": 1}, {"strategies": ["ring"], "workers": 2, "seeds": 2})
    folders = {place.run(cell, ("a", "b"), "compare-test-own", 200.0).text.strip() for cell in grid.cells()}
    assert len(folders) == 2 and not any(map(os.path.exists, folders))
    assert all(os.path.basename(folder).startswith("compare-test-own.") for folder in folders)


@pytest.mark.no_mpi
def test_a_command_that_takes_too_long_is_ended_with_all_it_started():
    script = "import subprocess, time; subprocess.Popen(['sleep', '9999']); print('here', flush=True); time.sleep(9999)"
    for limit_s in (1.0, 10.0, 100.0):
        ended = run([sys.executable, "-c", script], os.environ, "compare-test-late", limit_s)
        if ended.text:  # else it had not begun
            break
    assert ended.code == OUT_OF_TIME and ended.text == "here\n" and not marked("compare-test-late")


@pytest.mark.no_mpi
def test_a_run_whose_parent_is_killed_ends(tmp_path):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"simulate": 2, "epochs": 500, "strategy": "two-step"}))
    words = [sys.executable, "-m", "mpiddl.compare.run_cell", str(settings), str(tmp_path / "outcome.json"), "--with-parent"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.close()  # as the kernel does when the parent ends
    assert process.wait() == 75 and not (tmp_path / "outcome.json").exists()
    process.stderr.close()


@pytest.mark.no_mpi
def test_an_end_by_signal_keeps_what_there_is(job, tmp_path):
    words = [sys.executable, "-m", "mpiddl", *job(epochs=400), "--simulate", "--jobs", "2"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out/.cell*/settings.json")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "The same command continues" in said
    assert not list(tmp_path.glob("out/.cell*")) and not ranks(tmp_path)
    assert not list(tmp_path.glob("out/failed/*"))  # they have not failed


class Slow(Simulated):
    """Runs are processes that sleep, which come into being slowly: the end of a comparison finds them in the middle of that."""

    def __init__(self):
        super().__init__(3, dict(os.environ))
        self.ends = threading.Event()

    def run(self, cell, files, mark, limit_s):
        if cell.seed == 3:
            self.ends.set()
            raise RuntimeError("ends the comparison")
        self.ends.wait()
        time.sleep(0.3 * cell.seed)  # so that the one or the other begins when the comparison ends already: any order will do
        words = [sys.executable, "-c", "import time; time.sleep(9999)"]
        return run(words, self._env, mark, limit_s)


@pytest.mark.no_mpi
def test_runs_that_are_just_beginning_when_it_ends_are_waited_for(tmp_path):
    grid = make_grid({"epochs": 1}, {"strategies": ["ring"], "workers": 2, "seeds": 3})
    store = Store(tmp_path, (1, 1), lambda text: None)
    store.take()
    facts = Facts(1000, {"rows": 1100, "test_rows": 100, "features": 64, "checksum": 7})
    study = Study(grid, Slow(), store, facts, lambda text: None)
    with pytest.raises(RuntimeError, match="ends the comparison"):
        study.run()
    assert not marked(store.mark) and not list(tmp_path.glob(".cell*"))
    store.close()
