"""The mean of all ranks' arrays in a few bits a number, by two steps; what rounding loses is kept for the next mean.

Each rank owns a part of whole blocks. Ranks send the owner of a part what they have of it, quantised
(`mpiddl.kernels.quantise`); the owner adds that up in the order of ranks, quantises the mean and sends it to all. So all have
the same bits, on every MPI library.
Cost a rank: 2 (P-1) messages; (P-1)/P of the quantised bytes, n bits/8 and 4 for each 256 numbers, and P-1 times those of its
own part: about 2 (P-1)/P of them in all. Memory: three times the quantised bytes.
Source: Tang et al., ICML 2019, arXiv:1905.05957, algorithm 1 (DoubleSqueeze) [interpretation: each rank is the server of a
part].
Laws: the sum over ranks of what goes in, with what was unsent, is P times the mean, with what is unsent and owed after it.
"""

from __future__ import annotations

import numpy as np

from mpiddl import kernels
from mpiddl.layout import block
from mpiddl.transport.comm import Comm

GIVEN, TAKEN = 3, 4
"""Tags."""


class Message:
    """Scales and codes of ``count`` numbers in one buffer."""

    def __init__(self, count: int, bits: int):
        split = 4 * -(-count // kernels.quantise.BLOCK)
        self.buffer = np.empty(split + -(-count * bits // 8), np.uint8)
        self._scales, self._codes = self.buffer[:split].view(np.float32), self.buffer[split:]
        self._bits = bits

    def write(self, values: np.ndarray) -> None:
        """Take ``values`` (n,), and leave in them what is lost."""
        kernels.quantise.quantise(values, self._scales, self._codes, self._bits)

    def add_to(self, values: np.ndarray) -> None:
        kernels.quantise.add_quantised(values, self._scales, self._codes, self._bits)


def owned(count: int, size: int, rank: int) -> slice:
    """The part of ``count`` numbers that ``rank`` of ``size`` owns."""
    unit = kernels.quantise.BLOCK
    blocks = block(-(-count // unit), size, rank)
    return slice(min(blocks.start * unit, count), min(blocks.stop * unit, count))


def mean_quantised(comm: Comm, unsent: np.ndarray, owed: np.ndarray, mean: np.ndarray, bits: int, count: int = 0) -> None:
    """``mean`` becomes that of all ranks' ``unsent``, but for what rounding loses.

    Parameters
    ----------
    unsent : ndarray, (n,), float32 or float64
        What this rank has to send; afterwards what of it has not been sent.
    owed : ndarray, the size of `owned`
        What the means of this rank's part have lost so far; it is added, and what is lost now is left.
    mean : ndarray, (n,)
        The same bits on all ranks; nothing of what was in it counts.
    bits : int
        8, 4 or 2.
    count : int
        The sum is divided by it, if other ranks have only zeros; 0: by the number of ranks.
    """
    size, rank = comm.size, comm.rank
    parts = [owned(unsent.size, size, each) for each in range(size)]
    given = [_written(unsent[part], bits) for part in parts]
    theirs = [Message(owed.size, bits) for _ in range(size)]
    theirs[rank] = given[rank]
    _swap(comm, given, theirs, GIVEN)
    total = mean[parts[rank]]  # there is room for it
    total[:] = 0
    for message in theirs:
        message.add_to(total)
    total *= 1 / (count or size)
    owed += total
    means = [Message(part.stop - part.start, bits) for part in parts]
    means[rank].write(owed)
    _swap(comm, [means[rank]] * size, means, TAKEN)
    mean[:] = 0
    for part, message in zip(parts, means, strict=True):
        message.add_to(mean[part])


def _written(values: np.ndarray, bits: int) -> Message:
    message = Message(values.size, bits)
    message.write(values)
    return message


def _swap(comm: Comm, sent: list[Message], arriving: list[Message], tag: int) -> None:
    """Message r of ``sent`` to rank r, message r of ``arriving`` from it; none that is empty, none to oneself."""
    others = [(comm.rank + turn) % comm.size for turn in range(1, comm.size)]
    under_way = [comm.Irecv(arriving[other].buffer, other, tag) for other in others if arriving[other].buffer.size]
    under_way += [comm.Isend(sent[other].buffer, other, tag) for other in others if sent[other].buffer.size]
    for request in under_way:
        request.Wait()
