"""The ranks of a communicator over verbs: opened once, with the threshold that `mpiddl tune` has found."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpiddl.errors import MpiddlError
from mpiddl.transport.agree import tried
from mpiddl.transport.comm import Comm
from mpiddl.transport.verbs.messages import EAGER_BYTES
from mpiddl.transport.verbs.transport import DEVICE, VerbsComm, connect, usual_depth
from mpiddl.tuning.place import cluster_name, processor_name, table_path
from mpiddl.tuning.rule import EAGER, MESSAGE, RENDEZVOUS
from mpiddl.tuning.table import read_table

BUFFERS_BYTES = 64 << 20
"""Of a rank, at most, if a table asks for more than `EAGER_BYTES`."""


def over_verbs(comm: Comm) -> VerbsComm:
    """The same ranks over verbs, kept with ``comm``. Collective at the first call; errors are those of `connect`."""

    def opened() -> VerbsComm:
        copied = eager_bytes(comm, os.environ, table_path(os.environ))
        return connect(comm.Create(range(comm.size)), os.environ.get(DEVICE, ""), eager_bytes=copied)

    found: VerbsComm = comm.kept("verbs", opened)
    return found


def works(comm: Comm, aloud: bool = True) -> bool:
    """Whether verbs work between the ranks of ``comm``; if not, rank 0 prints a warning once, if ``aloud``.

    Collective at the first call.
    """
    return tried(comm, "verbs", lambda: over_verbs(comm), aloud)


def eager_bytes(comm: Comm, env: Mapping[str, str], table: Path | None) -> int:
    """Up to this size a message is copied into a registered buffer: by the ``table``, if it has messages of this cluster and
    processor; else `EAGER_BYTES`.

    Collective: what rank 0 finds counts.
    """
    found: int = comm.setup_allgather(_measured(env, table) if comm.rank == 0 else 0)[0]
    return min(found, max(EAGER_BYTES, BUFFERS_BYTES // (2 * usual_depth(comm.size) * comm.size)))


def _measured(env: Mapping[str, str], table: Path | None) -> int:
    """The size with which the geometric mean of the times is shortest: a single size may be measured wrongly."""
    here = cluster_name(env, socket.gethostname()), processor_name()
    try:
        entries = read_table(table).entries if table is not None and table.exists() else ()
    except (MpiddlError, OSError):  # the choice of algorithms reports it
        return EAGER_BYTES
    for entry in reversed(entries):  # the newest is last
        if entry.call == MESSAGE and entry.place[:2] == here and {EAGER, RENDEZVOUS} <= entry.seconds.keys():
            eager, rendezvous = (np.log(entry.seconds[name]) for name in (EAGER, RENDEZVOUS))
            count = min(range(len(eager) + 1), key=lambda count: eager[:count].sum() + rendezvous[count:].sum())
            return (0, *entry.sizes)[count]
    return EAGER_BYTES
