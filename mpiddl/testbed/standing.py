"""Bringing clusters up, and finding those that stand. There is no file of them: the processes are what there is."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.testbed.cluster import Cluster, keeper_command, keeper_env
from mpiddl.testbed.keeper import mount_namespace
from mpiddl.testbed.plan import Plan
from mpiddl.testbed.rights import TestbedError, unshare_command

DEFAULT = "default"

_LIMIT_S = 100.0
_LIMIT_PER_HOST_S = 0.5
_GOOD_ORDER_S = 30.0


def bring_up(plan: Plan, name: str = "", env: Mapping[str, str] = os.environ) -> tuple[Cluster, subprocess.Popen[str]]:
    """A new cluster, and the process that stands for it here.

    It ends when the process's ``stdin`` is closed, so at the latest with us; one with a name stands until it is ended.
    """
    if name:
        check_name(name)
    if name and find(name):
        raise TestbedError(f"testbed: {words(name)} is already up; `mpiddl testbed down{option(name)}` stops it")
    # In a session of its own: Ctrl-C at the terminal is for the program, and for us.
    process = subprocess.Popen(
        [*unshare_command(env), "--", *keeper_command(), name], env=keeper_env(env), cwd="/", start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        answer = _answer(process, plan)
    except BaseException:
        discard(process)
        raise
    return Cluster(answer["pid"]), process


def _answer(process: subprocess.Popen[str], plan: Plan) -> dict[str, int]:
    """The keeper's word that the cluster stands."""
    assert process.stdin and process.stdout and process.stderr  # for mypy: all three are pipes
    process.stdin.write(json.dumps({"plan": asdict(plan), "outside": mount_namespace()}) + "\n")
    process.stdin.flush()
    limit_s = _LIMIT_S + _LIMIT_PER_HOST_S * plan.hosts
    if not select.select([process.stdout], [], [], limit_s)[0]:
        raise TestbedError(f"testbed: the cluster did not come up within {limit_s:g} s")
    line = process.stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"error": process.stderr.read().strip()}
    if "error" in answer:
        raise TestbedError(f"testbed: the cluster did not come up: {answer['error']}")
    return answer


def discard(process: subprocess.Popen[str]) -> None:
    """End a cluster by its process; returns when all of it has ended."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GOOD_ORDER_S)
    # Not unshare itself: it waits for the keeper, which ends after all other processes.
    for pid in _children(process.pid) or [process.pid] if process.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def find(name: str) -> Cluster | None:
    """The cluster of that name that this user has up."""
    wanted = os.fsencode("\0".join([*keeper_command()[1:], name, ""]))
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            inside = os.readlink(folder / "ns/pid") != os.readlink("/proc/self/ns/pid")
            if inside and (folder / "cmdline").read_bytes().endswith(wanted) and folder.stat().st_uid == os.geteuid():
                return Cluster(int(folder.name))
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return None


def standing(name: str) -> Cluster:
    """The cluster of that name; `TestbedError` if it is not up."""
    check_name(name)
    found = find(name)
    if found is None:
        raise TestbedError(f"testbed: {words(name)} is not up; `mpiddl testbed up{option(name)} --hosts 4` starts it")
    return found


def check_name(name: str) -> None:
    """`UsageError` for what cannot be a cluster's name: runs of their own have none."""
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise UsageError(f"name: got {name!r}, expected a printable name")


def words(name: str) -> str:
    """A cluster as a user would call it."""
    return "the cluster" if name == DEFAULT else f"cluster {name!r}"


def option(name: str) -> str:
    """How a command is told the name."""
    return "" if name == DEFAULT else f" --name {name}"
