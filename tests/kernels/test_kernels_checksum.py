"""A checksum tells apart what differs, and only that."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from mpiddl.kernels.checksum import checksum

pytestmark = pytest.mark.no_mpi


def of(array):
    return int(checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint64)))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_the_same_bits_have_the_same_checksum(size):
    given = np.random.default_rng(size).standard_normal(size)
    assert of(given) == of(given.copy())


@pytest.mark.parametrize("size", [1, 3, 4, 6, 17])
def test_any_bit_counts_wherever_it_is(size):
    words = np.random.default_rng(size).integers(2**64, size=size, dtype=np.uint64)
    seen = {int(checksum(words))}
    for place in range(size):
        for bit in range(64):
            other = words.copy()
            other[place] ^= np.uint64(1) << np.uint64(bit)
            seen.add(int(checksum(other)))
    assert len(seen) == 1 + 64 * size


def test_signs_and_places_count():
    block = np.random.default_rng(0).standard_normal((100, 6))
    others = [-block, block * [1, 1, -1, 1, 1, 1], block[::-1], block[:, ::-1], np.roll(block, 4), np.abs(block)]
    others += [np.where(np.arange(100)[:, None] // 2 == pair, -block, block) for pair in range(50)]
    assert len({of(array) for array in [block, *others]}) == 1 + len(others)


def test_two_signs_do_not_cancel():
    words = np.random.default_rng(1).integers(2**64, size=12, dtype=np.uint64)
    seen = {int(checksum(words))}
    for one, two in combinations(range(12), 2):
        other = words.copy()
        other[[one, two]] ^= np.uint64(1) << np.uint64(63)
        seen.add(int(checksum(other)))
    assert len(seen) == 1 + 12 * 11 // 2
