"""The receiver of the published code (`mpiddl.coding.subset_code`): blocks of other workers from packets, in any order.

A packet for a set of r + 1 workers adds up r pieces. A receiver in that set has computed r - 1 of these blocks, and subtracts
their pieces; what is left is one piece of the block that it lacks. r packets make that block.

Cost, V = words of a gradient: V/r words written, and V (r-1)/r read, for each packet. Memory: V for each of the C(n-1, r)
blocks that the worker does not compute, from the start.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpiddl.coding.subset_code import SubsetCode, check_blocks
from mpiddl.errors import DecodeError, UsageError


class SubsetDecoder:
    """What one worker recovers from the packets of a step.

    Parameters
    ----------
    code : SubsetCode
    worker : int
        The receiver.
    blocks : mapping from block to ndarray, shape (words,), uint32
        All blocks that ``worker`` computes. They must not change until the last packet has come.

    Raises
    ------
    UsageError, ShapeError
        On this rank alone: a block is missing, or shapes or dtypes do not fit.

    Examples
    --------
    >>> from mpiddl.coding.subset_code import as_words
    >>> code = SubsetCode(3, 2, xor=True)
    >>> words = [as_words(np.array(pair)) for pair in ([1.5, 2.5], [0.5, -1.0], [np.pi, 0.0])]
    >>> decoder = SubsetDecoder(code, 2, {1: words[1], 2: words[2]})  # worker 2 lacks block 0, of workers 0 and 1
    >>> packet = np.empty(code.packet_words(4), np.uint32)
    >>> code.encode(0, (0, 1, 2), {0: words[0], 1: words[1]}, packet)
    >>> decoder.add(packet), decoder.add(packet), decoder.missing
    (True, False, 1)
    >>> code.encode(1, (0, 1, 2), {0: words[0], 2: words[2]}, packet)
    >>> decoder.add(packet), decoder.complete, decoder.block(0).view(np.float64).tolist()
    (True, True, [1.5, 2.5])
    """

    def __init__(self, code: SubsetCode, worker: int, blocks: Mapping[int, np.ndarray]):
        self._code = code
        own = code.placement.blocks[worker]
        self._words = check_blocks(own, blocks)
        self._own = {block: blocks[block] for block in own}
        others = [block for block in range(len(code.placement.owners)) if block not in self._own]
        self._found = {block: np.empty((code.redundancy, code.piece_words(self._words)), np.uint32) for block in others}
        self._missing = {(block, place) for block in others for place in range(code.redundancy)}

    @property
    def missing(self) -> int:
        """Number of packets that are still to come."""
        return len(self._missing)

    @property
    def complete(self) -> bool:
        """Whether all blocks are there."""
        return not self._missing

    def add(self, packet: np.ndarray) -> bool:
        """Take one packet. True if it brought a piece that was missing; copies, and packets for others, change nothing.

        Parameters
        ----------
        packet : ndarray, shape (packet_words(words),), uint32
            As it came from the network; not changed.

        Raises
        ------
        DecodeError
            On this rank alone: no packet of this code has such a size or header. Nothing is changed.
        """
        code, size = self._code, self._code.packet_words(self._words)
        if packet.dtype != np.uint32 or packet.shape != (size,):
            raise DecodeError(f"packet: got {packet.dtype} of shape {packet.shape}, expected uint32 of shape ({size},)")
        header, total = packet[: 2 * code.redundancy], packet[2 * code.redundancy :]
        parts = tuple((block, place) for block, place in header.reshape(-1, 2).tolist())
        code.check_parts(parts)
        unknown = [part for part in parts if part[0] not in self._own]
        if len(unknown) != 1 or unknown[0] not in self._missing:
            return False
        block, place = unknown[0]
        self._subtract(total, [part for part in parts if part[0] != block], self._found[block][place])
        self._missing.remove(unknown[0])
        return True

    def _subtract(self, total: np.ndarray, known: list[tuple[int, int]], out: np.ndarray) -> None:
        """``out`` becomes ``total`` without the pieces of blocks that this worker has computed."""
        out[:] = total
        for block, place in known:
            piece = self._code.piece(self._own[block], place)
            target = out[: piece.size]
            (np.bitwise_xor if self._code.xor else np.subtract)(target, piece, out=target)

    def block(self, number: int) -> np.ndarray:
        """The gradient of a block: ndarray, shape (words,), uint32; not to be changed.

        Raises
        ------
        UsageError
            If a piece of it is missing.
        """
        if number in self._own:
            return self._own[number]
        if gaps := sorted(place for block, place in self._missing if block == number):
            raise UsageError(f"block: got {number}, whose pieces {gaps} are missing, expected a block that is complete")
        return self._found[number].reshape(-1)[: self._words]
