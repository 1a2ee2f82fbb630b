"""The few system calls of Linux that namespaces need and Python 3.11 does not have."""

from __future__ import annotations

import ctypes
import os

# linux/sched.h
NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
# linux/mount.h
NOSUID, NODEV, NOEXEC, BIND, MOVE = 2, 4, 8, 4096, 8192

# Inside a user namespace the kernel grants a new /proc or /sys only if it is as restricted as the machine's own.
RESTRICTED = NOSUID | NODEV | NOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags`` for new ones; of `NEWPID` only processes started from now on."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount ``source`` on ``target``, as mount(2) does."""
    texts = [text.encode() for text in (source, target, kind)]
    answer = _libc.mount(*texts, ctypes.c_ulong(flags), options.encode())
    _check(answer, f"mount {kind or source} on {target}")


def _check(answer: int, what: str) -> None:
    if answer:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
