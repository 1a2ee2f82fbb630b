"""Averages in a few bits per number: ranks send their change since the last average, and later its rounding error.

All ranks hold the same parameters after an average. Each rank then quantises its change since, plus the earlier rounding error
(error feedback). The owner of a part of the mean quantises that part in the same way. Only the last rounding errors are lost.
Cost: `mpiddl.collectives.mean_quantised`. Memory: 2 V and V/P, which checkpoints hold.
Sources: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv:1901.09847, algorithm 2 (error feedback); for
changes over several steps, Basu et al., NeurIPS 2019, arXiv:1906.02367, algorithm 1 (Qsparse-local-SGD) [interpretation: the
mean is quantised, too].
Law: with one rank, or bits = 0, it changes no bit.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from mpiddl.collectives.mean_quantised import Message, mean_quantised, owned
from mpiddl.errors import UsageError
from mpiddl.transport.agree import check_equal
from mpiddl.transport.comm import Comm

BITS = 8, 4, 2
"""Those of `mpiddl.kernels.quantise.MIDDLES`, without loading it."""


def check_bits(bits: int) -> None:
    """Raise a `UsageError` for an unsupported number of bits."""
    if bits and bits not in BITS:
        raise UsageError(f"bits: got {bits}, expected {', '.join(map(str, BITS))}, or 0 for no compression")


def few_bits_warm(size: int, dtype: np.dtype, bits: int) -> None:
    """Compile the kernels of an average of ``size`` ranks, or load them from the cache, before the first exchange."""
    if bits and size > 1:
        message = Message(1, bits)
        message.write(np.zeros(1, dtype))
        message.add_to(np.zeros(1, dtype))


def few_bits_state(comm: Comm, params: np.ndarray, bits: int) -> dict[str, Any]:
    """The entries of a strategy's state; none if all bits are sent or there is one rank. Collective.

    Raises a `MismatchError` on every rank if the initial ``params`` differ: the difference would remain.
    """
    if not bits or comm.size == 1:
        return {}
    check_equal(comm, f"gossip with bits={bits}", {"parameters to begin with (checksum)": crc32(params.data)})
    part = owned(params.size, comm.size, comm.rank)
    return {"anchor": params.copy(), "unsent": np.zeros_like(params), "owed": np.zeros_like(params[part])}


def few_bits_average(comm: Comm, state: dict[str, Any], params: np.ndarray, bits: int, trainers: int) -> None:
    """Replace ``params`` by their mean over the first ``trainers`` ranks, to rounding; the others have not changed theirs.

    `few_bits_taken` follows. Collective.
    """
    if "anchor" in state:
        state["unsent"] += params
        state["unsent"] -= state["anchor"]
        mean_quantised(comm, state["unsent"], state["owed"], params, bits, trainers)
        params += state["anchor"]


def few_bits_taken(state: dict[str, Any], params: np.ndarray) -> None:
    """Called after an average and its consequences; all ranks hold the same ``params``."""
    if "anchor" in state:
        state["anchor"][:] = params
