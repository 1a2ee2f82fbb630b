"""``mpiddl testbed`` as a user types it: exit codes, mistakes, and nothing left behind in whatever way it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from mpiddl.testbed import TestbedError, rights
from mpiddl.testbed.program import sweep

PYTHON = ["python", "-c"]


pytestmark = [pytest.mark.more, pytest.mark.usefixtures("namespaces")]


@pytest.fixture
def testbed(command):
    """Runs ``mpiddl testbed``."""

    def run(*arguments, **options):
        return command("mpiddl", "testbed", *arguments, **options)

    return run


def plain(*arguments):
    """The same, but what it has started is left alone."""
    whole = [sys.executable, "-m", "mpiddl", "testbed", *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)


@pytest.fixture
def name():
    """A name for a cluster that is down when the test ends."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    plain("down", "--name", name)


def test_a_run_tells_bytes_and_the_programs_exit_code(testbed, tmp_path):
    file = tmp_path / "run.json"
    program = [*PYTHON, "from mpi4py import MPI; print(MPI.COMM_WORLD.size); raise SystemExit(5)"]
    done = testbed("run", "--hosts", "2", "--ranks-per-host", "2,1", "--rate", "200mbit", "--json", str(file), "--", *program)
    assert done.returncode == 5, done.stderr
    assert "".join(done.stdout.split()) == "333"  # MPICH may mix the lines of ranks
    written = json.loads(file.read_text())
    assert written["exit_code"] == 5
    assert set(written["links"]) == {"h1", "h2"}
    assert f"{written['links']['h1']['sent_bytes']:,}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--hosts", "0", "--", "true"], "hosts: got 0"),
        (["--hosts", "300", "--", "true"], "hosts: got 300"),
        (["--hosts", "many", "--", "true"], "'many' is not a valid integer"),
        (["--hosts", "2", "--rate", "12 parsecs", "--", "true"], "rate: got '12 parsecs'"),
        (["--hosts", "2", "--rate", "0", "--", "true"], "rate: got '0'"),
        (["--hosts", "2", "--rate", "-5mbit", "--", "true"], "rate: got '-5mbit'"),
        (["--hosts", "2", "--loss", "100%", "--", "true"], "loss: got '100%'"),
        (["--hosts", "2", "--ranks-per-host", "1,2,3", "--", "true"], "got 3 numbers for 2 hosts"),
        (["--hosts", "2", "--ranks-per-host", "two", "--", "true"], "got 'two'"),
        (["--hosts", "2", "--map", "sideways", "--", "true"], "map: got 'sideways'"),
        (["--hosts", "2", "--mpi", "lam", "--", "true"], "mpi: got 'lam'"),
        (["--hosts", "2", "--limit", "0", "--", "true"], "limit: got 0"),
        (["--hosts", "2", "--", "no-such-program"], "program: got 'no-such-program'"),
        (["--hosts", "2"], "Missing argument"),
        (["--rate", "1gbit", "--", "true"], "need --hosts"),
        (["--name", "nobody's", "--", "true"], "is not up"),
        (["--name", "", "--", "true"], "name: got ''"),
        (["--hosts", "2", "--json", "/no/such/folder/x", "--", "true"], "json: .*the folder .* does not exist"),
        (["--hosts", "2", "--mpiexec-args", "'", "--", "true"], "mpiexec_args: got"),
        (["--hosts", "2", "--slurm", "--map", "round-robin", "--", "true"], "got --slurm and --map, expected only --slurm"),
    ],
)
def test_a_mistake_is_one_clear_error(testbed, arguments, told):
    done = testbed("run", *arguments)
    assert done.returncode in (1, 2)
    assert re.match("mpiddl: error: .*" + (told if ".*" in told else re.escape(told)), done.stderr, re.DOTALL)
    assert "Traceback" not in done.stderr


