"""pyverbs, the Python interface of rdma-core. It is optional: where it is missing, mpiddl uses MPI."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from mpiddl.errors import TransportError


class Library(NamedTuple):
    """The modules of pyverbs that are used here. ``enums`` has the constants of libibverbs."""

    enums: Any
    device: Any
    addr: Any
    pd: Any
    cq: Any
    mr: Any
    qp: Any
    wr: Any
    error: type[Exception]


@cache
def load() -> Library:
    """Import pyverbs. A `TransportError` if it is missing or cannot be loaded."""
    try:
        try:
            enums = import_module("pyverbs.enums")
        except ModuleNotFoundError:  # renamed in rdma-core 48
            enums = import_module("pyverbs.libibverbs_enums")
        device, addr, pd, cq, mr, qp, wr, error = (import_module(f"pyverbs.{name}") for name in (
            "device", "addr", "pd", "cq", "mr", "qp", "wr", "pyverbs_error"))
        return Library(enums, device, addr, pd, cq, mr, qp, wr, error.PyverbsError)
    except ModuleNotFoundError as error:
        missing = "pyverbs is missing" if (error.name or "").partition(".")[0] == "pyverbs" else f"{error.name} is missing"
        raise TransportError(f"verbs: {missing}; install the package python3-pyverbs of your distribution, or `pip install "
                             "pyverbs` beside rdma-core") from None
    except ImportError as error:
        raise TransportError(f"verbs: pyverbs does not load: {error}; expected the libraries of rdma-core in the version of "
                             "pyverbs") from None


def copies_on_fork() -> bool:
    """Whether the kernel copies registered pages when a process forks, so that they need not be taken from the new process."""
    try:
        fork, enums = import_module("pyverbs.fork"), load().enums
    except ImportError:
        return False
    return bool(fork.is_fork_initialized() == getattr(enums, "IBV_FORK_UNNEEDED", 2))
