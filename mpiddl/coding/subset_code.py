"""The published code of coded synchronous SGD: each packet gives each of r receivers a different piece of a gradient.

All subsets: each set T of r workers computes one block. Its gradient, as 32-bit words, is cut into r pieces, one for each
owner; the last piece is filled up with zeros. For each set S of r + 1 workers, each worker N of S sends a packet to the others:

    packet of N for S      sum over the workers k of S other than N of piece T_k[place of N in T_k],  T_k = S without k
    at k                   subtract the pieces of all blocks but T_k, which k has computed; what is left is a piece of T_k

After the packets of all r owners of T_k, k has the whole block. The sum is modulo 2^32, for integers of `clip_quantisation`, or
the exclusive or of the words (``xor``), which returns any bits unchanged: a float64 is two words.
All owners of a block must have the same bits. Otherwise receivers get wrong numbers without an error.

Cost, V = words of a gradient: each worker sends C(n-1, r) packets of V/r words and a header of 2 r words; C(n, r) (n - r) / r V
in all. r = 1 is the exchange without a code; with r = n nothing is sent. Memory of a receiver: V for each block that it does
not compute, C(n-1, r) V.
Source: Li, Maddah-Ali & Avestimehr, A fundamental tradeoff between computation and communication in distributed computing, IEEE
Trans. Inf. Theory 64(1), 2018, arXiv:1604.07086, with gradients as its intermediate values.
Departure from the pseudo-code printed for SGD, which goes through all sets of r blocks of a worker: that is right only for
r = 2 and r = n - 1, and makes 38 times as many packets at n = 8, r = 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from mpiddl.coding.placements import BlockPlacement, all_subsets
from mpiddl.errors import DecodeError, ShapeError, UsageError
from mpiddl.layout import ceil_div

Parts = tuple[tuple[int, int], ...]
"""What a packet adds up: for each receiver, in ascending order, the block and the place of the piece."""


def as_words(array: np.ndarray) -> np.ndarray:
    """The same memory as 32-bit words: ndarray, shape (n,), uint32, for a contiguous array of numbers of 4 or 8 bytes.

    Examples
    --------
    >>> as_words(np.array([-1], np.int32)).tolist(), as_words(np.ones(2)).size
    ([4294967295], 4)
    """
    if array.ndim != 1 or not array.flags.c_contiguous or array.itemsize not in (4, 8):
        raise ShapeError(f"array: got {array.dtype} of shape {array.shape}, expected numbers of 4 or 8 bytes in a contiguous "
                         "array of shape (n,)")
    return array.view(np.uint32)


@dataclass(frozen=True)
class SubsetCode:
    """The code of n ``workers`` with a ``redundancy`` r, on the placement `all_subsets`.

    Parameters
    ----------
    xor : bool
        Combine words by exclusive or, instead of by addition modulo 2^32.

    Raises
    ------
    UsageError
        Unless 1 <= r <= n, or if there are too many sets of workers (`all_subsets`); the same on every rank.
    """

    workers: int
    redundancy: int
    xor: bool = False

    def __post_init__(self) -> None:
        _ = self.placement

    @cached_property
    def placement(self) -> BlockPlacement:
        """The workers that compute each block."""
        return all_subsets(self.workers, self.redundancy)

    @cached_property
    def numbers(self) -> dict[tuple[int, ...], int]:
        """The block of each set of owners."""
        return {owners: number for number, owners in enumerate(self.placement.owners)}

    def subsets(self, worker: int) -> Iterator[tuple[int, ...]]:
        """The sets of r + 1 workers for which ``worker`` sends a packet, one at a time; none for r = n."""
        others = [other for other in range(self.workers) if other != worker]
        return (tuple(sorted((worker, *partners))) for partners in combinations(others, self.redundancy))

    def parts(self, worker: int, subset: tuple[int, ...]) -> Parts:
        """What ``worker`` adds up for ``subset``.

        Examples
        --------
        >>> SubsetCode(3, 2).parts(1, (0, 1, 2))  # for worker 0 of block (1, 2), for worker 2 of block (0, 1)
        ((2, 0), (0, 1))
        """
        blocks = [tuple(other for other in subset if other != receiver) for receiver in subset if receiver != worker]
        return tuple((self.numbers[owners], owners.index(worker)) for owners in blocks)

    def piece_words(self, words: int) -> int:
        """Words of a piece of a gradient of ``words`` words."""
        return ceil_div(words, self.redundancy)

    def packet_words(self, words: int) -> int:
        """Words of a packet: the header and one piece."""
        return 2 * self.redundancy + self.piece_words(words)

    def piece(self, block: np.ndarray, place: int) -> np.ndarray:
        """Piece ``place`` of ``block`` (words,), without the zeros that fill it up."""
        length = self.piece_words(block.size)
        return block[place * length : (place + 1) * length]

    def encode(self, worker: int, subset: tuple[int, ...], blocks: Mapping[int, np.ndarray], out: np.ndarray) -> None:
        """``out`` becomes the packet of ``worker`` for ``subset``: a header, which is `parts`, and the sum of the pieces.

        Parameters
        ----------
        subset : tuple of int
            One of `subsets`.
        blocks : mapping from block to ndarray, shape (words,), uint32
            All blocks that ``worker`` computes.
        out : ndarray, shape (packet_words(words),), uint32

        Raises
        ------
        UsageError, ShapeError
            On this rank alone: a block is missing, or shapes or dtypes do not fit.
        """
        words = check_blocks(self.placement.blocks[worker], blocks)
        check_words("out", out, self.packet_words(words))
        parts = self.parts(worker, subset)
        header, total = out[: 2 * self.redundancy], out[2 * self.redundancy :]
        header[:] = np.ravel(parts)
        total[:] = 0
        for block, place in parts:
            piece = self.piece(blocks[block], place)
            target = total[: piece.size]
            (np.bitwise_xor if self.xor else np.add)(target, piece, out=target)

    def check_parts(self, parts: Parts) -> None:
        """Raise a `DecodeError` unless these are the `parts` of one of the packets of this code.

        Examples
        --------
        >>> SubsetCode(3, 2).check_parts(((2, 0), (0, 1)))
        >>> SubsetCode(3, 2).check_parts(((2, 0), (0, 0)))
        Traceback (most recent call last):
            ...
        mpiddl.errors.DecodeError: packet: got blocks and places [(2, 0), (0, 0)], expected those of a packet of ...
        """
        owners = [self.placement.owners[block] for block, _ in parts if block < len(self.placement.owners)]
        members = set().union(*owners)
        senders = members.intersection(*owners)  # of a real packet one: each of the others is missing in one block
        if self.redundancy == 1 and members:  # such a packet is the same for all receivers
            members.add((min(members) + 1) % self.workers)
        if len(members) != self.redundancy + 1 or self.parts(min(senders), tuple(sorted(members))) != parts:
            raise DecodeError(f"packet: got blocks and places {list(parts)}, expected those of a packet of {self}")


def check_blocks(own: tuple[int, ...], blocks: Mapping[int, np.ndarray]) -> int:
    """The words of each block; a `UsageError` or `ShapeError` unless all of ``own`` are there and alike."""
    if missing := [block for block in own if block not in blocks]:
        raise UsageError(f"blocks: got {sorted(blocks)}, expected also {missing}")
    words = blocks[own[0]].size
    for block in own:
        check_words(f"blocks[{block}]", blocks[block], words)
    return words


def check_words(name: str, array: np.ndarray, words: int) -> None:
    """Raise a `ShapeError` unless ``array`` has the shape (words,) and the dtype uint32."""
    if array.dtype != np.uint32 or array.shape != (words,):
        raise ShapeError(f"{name}: got {array.dtype} of shape {array.shape}, expected uint32 of shape ({words},)")