def test_missing_tools_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(rights, "with_tools", lambda env: dict(env))
    with pytest.raises(TestbedError, match=r"missing programs: ip, tc, unshare, nsenter.*iproute2 util-linux"):
        rights.unshare_command({"PATH": str(tmp_path)})


def test_what_forbids_namespaces_is_named(tmp_path):
    setting = tmp_path / "kernel" / "unprivileged_userns_clone"
    setting.parent.mkdir()
    setting.write_text("0\n")
    assert rights.remedy(tmp_path).endswith("sysctl kernel.unprivileged_userns_clone=1")


def test_a_program_out_of_time(testbed):
    done = testbed("run", "--hosts", "2", "--limit", "1", "--", *PYTHON, "import time; time.sleep(60)")
    assert done.returncode == 124
    assert "--limit" in done.stderr


def test_a_cluster_that_stays(name):
    own = ("--name", name)
    assert plain("up", "--hosts", "2", "--rate", "1gbit", *own).returncode == 0
    twice = plain("up", "--hosts", "2", *own)
    assert twice.returncode == 1 and "already up" in twice.stderr
    assert plain("exec", *own, "h2", "hostname").stdout == "h2\n"
    assert plain("exec", *own, "h2", "sh", "-c", "exit 7").returncode == 7
    done = plain("run", *own, "--ranks-per-host", "1", "--", "hostname")
    assert sorted(done.stdout.split()) == ["h1", "h2"]
    assert plain("kill-host", *own, "--silently", "h2").returncode == 0
    assert plain("rate", *own, "100mbit").returncode == 0
    shown = plain("status", *own).stdout
    assert "rate 100mbit" in shown and "h1     up" in shown and "h2     down" in shown
    assert plain("boot", *own, "h2").returncode == 0
    unknown = plain("boot", *own, "h3")
    assert unknown.returncode == 2 and "'h3', expected h1 to h2" in unknown.stderr
    assert plain("down", *own).returncode == 0
    assert "is not up" in plain("down", *own).stderr


def kin(mark):
    """Living processes that inherited ``mark``, and their namespaces."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = {os.readlink(folder / "ns" / kind) for kind in ("net", "mnt", "pid")}
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_run_that_is_killed_leaves_nothing(number, tmp_path):
    mark, folders = f"MPIDDL_TESTBED_TEST={uuid.uuid4().hex}", [Path("/tmp"), Path("/run"), Path("/dev/shm"), Path.cwd()]
    mounts, files = Path("/proc/self/mounts").read_text(), {folder: set(os.listdir(folder)) for folder in folders}
    wait = "from mpi4py import MPI; import time; print('here', flush=True); time.sleep(100)"
    whole = [sys.executable, "-m", "mpiddl", "testbed", "run", "--hosts", "2", "--", *PYTHON, wait]
    env = dict(os.environ, **dict([mark.split("=")]), TMPDIR=str(tmp_path))
    # Python ignores SIGINT if it was started so, as it may be in the background of a shell.
    run = subprocess.Popen(whole, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    assert run.stdout is not None and run.stdout.readline()
    namespaces = set().union(*kin(mark).values())
    run.send_signal(number)
    code = run.wait(200)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    until = time.monotonic() + 100
    while (left := kin(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    sweep(mark)
    assert not left
    assert len(namespaces) >= 10  # it did run: machine, login node and two hosts
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not any(tmp_path.iterdir())
    new = [folder / name for folder in folders for name in set(os.listdir(folder)) - files[folder]]
    new = [file for file in new if "testbed" in file.name or "prte" in file.name or ("hydra" in file.name and of_host(file))]
    until = time.monotonic() + 100  # those of a cluster that stands beside us go with it, ours would stay
    while (new := [file for file in new if file.exists()]) and time.monotonic() < until:
        time.sleep(0.5)
    assert not new


def of_host(file):
    """True if MPICH's launcher wrote it on a host of a testbed; jobs of others on this machine write such files, too."""
    try:
        return b'"HostName" value="h' in file.read_bytes()
    except OSError:  # gone meanwhile
        return False
