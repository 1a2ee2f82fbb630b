"""Flat buffers: all parameters (or gradients) of a model as one contiguous array with named views into it.

A collective, an optimiser kernel, a checkpoint and a memory registration then see one array, while the model sees
its layers by name. The views lie tightly one behind the other, in the order of ``shapes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from .errors import ShapeError, UsageError

ALIGNMENT = 64
"""Bytes: one cache line, which is also the widest vector register there is."""

PRIVATE = "memory of the rank"
"""In words, where an array lies that has no special place."""

MOST_LEARNT = (32 << 20) - (64 << 10)
"""Bytes of the largest array from which glibc learns; it keeps twice as many."""

Shapes = Mapping[str, tuple[int, ...]]


class FlatBuffer:
    """One flat array and its named views.

    Parameters
    ----------
    shapes
        Name and shape of each part, in the order in which they lie in the buffer.
    dtype
        float32 or float64.
    flat
        An array to lay the views over (memory that ranks share, say): 1-D, C-contiguous, of that dtype and of the
        size that `shapes` add up to. Not copied. By default a new one is made, aligned to `ALIGNMENT`, all zero.

    Attributes
    ----------
    flat : ndarray, shape (size,)
    views : dict of str to ndarray
        C-contiguous views into `flat`; writing into one writes into `flat`.
    layers : list of slice
        Where each layer lies in `flat`: a part, and the parts after it of one dimension that has the length of one of its
        dimensions, such as a bias.

    Raises
    ------
    ShapeError
        If a shape is none, or `flat` does not fit.
    UsageError
        If the dtype is neither float32 nor float64.

    Examples
    --------
    >>> buffer = FlatBuffer({"weight": (3, 2), "bias": (2,)}, "float32")
    >>> buffer.views["bias"][:] = 1
    >>> buffer.flat
    array([0., 0., 0., 0., 0., 0., 1., 1.], dtype=float32)
    >>> buffer.slice("bias")
    slice(6, 8, None)
    >>> buffer.layers
    [slice(0, 8, None)]
    """

    def __init__(self, shapes: Shapes, dtype: DTypeLike, flat: np.ndarray | None = None):
        self.dtype = float_dtype(dtype)
        self.slices = slices(shapes)
        size = max((part.stop for part in self.slices.values()), default=0)
        self.flat = aligned_zeros(size, self.dtype) if flat is None else _fitting(flat, size, self.dtype)
        self.views = Views((name, self.flat[self.slices[name]].reshape(shape)) for name, shape in shapes.items())
        self.layers = _layers(self.views, self.slices)

    def slice(self, name: str) -> slice:
        """Where the part `name` lies in `flat`."""
        if name not in self.slices:
            raise ShapeError(f"name: got {name!r}, expected the name of a part: "
                             f"{', '.join(self.slices) or 'there are no parts'}")
        return self.slices[name]


def _layers(views: Mapping[str, np.ndarray], slices: Mapping[str, slice]) -> list[slice]:
    layers, lengths = list[slice](), tuple[int, ...]()
    for name, part in slices.items():
        if views[name].ndim == 1 and len(views[name]) in lengths:
            layers[-1] = slice(layers[-1].start, part.stop)
        else:
            lengths = views[name].shape
            layers.append(part)
    return layers


class Views(dict[str, np.ndarray]):
    """Named arrays that are written into, ``views["w"][:] = x``; another array in their place is refused."""

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        if array is not self.get(name):  # `views["w"] += x` ends here too, with the view itself
            raise ShapeError(f"{name}: got another array, expected a change of the values in place: params[{name!r}][:] = ..., "
                             f"and in the same way grad[{name!r}][:] and moments[{name!r}][:]")

    def __delitem__(self, name: str) -> None:
        raise ShapeError(f"{name}: the array was removed, expected a change of its values only")

    def pop(self, name: str, *default: object) -> np.ndarray:
        """Refused as well."""
        raise ShapeError(f"{name}: the array was removed, expected a change of its values only")

    def clear(self) -> None:
        """Refused as well."""
        raise ShapeError("all arrays were removed, expected a change of their values only")

    def update(self, *others: object, **arrays: np.ndarray) -> None:
        """Refused as well, and so is ``|=``, unless every array is the view itself."""
        for name, array in dict(*others, **arrays).items():
            self[name] = array

    def __ior__(self, other: Mapping[str, np.ndarray]) -> Views:  # type: ignore[override, misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[type, tuple[dict[str, np.ndarray]]]:
        """A copy is a plain dict: its arrays lie in no flat buffer."""
        return dict, (dict(self),)


def slices(shapes: Shapes) -> dict[str, slice]:
    """Where each part lies in the flat buffer of `shapes`.

    Raises
    ------
    ShapeError
        If a shape is not a tuple of integers that are not negative.

    Examples
    --------
    >>> slices({"weight": (3, 2), "bias": (2,)})
    {'weight': slice(0, 6, None), 'bias': slice(6, 8, None)}
    """
    parts, stop = {}, 0
    for name, shape in shapes.items():
        if not isinstance(shape, tuple) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape):
            raise ShapeError(f"shapes: got {shape!r} for {name!r}, expected a tuple of integers >= 0, such as (784, 10)")
        start, stop = stop, stop + prod(map(int, shape))
        parts[name] = slice(start, stop)
    return parts


def aligned_zeros(size: int, dtype: DTypeLike) -> np.ndarray:
    """A zeroed 1-D array that starts on a cache line and owns its last cache line alone."""
    nbytes = int(size) * np.dtype(dtype).itemsize
    # Up to one alignment is lost in front; one more behind keeps other arrays off the last line.
    raw = np.zeros(nbytes + 2 * ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype)


class _Writable:
    """The memory of an array, said to be writable."""

    def __init__(self, array: np.ndarray):
        self.array, self.__array_interface__ = array, {**array.__array_interface__, "data": (array.ctypes.data, False)}


def for_kernels(array: np.ndarray) -> np.ndarray:
    """The same memory, for a kernel that only reads it: for a read-only array, numba would compile the kernel once more.

    Examples
    --------
    >>> array = np.zeros(3)
    >>> array.flags.writeable = False
    >>> for_kernels(array).flags.writeable, np.shares_memory(for_kernels(array), array)
    (True, True)
    """
    return array if array.flags.writeable else np.asarray(_Writable(array))


@cache
def keep_freed() -> None:
    """Have memory that is freed kept by this process for what it needs next, up to 64 MiB of it.

    A page that comes new from the system costs some microseconds, several times what it takes to fill it. glibc learns from
    the first large array that is freed how much to keep: this one is never touched, and costs nothing. Where somebody has set
    malloc's parameters, or malloc is another, nothing changes.
    """
    np.empty(MOST_LEARNT, np.uint8)


def float_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype as numpy's object, refused unless it is float32 or float64."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in (np.float32, np.float64):
        raise UsageError(f"dtype: got {dtype!r}, expected 'float32' or 'float64'")
    return found


def _fitting(flat: np.ndarray, size: int, dtype: np.dtype) -> np.ndarray:
    """`flat` itself, if the views can be laid over it."""
    if flat.shape != (size,) or flat.dtype != dtype or not flat.flags.c_contiguous:
        raise ShapeError(
            f"flat: got {flat.dtype} of shape {flat.shape}, expected a contiguous array of {dtype} and shape ({size},)"
        )
    return flat
