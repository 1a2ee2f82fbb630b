"""How ranks of a `torch.distributed` program meet: rank, size and a store from MPI, without MASTER_ADDR or torchrun.

torch wants a key-value store beside the backend. Rank 0 opens a `TCPStore` on a free port; the addresses of its host travel
over MPI. Each rank connects to the first of them that answers, so hosts with several networks need no setting.

Cost: three all-gathers of small objects, one TCP connection a rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from mpiddl.errors import CommError, MismatchError
from mpiddl.transport.multicast.interfaces import interfaces
from mpiddl.transport.start import start_mpi
from mpiddl.transport.uncaught import print_once

LOCALHOST = "127.0.0.1"

ANSWER_S = 2.0
"""How long an address may take to answer. Hosts of a cluster answer in milliseconds; addresses of other networks never do."""

LIBUV = (2, 13)
"""The oldest torch that is known to take an open socket in its newer kind of store; 2.5 refuses it."""

TIMEOUT = timedelta(minutes=30)
"""torch's own default."""


def meet(url: str, timeout: timedelta = TIMEOUT, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """The rendezvous of "mpi://": yields the store, this rank and the number of ranks.

    Raises
    ------
    CommError
        No MPI library; MPI came up with other ranks than the launcher promised; no rank reaches the store.
    MismatchError
        On every rank: RANK, WORLD_SIZE or the arguments of the call differ from MPI.

    Communication
    -------------
    Collective over COMM_WORLD: three all-gathers.
    """
    MPI = start_mpi(os.environ)
    world = MPI.COMM_WORLD
    print_once()
    asked = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
    check_world(world, asked | _environment(os.environ))
    yield _store(world, timeout), world.rank, world.size
    raise CommError('init_method: got "mpi://" for a second rendezvous of elastic training, which MPI cannot serve')


def check_world(world: Any, asked: Mapping[str, str]) -> None:
    """Raise a `MismatchError`, on all ranks, unless what the program or the environment asks for is what MPI has."""
    own = {"rank": world.rank, "world_size": world.size, "RANK": world.rank, "WORLD_SIZE": world.size}
    wrong = [f"{name}={value}" for name, value in asked.items() if str(own[name]) != value]
    told = world.allgather(wrong)
    for rank, theirs in enumerate(told):
        if theirs:
            raise MismatchError(
                f"init_process_group: got {', '.join(theirs)} on rank {rank} of {world.size} MPI ranks, expected "
                f"rank {rank} and {world.size} ranks as in MPI; start the program with mpiexec -n N or srun instead of "
                "torchrun, and unset RANK and WORLD_SIZE"
            )


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in ("RANK", "WORLD_SIZE") if env.get(name)}


def _store(world: Any, timeout: timedelta) -> Any:
    """A `TCPStore` that all ranks of ``world`` share."""
    from torch import __version__ as version
    from torch.distributed import TCPStore

    store, told = None, None
    if world.rank == 0:
        # torch's own socket takes IPv6 too. For each IPv4 peer it then asks the name service with an address that is in no
        # hosts file, and it serves no rank until the answer comes, or for 5 s.
        with socket.create_server(("", 0)) as listening:
            store = TCPStore(LOCALHOST, listening.getsockname()[1], is_master=True, wait_for_workers=False, timeout=timeout,
                             master_listen_fd=listening.detach(), use_libuv=version >= LIBUV)
        addresses = [each.address for each in interfaces() if not each.loopback]
        told = socket.gethostname(), store.port, addresses
    host, port, addresses = world.bcast(told)
    if world.rank:
        near = [LOCALHOST] if host == socket.gethostname() else []
        found = _first_answer([*near, *addresses], port)
        store = TCPStore(found, port, is_master=False, timeout=timeout) if found else None
    lost = [rank for rank, has in enumerate(world.allgather(store is not None)) if not has]
    if lost:
        raise CommError(f"store: got no answer at port {port} of rank 0 ({', '.join(addresses) or host}) on ranks {lost}, "
                        "expected a network that all hosts share; ask for a firewall rule, or pass store= or init_method= "
                        "to init_process_group")
    return store


def _first_answer(addresses: Sequence[str], port: int) -> str:
    """The first address at which something listens on ``port``; "" if there is none. A `TCPStore` alone would print pages."""
    for address in addresses:
        with suppress(OSError), socket.create_connection((address, port), ANSWER_S):
            return address
    return ""
