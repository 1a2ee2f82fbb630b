"""SipHash-2-4: a 64-bit tag of a message. Only a program that has the key can compute it.

Cost: about a byte a cycle. Source: J.-P. Aumasson, D. J. Bernstein, SipHash: a fast short-input PRF, INDOCRYPT 2012,
doi:10.1007/978-3-642-34931-7_28; the test vectors are those of appendix A and of the reference implementation.
"""

from __future__ import annotations

import numpy as np

from mpiddl.kernels.jit import inlined, kernel

STARTS = np.frombuffer(b"somepseudorandomlygeneratedbytes", ">u8").astype(np.uint64)
"""What the state is before the key."""

COMPRESSIONS, FINALISATIONS = 2, 4
"""Rounds for each word, and at the end."""

S0, S1, S2, S3 = (np.uint64(start) for start in STARTS)
LAST, BYTE, BITS = np.uint64(0xFF), np.uint64(56), np.uint64(64)


@inlined
def _turned(word, bits):
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@inlined
def _round(a, b, c, d):
    a += b
    c += d
    b = _turned(b, 13) ^ a
    d = _turned(d, 16) ^ c
    a = _turned(a, 32) + d
    c += b
    d = _turned(d, 21) ^ a
    b = _turned(b, 17) ^ c
    return a, b, _turned(c, 32), d


@kernel
def siphash(key, words, nbytes):
    """The tag of the first `nbytes` bytes of `words`, uint64; the bytes behind them, up to the next word, are zero.

    `key`: two words of uint64. Words are those of a little-endian machine.
    """
    a, b, c, d = key[0] ^ S0, key[1] ^ S1, key[0] ^ S2, key[1] ^ S3
    whole = nbytes // 8
    for index in range(whole + 1):
        word = words[index] if index < whole or nbytes % 8 else np.uint64(0)
        if index == whole:
            word |= np.uint64(nbytes) << BYTE
        d ^= word
        for _ in range(COMPRESSIONS):
            a, b, c, d = _round(a, b, c, d)
        a ^= word
    c ^= LAST
    for _ in range(FINALISATIONS):
        a, b, c, d = _round(a, b, c, d)
    return a ^ b ^ c ^ d
