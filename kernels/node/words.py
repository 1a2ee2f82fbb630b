"""8-byte words that others write too: as flags that count up, as counters, and as locks.

All words are int64, in one array; what others write may be another process's, or a network device's.
"""

from __future__ import annotations

from mpiddl.kernels.jit import kernel
from mpiddl.kernels.lanes import base
from mpiddl.kernels.node.atomics import add, put, replace, wait_for


@kernel
def put_word(words, index, value):
    """Store with release: what was written before is seen before."""
    put(base(words) + 8 * index, value)


@kernel
def await_word(words, index, least, patience):
    """Whether the word is `least` or more, after up to `patience` more looks at it."""
    return wait_for(base(words) + 8 * index, least, patience)


@kernel
def fetch_add(words, index, value):
    """Add to a word; returns what was there before."""
    return add(base(words) + 8 * index, value)


@kernel
def compare_swap(words, index, expected, value):
    """Replace a word if it is `expected`; returns what was there before."""
    return replace(base(words) + 8 * index, expected, value)
