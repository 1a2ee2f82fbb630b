"""What Keras leaves to its backends: parts of batches, and functions of numpy arrays inside a step.

With PyTorch a step runs operation by operation. TensorFlow compiles it into a graph, in which ``tf.numpy_function`` calls back;
JAX compiles it too, and ``io_callback`` calls back. Both keep the order of the calls, which is then the same on all ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiddl.layout import block_of_at_least

NumpyFunction = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


def part(samples: int, size: int, rank: int, least: int) -> tuple[int, int, float]:
    """Begin and end of a rank's part of a batch, ``least`` rows or more, and its weight in the mean.

    The weight of a rank for which there are no rows is 0: it computes the first row.

    Examples
    --------
    >>> [part(5, 3, rank, least=2) for rank in range(3)]
    [(0, 3, 0.6), (3, 5, 0.4), (0, 1, 0.0)]
    """
    kept = block_of_at_least(samples, size, rank, least)
    return (kept.start, kept.stop, len(kept) / samples) if kept else (0, min(1, samples), 0.0)


class PyTorch:
    """Tensors of PyTorch.

    Attributes
    ----------
    wide : str
        The dtype in which means are taken.
    stateless : bool
        Whether a step gets the values of variables and returns new ones.
    without_xla : bool
        Whether a step that XLA compiles cannot call back.
    """

    wide, stateless, without_xla = "float64", False, False

    def samples(self, tensor: Any) -> Any:
        """The length of the first dimension; None if there is none."""
        return tensor.shape[0] if len(getattr(tensor, "shape", ())) else None

    def call(self, function: NumpyFunction, tensors: Sequence[Any]) -> list[Any]:
        """``function`` of the tensors as arrays. It returns arrays of the same shapes and dtypes."""
        import torch

        found = function([_wide(torch, tensor) for tensor in tensors])
        return [torch.from_numpy(np.asarray(array)).to(tensor.device, tensor.dtype)
                for array, tensor in zip(found, tensors, strict=True)]

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """``yes`` or ``no``."""
        return yes if condition else no

    def wait(self) -> None:
        """Until the steps that have begun are over."""

    part = staticmethod(part)


class TensorFlow(PyTorch):
    """Tensors of TensorFlow, in a graph or not."""

    without_xla = True

    def __init__(self) -> None:
        self._tf: Any = importlib.import_module("tensorflow")  # no import statement: mypy would ask for its types

    def samples(self, tensor: Any) -> Any:
        """As `PyTorch.samples`; a tensor in a graph of batches of any length."""
        if isinstance(tensor, self._tf.SparseTensor) or tensor.shape.rank == 0:
            return None
        return self._tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]

    def call(self, function: NumpyFunction, tensors: Sequence[Any]) -> list[Any]:
        """As `PyTorch.call`."""
        tf = self._tf
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        kinds = [tensor.dtype for tensor in given]
        wide = [tf.cast(tensor, tf.float32) if tensor.dtype in (tf.bfloat16, tf.float16) else tensor for tensor in given]
        found = tf.numpy_function(lambda *arrays: function(arrays), wide, [tensor.dtype for tensor in wide])
        back = []
        for tensor, result, kind in zip(given, found, kinds, strict=True):
            result.set_shape(tensor.shape)
            back.append(tf.cast(result, kind))
        return back

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """As `PyTorch.where`."""
        return self._tf.where(condition, yes, no)

    def part(self, samples: Any, size: int, rank: int, least: int) -> tuple[Any, Any, Any]:
        """As `part`."""
        tf = self._tf
        if isinstance(samples, int):
            return part(samples, size, rank, least)
        used = tf.minimum(size, tf.maximum(samples // least, 1))
        whole, rest = samples // used, samples % used
        begin = rank * whole + tf.minimum(rank, rest)
        end = (rank + 1) * whole + tf.minimum(rank + 1, rest)
        empty = tf.logical_or(rank >= used, tf.equal(begin, end))
        weight = tf.where(empty, 0, end - begin) / tf.maximum(samples, 1)
        return tf.where(empty, 0, begin), tf.where(empty, tf.minimum(1, samples), end), weight


class JAX(PyTorch):
    """Arrays of JAX, in a compiled step or not. JAX runs steps in its own threads. By default it has no float64."""

    wide, stateless = "float32", True

    def __init__(self) -> None:
        self._jax: Any = importlib.import_module("jax")
        self._call_back = importlib.import_module("jax.experimental").io_callback

    def call(self, function: NumpyFunction, tensors: Sequence[Any]) -> list[Any]:
        """As `PyTorch.call`."""
        numbers = self._jax.numpy
        given = [numbers.asarray(tensor) for tensor in tensors]
        wide = [each.astype("float32") if each.dtype.itemsize == 2 else each for each in given]
        kinds = [self._jax.ShapeDtypeStruct(each.shape, each.dtype) for each in wide]

        def call(*arrays: Any) -> list[np.ndarray]:
            found = function([np.asarray(each) for each in arrays])
            return [np.asarray(each, kind.dtype) for each, kind in zip(found, kinds, strict=True)]

        found = self._call_back(call, kinds, *wide, ordered=True)
        return [result.astype(each.dtype) for result, each in zip(found, given, strict=True)]

    def wait(self) -> None:
        """As `PyTorch.wait`."""
        self._jax.effects_barrier()


BACKENDS: dict[str, type] = {"torch": PyTorch, "tensorflow": TensorFlow, "jax": JAX}


def _wide(torch: Any, tensor: Any) -> np.ndarray:
    """The array of a tensor; float32 for types that numpy does not have, such as bfloat16."""
    plain = tensor.detach().cpu().to_dense()
    return (plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain).numpy()
