"""Numbers in 8, 4 or 2 bits, with one float32 scale for each block of them; what rounding loses stays with the sender.

A number is ``(code - middle) * scale``. With 8 and 4 bits the largest of a block has the largest code, and nothing is lost of
zero; with 2 bits the four levels are those even ones that lose least of normal numbers (Max 1960,
doi:10.1109/TIT.1960.1057548), and there is none for zero: where few of a block change, they take some ten turns to arrive. A
block with a number that is not finite, or with numbers that no float32 scale can tell, has a scale of NaN: all of it arrives
as NaN, and NaN is left.
Cost: an array is read and written once, by `quantise` and by `add_quantised`. Source: Seide et al., Interspeech 2014, for what
is kept [departure: there 1 bit, and other scales].
"""

from __future__ import annotations

from math import inf, nan, sqrt

import numpy as np

from .jit import inlined, kernel

BLOCK = 256
"""Numbers to a scale."""

MIDDLES = {8: 127.0, 4: 7.0, 2: 1.5}
"""By bits: the code of zero, or halfway between those next to it."""

NORMAL_STEP = 0.9957
"""From one of four even levels to the next, in standard deviations."""

LEAST = 1e-30
"""A scale below this is 0: numbers so small are sent as zeros, and kept."""


def quantise(values, scales, codes, bits):
    """Write ``values`` (n,), float32 or float64, as ``scales`` (float32) and ``codes`` (uint8); leave in it what these miss.

    ``scales`` is of n / 256 elements, rounded up, ``codes`` of n * bits / 8, rounded up.
    """
    words = values.view(np.uint32 if values.itemsize == 4 else np.uint64)
    _quantise(values, words, words.dtype.type((1 << (8 * values.itemsize - 1)) - 1), scales, codes, bits,
              values.dtype.type(MIDDLES[bits]))


def add_quantised(values, scales, codes, bits):
    """``values`` (n,) += what ``scales`` and ``codes`` stand for."""
    _add(values, scales, codes, bits, values.dtype.type(MIDDLES[bits]))


@kernel
def _quantise(values, words, magnitude, scales, codes, bits, middle):
    whole = np.empty(BLOCK, np.uint8)
    zero, last = middle - middle, np.int32(middle + middle)
    word = np.empty(1, words.dtype)
    for block in range(scales.size):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, values.size)
        if bits == 2:
            scale = _spread(values, begin, end) * NORMAL_STEP
        else:
            word[0] = _largest(words, begin, end, magnitude)
            scale = word.view(values.dtype)[0] / middle
        scale = np.float32(scale if not scale < LEAST else 0.0)
        if not scale < inf:
            scales[block] = nan
            values[begin:end] = nan
            whole[:] = 0
        else:
            scales[block] = scale
            step = values.dtype.type(scale)
            inverse = values.dtype.type(1) / step if scale > 0 else zero
            part = values[begin:end]
            for i in range(part.size):
                code = min(max(np.int32(np.rint(part[i] * inverse + middle)), np.int32(0)), last)
                part[i] -= (values.dtype.type(code) - middle) * step
                whole[i] = np.uint8(code)
        _pack(whole, end - begin, codes, begin * bits // 8, bits)


@kernel
def _add(values, scales, codes, bits, middle):
    whole = np.empty(BLOCK, np.uint8)
    for block in range(scales.size):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, values.size)
        _unpack(whole, end - begin, codes, begin * bits // 8, bits)
        step = values.dtype.type(scales[block])
        part = values[begin:end]
        for i in range(part.size):
            part[i] += (values.dtype.type(whole[i]) - middle) * step


@inlined
def _largest(words, begin, end, magnitude):
    """As a bit pattern, by which NaN and infinity are larger than all numbers."""
    largest, part = words.dtype.type(0), words[begin:end]
    for i in range(part.size):
        largest = max(largest, part[i] & magnitude)
    return largest


@inlined
def _spread(values, begin, end):
    """The root of the mean square."""
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    whole = begin + (end - begin) // 4 * 4
    for i in range(begin, whole, 4):
        first += np.float64(values[i]) * values[i]
        second += np.float64(values[i + 1]) * values[i + 1]
        third += np.float64(values[i + 2]) * values[i + 2]
        fourth += np.float64(values[i + 3]) * values[i + 3]
    for i in range(whole, end):
        first += np.float64(values[i]) * values[i]
    return sqrt(((first + second) + (third + fourth)) / (end - begin))


@inlined
def _pack(whole, count, codes, at, bits):
    """``count`` of the codes in ``whole``, each in a byte, in bytes of ``codes`` from ``at`` on; the last may be half empty."""
    each = 8 // bits
    for i in range(count, -(-count // each) * each):
        whole[i] = 0
    if bits == 8:
        codes[at : at + count] = whole[:count]
    elif bits == 4:
        for i in range((count + 1) // 2):
            codes[at + i] = whole[2 * i] | whole[2 * i + 1] << 4
    else:
        for i in range((count + 3) // 4):
            codes[at + i] = whole[4 * i] | whole[4 * i + 1] << 2 | whole[4 * i + 2] << 4 | whole[4 * i + 3] << 6


@inlined
def _unpack(whole, count, codes, at, bits):
    """What `_pack` has packed."""
    if bits == 8:
        whole[:count] = codes[at : at + count]
    elif bits == 4:
        for i in range((count + 1) // 2):
            whole[2 * i], whole[2 * i + 1] = codes[at + i] & 15, codes[at + i] >> 4
    else:
        for i in range((count + 3) // 4):
            for j in range(4):
                whole[4 * i + j] = (codes[at + i] >> 2 * j) & 3
