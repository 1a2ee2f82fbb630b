"""Averages in a few bits a number: ranks send what has changed since the last one, and later what rounding has lost of it.

All ranks have the same parameters when an average is over. What each has changed since is quantised, with what was lost
before (error feedback); so is the mean, by its owner. Nothing is lost for good, but what is kept at the end.
Cost: `mpiddl.collectives.mean_quantised`. Memory: 2 V and V/P, which checkpoints hold.
Sources: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv:1901.09847, algorithm 2 (error feedback); of
changes over several steps, Basu et al., NeurIPS 2019, arXiv:1906.02367, algorithm 1 (Qsparse-local-SGD) [interpretation: the
mean is quantised, too].
Law: one rank, or bits = 0, is without all this, bit for bit.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from mpiddl.collectives.mean_quantised import Message, mean_quantised, owned
from mpiddl.errors import UsageError
from mpiddl.kernels.quantise import MIDDLES
from mpiddl.transport.agree import check_equal
from mpiddl.transport.base import Comm


def check_bits(bits: int) -> None:
    """Raise a `UsageError` for a number of bits that there is no code for."""
    if bits and bits not in MIDDLES:
        raise UsageError(f"bits: got {bits}, expected {', '.join(map(str, MIDDLES))}, or 0 for all of them")


def few_bits_warm(size: int, dtype: np.dtype, bits: int) -> None:
    """Compile, or load from the cache, what an average of ``size`` ranks calls: seconds that no exchange shall wait for."""
    if bits and size > 1:
        message = Message(1, bits)
        message.write(np.zeros(1, dtype))
        message.add_to(np.zeros(1, dtype))


def few_bits_state(comm: Comm, params: np.ndarray, bits: int) -> dict[str, Any]:
    """What a strategy's state has to hold: nothing, if all bits are sent, or nobody is there to send them to. Collective.

    Raises a `MismatchError` on every rank if ranks begin with other ``params``: they would stay as far apart for good.
    """
    if not bits or comm.size == 1:
        return {}
    check_equal(comm, f"gossip with bits={bits}", {"parameters to begin with (checksum)": crc32(params.data)})
    part = owned(params.size, comm.size, comm.rank)
    return {"anchor": params.copy(), "unsent": np.zeros_like(params), "owed": np.zeros_like(params[part])}


def few_bits_average(comm: Comm, state: dict[str, Any], params: np.ndarray, bits: int) -> None:
    """``params`` becomes the mean of all ranks', but for what rounding loses. `few_bits_taken` follows. Collective."""
    if "anchor" in state:
        state["unsent"] += params
        state["unsent"] -= state["anchor"]
        mean_quantised(comm, state["unsent"], state["owed"], params, bits)
        params += state["anchor"]


def few_bits_taken(state: dict[str, Any], params: np.ndarray) -> None:
    """An average is over, and what follows from it; all ranks have the same ``params``."""
    if "anchor" in state:
        state["anchor"][:] = params
