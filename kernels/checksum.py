"""A checksum of 64-bit words, at the speed at which they are read."""

from __future__ import annotations

import numpy as np

from .jit import inlined, kernel

FACTOR, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


@kernel
def checksum(words):
    """Of a contiguous 1-D uint64 array; one read per element.

    Each word is mixed into one of four sums side by side, so that no multiplication waits for the one before. What is mixed in
    can be told from the result and what was there before: no single difference is lost, two are by chance, in 2^64 cases one.
    """
    first, second, third, fourth = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    whole = words.size // 4 * 4
    for i in range(0, whole, 4):
        first, second = _mixed(first, words[i]), _mixed(second, words[i + 1])
        third, fourth = _mixed(third, words[i + 2]), _mixed(fourth, words[i + 3])
    for i in range(whole, words.size):
        first = _mixed(first, words[i])
    total = _mixed(first, np.uint64(0))  # once more: the top bits of first and second must not cancel
    return _mixed(_mixed(_mixed(total, second), third), fourth)


@inlined
def _mixed(total, word):
    """Folded down, since a product takes high bits only further up."""
    product = (total ^ word) * FACTOR
    return product ^ (product >> SHIFT)
