"""Whether this machine lets us make namespaces, and how: as root, or as an ordinary user inside a user namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mpiddl.errors import MpiddlError

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_UNSHARE = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
_AS_USER = ["--user", "--map-root-user"]
# What forbids user namespaces, and the value with which it does not.
_SYSCTLS = {
    "kernel/unprivileged_userns_clone": "1",
    "kernel/apparmor_restrict_unprivileged_userns": "0",
    "user/max_user_namespaces": "10000",
    "user/max_net_namespaces": "10000",
}


class TestbedError(MpiddlError):
    """A cluster that cannot be made or used as asked."""

    __test__ = False  # its name looks like a test's to pytest


def with_tools(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with a PATH on which ip and tc are found by an ordinary user, too."""
    return {**env, "PATH": os.pathsep.join([env.get("PATH", os.defpath), "/usr/sbin", "/sbin"])}


def unshare_command(env: Mapping[str, str]) -> list[str]:
    """The ``unshare`` with its options that works here; `TestbedError` says what was tried if none does."""
    path = with_tools(env)["PATH"]
    missing = {name: package for name, package in _TOOLS.items() if not shutil.which(name, path=path)}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise TestbedError(f"testbed: missing programs: {', '.join(missing)}; install them on Debian and Ubuntu: apt "
                           f"install {packages}")
    tried = []
    ways: list[list[str]] = [[], _AS_USER] if os.geteuid() == 0 else [_AS_USER]
    for options in ways:
        command = [*_UNSHARE, *options]
        done = subprocess.run([*command, "true"], env=with_tools(env), capture_output=True, text=True)
        if not done.returncode:
            return command
        tried.append(f"{'as root' if not options else 'in a user namespace'}: {done.stderr.strip()}")
    raise TestbedError(f"testbed: this machine does not allow namespaces. Tried {'; '.join(tried)}. {remedy()}")


def remedy(proc: Path = Path("/proc/sys")) -> str:
    """What to ask an administrator for."""
    values = {name: (proc / name).read_text().strip() for name in _SYSCTLS if (proc / name).is_file()}
    wrong = {name: _SYSCTLS[name] for name, value in values.items() if (value == "0") != (_SYSCTLS[name] == "0")}
    settings = " ".join(f"{name.replace('/', '.')}={value}" for name, value in wrong.items())
    if settings:
        return f"An administrator can allow it: sysctl {settings}"
    return "Expected: root with CAP_SYS_ADMIN (a container: --privileged), or a kernel with user namespaces."
