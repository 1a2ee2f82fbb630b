"""The tag of datagrams: the published vectors, and that it depends on each bit of the message and of the key."""

from __future__ import annotations

import numpy as np
import pytest

from mpiddl.kernels.multicast.siphash import siphash

pytestmark = pytest.mark.no_mpi

KEY = np.arange(16, dtype=np.uint8).view(np.uint64)
VECTORS = """310e0edd47db6f72 fd67dc93c539f874 5a4fa9d909806c0d 2d7efbd796666785 b7877127e09427cf 8da699cd64557618
cee3fe586e46c9cb 37d1018bf50002ab 6224939a79f5f593 b0e4a90bdf82009e f3b9dd94c5bb5d7a a7ad6b22462fb3f4 fbe50e86bc8f1e75
903d84c02756ea14 eef27a8e90ca23f7 e545be4961ca29a1"""
"""Tags of b"", b"\\0", b"\\0\\1", ... with the key 0, 1, ..., 15: the first 16 of the reference implementation."""


def tag(message, key=KEY):
    words = np.zeros(-(-len(message) // 8) or 1, np.uint64)
    words.view(np.uint8)[: len(message)] = np.frombuffer(bytes(message), np.uint8)
    return int(siphash(key, words, len(message)))


@pytest.mark.parametrize(("length", "wanted"), enumerate(VECTORS.split()))
def test_published_vectors(length, wanted):
    assert tag(range(length)).to_bytes(8, "little").hex() == wanted


def test_every_bit_counts():
    message = np.random.default_rng(0).integers(0, 256, 43, np.uint8)
    tags = {tag(message), tag(message[:-1]), tag([*message, 0])}
    for bit in range(8 * len(message)):
        other = message.copy()
        other[bit // 8] ^= 1 << bit % 8
        tags.add(tag(other))
    for bit in range(128):
        key = KEY.copy()
        key[bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
        tags.add(tag(message, key))
    assert len(tags) == 3 + 8 * 43 + 128
