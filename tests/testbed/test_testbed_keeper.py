"""The keeper of a cluster starts in namespaces of its own only: elsewhere it would end every process of the machine.

Nothing here may do that if the keeper is wrong: whatever mounts, boots or kills is replaced before it is called.
"""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict

import pytest

from mpiddl.testbed import keeper
from mpiddl.testbed.plan import make_plan

pytestmark = pytest.mark.no_mpi

HERE = os.readlink("/proc/self/ns/mnt")


@pytest.fixture
def began(monkeypatch):
    """What the keeper has begun to do; nothing of it is done."""
    done = []
    for name in ("_login", "boot", "_hold", "tool", "own_run"):
        monkeypatch.setattr(keeper, name, lambda *args, name=name, **options: done.append(name))
    monkeypatch.setattr(keeper, "kernel", None)
    monkeypatch.setattr(os, "kill", lambda *args: done.append("kill"))
    return done


def start(monkeypatch, pid, real_pid, outside):
    """The keeper with these process numbers, in its own and in /proc's pid namespace, and a caller of this mount namespace."""
    real = os.readlink
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(os, "readlink", lambda path: str(real_pid) if path == "/proc/self" else real(path))
    asked = {"plan": asdict(make_plan(2, None, 0.0)), "outside": outside}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked) + "\n"))
    keeper.main("x")


ELSEWHERE = {
    "started by hand": (4711, 4711, "mnt:[1]", "got process 4711"),
    "first process of a container": (1, 1, "mnt:[1]", "no pid namespace of its own"),
    "a pid namespace alone": (1, 4711, HERE, "the caller's mount namespace"),
}


@pytest.mark.parametrize(("pid", "real_pid", "outside", "message"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_outside_namespaces_of_its_own_it_does_nothing(began, monkeypatch, pid, real_pid, outside, message):
    with pytest.raises(SystemExit, match=message):
        start(monkeypatch, pid, real_pid, outside)
    assert began == []


PLAN = asdict(make_plan(2, None, 0.0))
NO_PLAN = {
    "nothing": "",
    "an empty line": "\n",
    "no JSON": "up\n",
    "a list": "[1]\n",
    "no caller's namespace": json.dumps({"plan": PLAN}) + "\n",
    "no plan": json.dumps({"outside": "mnt:[1]"}) + "\n",
    "another plan": json.dumps({"plan": {"ships": 3}, "outside": "mnt:[1]"}) + "\n",
}


@pytest.mark.parametrize("given", NO_PLAN.values(), ids=NO_PLAN)
def test_without_a_plan_it_says_so(began, monkeypatch, given):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "readlink", lambda path: "4711" if path == "/proc/self" else HERE)
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    with pytest.raises(SystemExit, match=r"no plan of a cluster .* expected to be started by"):
        keeper.main("x")
    assert began == []


def test_without_proc_it_says_so(began, monkeypatch):
    def missing(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "readlink", missing)
    with pytest.raises(SystemExit, match="cannot read /proc: No such file or directory"):
        keeper.main("x")
    assert began == []


def test_in_them_it_builds_the_cluster(began, monkeypatch, capsys):
    start(monkeypatch, 1, 4711, "mnt:[1]")
    assert began == ["_login", "boot", "_hold"]
    assert json.loads(capsys.readouterr().out) == {"pid": 4711}


def test_a_host_is_booted_inside_a_cluster_only(began):
    with pytest.raises(SystemExit, match="only be booted inside a cluster"):
        keeper.boot_again(1)
    assert began == []
