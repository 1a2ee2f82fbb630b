"""One host of the cluster: namespaces of its own, held by a process that is pid 1 inside.

A host has its own network, hostname, shared memory, processes, /proc, /sys, /dev/shm, /run and boot id; the disk is
everybody's, as with NFS. What is needed:

- The ipc namespace, or UCX takes shared memory between "hosts" and the links carry nothing.
- A boot id of its own, by which libraries tell machines apart.
- A TMPDIR of its own (/run/tmp): PRRTE names its session folders by pid, and pids repeat from host to host.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import uuid
from pathlib import Path
from typing import NoReturn

from mpiddl.testbed import kernel, links
from mpiddl.testbed.plan import Plan

# The same folder on the login node and all hosts; it vanishes with them.
SHARED = Path("/run/testbed")
TMPDIR = "/run/tmp"
_TOOL_LIMIT_S = 60.0


def pid_file(name: str, shared: Path = SHARED) -> Path:
    """The file with the host's pid 1, as the login node counts; there is none while the host is down."""
    return shared / f"{name}.pid"


def tool(command: list[str], text: str = "") -> None:
    """Run ip or tc; an `OSError` with its words if it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TOOL_LIMIT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def boot(numbers: list[int], plan: Plan) -> None:
    """Start hosts, all at a time, from the login node; an `OSError` that says what failed on which."""
    pipes = {number: _start(number, plan) for number in numbers}
    faults = {number: _read(pipe) for number, pipe in pipes.items()}
    for number, fault in faults.items():
        if fault:
            raise OSError(f"h{number}: {fault}")
    tool(["ip", "-batch", "-"], links.plug_commands(numbers))
    tool(["tc", "-batch", "-"], links.port_commands(numbers, plan.rate))
    if plan.loss:
        _lose(numbers, plan.loss)


def _lose(numbers: list[int], loss: float) -> None:
    """Let packets get lost on the way to these hosts, in whichever way this machine offers."""
    try:
        tool(["tc", "-batch", "-"], links.loss_commands(numbers, loss))
    except OSError as without_bpf:
        try:
            tool(["nft", "-f", "-"], links.loss_rules(loss))
        except OSError as without_nft:
            ways = f"a bpf filter of tc ({without_bpf}) and nftables ({without_nft})"
            raise OSError(f"loss: this machine cannot drop packets; tried {ways}") from None


def _start(number: int, plan: Plan) -> int:
    """A process that becomes the host; what it writes into the pipe returned is an error."""
    pipe, end = os.pipe()
    if not os.fork():
        _become(number, plan, end)
    os.close(end)
    return pipe


def _read(pipe: int) -> str:
    with open(pipe, errors="replace") as text:
        return text.read()


def _become(number: int, plan: Plan, end: int) -> NoReturn:
    """Never returns, whatever happens: the caller's code must not run twice."""
    try:
        kernel.unshare(kernel.NEWNET | kernel.NEWUTS | kernel.NEWIPC | kernel.NEWNS)
        socket.sethostname(f"h{number}")
        links.silence()
        links.steady()
        tool(["ip", "-batch", "-"], links.host_commands(number, plan.loss))
        tool(["tc", "-batch", "-"], links.shape("eth0", plan.rate) + "\n")
        kernel.unshare(kernel.NEWPID)  # last: the first process started after it is the host's pid 1
        pid = os.fork()
        if pid:
            pid_file(f"h{number}").write_text(str(pid))
        else:
            _furnish(f"h{number}")
            _hold(f"h{number}")
    except BaseException as error:
        os.write(end, f"{error}".encode())
        os._exit(1)
    os._exit(0)


def _furnish(name: str) -> None:
    """The host's own file systems."""
    boot_id = SHARED / f"{name}.boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    kernel.mount("proc", "/proc", "proc", kernel.RESTRICTED)
    kernel.mount(str(boot_id), "/proc/sys/kernel/random/boot_id", flags=kernel.BIND)
    kernel.mount("sysfs", "/sys", "sysfs", kernel.RESTRICTED)
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=1777")
    run = SHARED / f"{name}.run"
    run.mkdir(exist_ok=True)
    own_run(run)
    (run / SHARED.name).mkdir()
    kernel.mount(str(SHARED), str(run / SHARED.name), flags=kernel.BIND)
    kernel.mount(str(run), "/run", flags=kernel.MOVE)


def own_run(folder: Path) -> None:
    """An empty ``/run``, to be, in ``folder``."""
    kernel.mount("tmpfs", str(folder), "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=755")
    (folder / "lock").mkdir()
    (folder / Path(TMPDIR).name).mkdir()
    (folder / Path(TMPDIR).name).chmod(0o1777)


def _hold(name: str) -> NoReturn:
    """Become a small program that waits; the kernel buries its dead children, since it ignores them."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.chdir("/")
    os.execvp("sleep", [f"host-{name}", "infinity"])
