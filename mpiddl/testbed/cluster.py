"""A cluster that stands, seen from the machine it stands on: entering it, its counters, its hosts' fate."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpiddl.errors import UsageError
from mpiddl.machine.link_counters import Link, read_links
from mpiddl.testbed import links
from mpiddl.testbed.hosts import SHARED, pid_file
from mpiddl.testbed.keeper import MODULE, PLAN_FILE
from mpiddl.testbed.plan import LOGIN, Plan, host_number
from mpiddl.testbed.rights import TestbedError, with_tools

_LIMIT_S = 120.0
_END_S = 30.0


@dataclass(frozen=True)
class Cluster:
    """The cluster whose keeper has process number ``pid``."""

    pid: int

    @property
    def shared(self) -> Path:
        """The cluster's own folder, as it is seen from outside."""
        return Path(f"/proc/{self.pid}/root{SHARED}")

    @property
    def plan(self) -> Plan:
        """What it is now."""
        return Plan(**json.loads((self.shared / PLAN_FILE).read_text()))

    def check_host(self, name: str) -> int:
        """The number of a host of this cluster; `UsageError` if there is none of that name."""
        return host_number(name, self.plan.hosts)

    def is_up(self, name: str) -> bool:
        """True if the host was not killed."""
        return pid_file(name, self.shared).exists()

    def enter(self, command: Sequence[str], host: str = LOGIN, cwd: str | None = None) -> list[str]:
        """The command that runs ``command`` on one of the hosts, in folder ``cwd``."""
        user = os.readlink(f"/proc/{self.pid}/ns/user") != os.readlink("/proc/self/ns/user")
        options = ["--user", "--preserve-credentials"] if user else []
        way = ["nsenter", f"--target={self.pid}", *options, "--mount", "--net", "--uts", "--ipc", "--pid", "--"]
        there = [] if host == LOGIN else [str(SHARED / "on"), host]
        return [*way, "/bin/sh", "-c", 'cd -- "$0" && exec "$@"', cwd or os.getcwd(), *there, *command]

    def links(self) -> dict[str, Link]:
        """What each host's link has carried since the host was booted, counted at the switch."""
        ports = read_links(Path(f"/proc/{self.pid}/net/dev").read_text())
        seen = {name: ports.get(f"v{name[1:]}") for name in self.plan.names}
        # What the switch receives from a host, the host has sent.
        return {name: Link(at[1], at[0], at[3], at[2]) if at else Link(0, 0, 0, 0) for name, at in seen.items()}

    def set_rate(self, rate: int | None, env: Mapping[str, str] = os.environ) -> None:
        """Give all links another rate, each way."""
        plan = replace(self.plan, rate=rate)
        (self.shared / PLAN_FILE).write_text(json.dumps(asdict(plan)))
        alive = [name for name in plan.names if self.is_up(name)]
        self.call(["tc", "-batch", "-"], env, text=links.port_commands([int(name[1:]) for name in alive], rate))
        for name in alive:
            self.call(["tc", "-batch", "-"], env, name, links.shape("eth0", rate) + "\n")

    def kill_host(self, name: str, silently: bool = False, env: Mapping[str, str] = os.environ) -> None:
        """End every process of a host at once, and its network with them.

        The kernel still closes its connections, as it does for a program that crashes; ``silently`` first cuts its
        cable, as when power is lost: the others hear nothing any more.
        """
        number = self.check_host(name)
        if not self.is_up(name):
            raise UsageError(f"host: {name} is already down; `mpiddl testbed boot {name}` starts it")
        if silently:
            self.call(["ip", "link", "set", f"v{number}", "down"], env)
        file = pid_file(name, self.shared)
        pid = file.read_text()
        file.unlink()
        # Connections whose ends were cut off keep a network alive, and its cable with it.
        unplug = f"ip link delete v{number} 2>/dev/null || true"
        self.call(["/bin/sh", "-c", f"kill -9 {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.01; done; {unplug}"], env)

    def boot(self, name: str, env: Mapping[str, str] = os.environ) -> None:
        """Start a host that was killed: the same name and address, a new boot id."""
        number = self.check_host(name)
        if self.is_up(name):
            raise UsageError(f"host: {name} is already up; `mpiddl testbed kill-host {name}` ends it")
        self.call([*keeper_command(), "boot", str(number)], keeper_env(env))

    def call(self, command: Sequence[str], env: Mapping[str, str], host: str = LOGIN, text: str = "") -> str:
        """What a command on one of the hosts prints; it may leave daemons behind. `TestbedError` if it fails."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # daemons would hold a pipe open
            whole = self.enter(command, host, cwd="/")
            done = subprocess.run(whole, env=with_tools(env), input=text, stdout=out, stderr=err, text=True, timeout=_LIMIT_S)
            out.seek(0)
            err.seek(0)
            if done.returncode:
                raise TestbedError(f"testbed: {' '.join(command)[:80]} on {host} failed: {err.read().strip()}")
            return out.read()

    def end(self) -> None:
        """Take it down. The keeper ends last, when all other processes have ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        with open(handle) as ended:
            for number in (signal.SIGTERM, signal.SIGKILL):
                signal.pidfd_send_signal(handle, number)
                if select.select([ended], [], [], _END_S)[0]:
                    return
        raise TestbedError(f"testbed: the cluster did not end within {2 * _END_S:g} s")


def keeper_command() -> list[str]:
    """Python running the keeper's module."""
    return [sys.executable, "-m", MODULE]


def keeper_env(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for it: with ip and tc on the PATH, and this very mpiddl, wherever it lies."""
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, env.get("PYTHONPATH", "")]
    return with_tools(env) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
