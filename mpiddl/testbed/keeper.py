"""Pid 1 of a cluster: ``unshare ... python -m mpiddl.testbed.keeper NAME``. When it ends, all ends.

Everything is inside its namespaces: the login node, which is also the switch, and in it the hosts. The kernel ends every
process of a pid namespace with its first, and takes down networks and mounts with their last process; so nothing
can be left behind, in whatever way the keeper ends. A cluster for one run ends when the pipe that is the
keeper's standard input is closed, which the kernel does even for a process killed by SIGKILL.

Outside namespaces of its own it would mount over the machine's /proc and end every process of the machine. So it starts only
as the first process of a pid namespace, with another mount namespace than the caller's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from mpiddl.testbed import kernel, links
from mpiddl.testbed.hosts import SHARED, TMPDIR, boot, own_run, tool
from mpiddl.testbed.plan import LOGIN, SUBNET, Plan

PLAN_FILE = "plan.json"
MODULE = "mpiddl.testbed.keeper"
_REMEDY = "expected to be started by `mpiddl testbed up` or `with mpiddl.testbed.Testbed(...)`, which make them"

# on HOST COMMAND...: run it inside that host, in the folder we are in.
_ON = f"""#!/bin/sh
host=$1; shift
if [ "$host" = {LOGIN} ]; then exec "$@"; fi
pid=$(cat {SHARED}/"$host".pid 2>/dev/null) || {{ echo "mpiddl: error: host $host: it is down" >&2; exit 255; }}
exec nsenter -t "$pid" -n -u -i -m -p -- /bin/sh -c 'cd -- "$0" && exec "$@"' "$PWD" "$@"
"""

# Stands in for ssh: agent [options] HOST WORDS..., the words being a line for the shell there.
_AGENT = f"""#!/bin/sh
while :; do case $1 in -[olpi]) shift 2;; -*) shift;; *) break;; esac; done
host=${{1#*@}}; shift
case $host in {SUBNET}.*) host=h${{host##*.}};; esac
exec {SHARED}/on "$host" /bin/sh -c "$*"
"""


def main(name: str) -> None:
    """Build the cluster asked for on standard input, say so in a line of JSON, and hold it."""
    try:
        real_pid, mounts = int(os.readlink("/proc/self")), mount_namespace()  # before /proc is our own: as the machine counts
    except OSError as error:
        sys.exit(f"testbed: the keeper cannot read /proc: {error.strerror}; expected a Linux machine with /proc")
    if os.getpid() != 1 or real_pid == 1:  # /proc of the same pid namespace: the first process of a container
        sys.exit(f"testbed: the keeper has no pid namespace of its own: got process {os.getpid()}; {_REMEDY}")
    try:
        asked = json.loads(sys.stdin.readline())
        plan, outside = Plan(**asked["plan"]), asked["outside"]
    except (ValueError, KeyError, TypeError):
        sys.exit(f"testbed: the keeper got no plan of a cluster in the first line of its standard input; {_REMEDY}")
    if outside == mounts:
        sys.exit(f"testbed: the keeper has the caller's mount namespace, {outside}; {_REMEDY}")
    try:
        _login(plan)
        boot(list(range(1, plan.hosts + 1)), plan)
        answer: dict[str, object] = {"pid": real_pid}
    except Exception as error:
        answer = {"error": f"{error}"}
    print(json.dumps(answer), flush=True)
    if "error" not in answer:
        _hold(plan, forever=bool(name))


def mount_namespace() -> str:
    """The name of this process's mount namespace: equal for processes that see the same mounts."""
    return os.readlink("/proc/self/ns/mnt")


def _login(plan: Plan) -> None:
    """The login node: it holds the switch, and starts what runs on the hosts."""
    socket.sethostname(LOGIN)
    kernel.mount("proc", "/proc", "proc", kernel.RESTRICTED)
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=1777")
    own_run(Path("/run"))
    SHARED.mkdir()
    (SHARED / PLAN_FILE).write_text(json.dumps(asdict(plan)))
    (SHARED / "hosts").write_text(links.hosts_file(plan))
    kernel.mount(str(SHARED / "hosts"), "/etc/hosts", flags=kernel.BIND)
    for script, text in (("on", _ON), ("agent", _AGENT)):
        (SHARED / script).write_text(text)
        (SHARED / script).chmod(0o755)
    os.environ["TMPDIR"] = TMPDIR
    links.silence()
    tool(["ip", "-batch", "-"], links.switch_commands())


def _hold(plan: Plan, forever: bool) -> NoReturn:
    """Wait for the end; processes whose parents have died are ours, and are buried by the kernel since we ignore them."""
    since = time.time()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if forever:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigwait([signal.SIGTERM])
    else:
        sys.stdin.read()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(-1, signal.SIGKILL)  # all in here but ourselves
        os.waitpid(-1, 0)  # returns when none of them is left
    _clear(plan, since)
    os._exit(0)


def _clear(plan: Plan, since: float, folder: Path = Path("/tmp")) -> None:
    """Take away what MPICH's launcher leaves on the shared disk: a description of each host, wherever TMPDIR points to.

    Its name tells nothing, so those go that were written here since the cluster stood and describe a host of its names.
    Ranks read them when they start; another cluster of ours would have to be starting at this moment to miss one.
    """
    marks = [f'"HostName" value="{name}"'.encode() for name in plan.names]
    for file in folder.glob("hydra_hwloc_xmlfile_*"):
        with contextlib.suppress(OSError):
            about = file.stat()
            if about.st_mtime >= since and about.st_uid == os.geteuid() and any(mark in file.read_bytes() for mark in marks):
                file.unlink()


def boot_again(number: int) -> None:
    """Start a host that was killed: the same name and address, another boot id."""
    if MODULE.encode() not in Path("/proc/1/cmdline").read_bytes().split(b"\0"):
        sys.exit(f"testbed: host {number} can only be booted inside a cluster; expected `mpiddl testbed boot h{number}`")
    plan = Plan(**json.loads((SHARED / PLAN_FILE).read_text()))
    try:
        boot([number], plan)
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        boot_again(int(sys.argv[2]))
    else:
        main(sys.argv[1])
