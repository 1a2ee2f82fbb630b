"""Fully connected networks of any depth, from softmax regression (no hidden layer) upwards.

    h_0 = x,   h_l = activation(h_{l-1} @ weight_l + bias_l),   outputs = h_{L-1} @ weight_L + bias_L

Cost of a gradient for n rows: 4 n sum(in * out) multiplications forward and for the weights, 2 n sum over all but the
first layer for the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from mpiddl import kernels
from mpiddl.errors import DataError, UsageError
from mpiddl.memory import FlatBuffer, slices
from mpiddl.models.base import Arrays, Ready, Score
from mpiddl.models.checks import check_width, labels_of, one_of, rows_of, same_rows, targets_of
from mpiddl.models.workspace import UNIT, Workspace

ACTIVATIONS = {"relu": "RELU", "tanh": "TANH"}
"""Their names among the kernels, which are loaded when a model is used."""

ROWS_AT_ONCE = 256
"""Rows that go through all layers together where no gradient is wanted: their activations stay in the caches."""


SLICE_BYTES, SLICE_UNITS = 2 << 20, 4
"""A large weight gradient is announced in slices of whole rows, of this size and so many units (`UNIT`) a thread at least:
the first of them travel while the others are computed. Smaller ones would cost the product its blocks."""


@dataclass(frozen=True)
class MLP:
    """A multilayer perceptron; with two sizes, a linear model.

    Parameters
    ----------
    sizes
        Inputs, hidden layers, outputs, such as (784, 256, 128, 10).
    activation
        Of the hidden layers.
    loss
        "cross-entropy" of the softmax of the outputs against class numbers (int64, shape (n,)); or "squared-error",
        half the sum of the squared differences of each row, against targets of shape (n, outputs).
    initialisation
        "he": normal with variance 2/inputs of the layer; "glorot": uniform within sqrt(6/(inputs + outputs)).
        Biases start at zero.
    threads
        Threads that share each product; more than one pays only where a rank has cores to itself.

    Raises
    ------
    UsageError
        If a value is none of these.

    References
    ----------
    K. He, X. Zhang, S. Ren, J. Sun, Delving deep into rectifiers, ICCV 2015, equation 10 (arXiv:1502.01852).
    X. Glorot, Y. Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS 2010,
    equation 16.
    """

    sizes: tuple[int, ...]
    activation: Literal["relu", "tanh"] = "relu"
    loss: Literal["cross-entropy", "squared-error"] = "cross-entropy"
    initialisation: Literal["he", "glorot"] = "he"
    threads: int = 1

    def __post_init__(self):
        sizes = tuple(self.sizes) if isinstance(self.sizes, Sequence) else ()
        if len(sizes) < 2 or not all(isinstance(n, (int, np.integer)) and n > 0 for n in sizes):
            raise UsageError(f"sizes: got {self.sizes!r}, expected two or more integers > 0, such as (784, 10)")
        object.__setattr__(self, "sizes", tuple(map(int, sizes)))
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("loss", self.loss, ("cross-entropy", "squared-error"))
        one_of("initialisation", self.initialisation, ("he", "glorot"))
        if not isinstance(self.threads, (int, np.integer)) or self.threads < 1:
            raise UsageError(f"threads: got {self.threads!r}, expected an integer >= 1")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """weight1, bias1, weight2, ...: shapes (in, out) and (out,)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (n, m) in enumerate(pairwise(self.sizes), 1):
            shapes |= {f"weight{layer}": (n, m), f"bias{layer}": (m,)}
        return shapes

    def init(self, params: Arrays, rng: np.random.Generator) -> None:
        """Draw the weights, in float64 whatever the dtype of `params`, and zero the biases."""
        for name, shape in self.shapes.items():
            if name.startswith("bias"):
                params[name][...] = 0
            elif self.initialisation == "he":
                params[name][...] = rng.normal(0.0, sqrt(2 / shape[0]), shape)
            else:
                bound = sqrt(6 / sum(shape))
                params[name][...] = rng.uniform(-bound, bound, shape)

    def gradient(
        self,
        params: Arrays,
        x: np.ndarray,
        y: np.ndarray,
        grad: Arrays,
        *,
        ready: Ready | None = None,
        work: Workspace | None = None,
    ) -> float | Score:
        """Gradient of the summed loss into `grad`, and that loss (see `Model.gradient`).

        Returns
        -------
        Score for cross-entropy, float for the squared error.
        """
        x = rows_of(x, self.sizes[0], params["weight1"].dtype)
        work = work or self.workspace(len(x), x.dtype)
        layers = self._forward(params, x, work)
        score = self._loss(layers[-1], y)
        for layer in reversed(range(len(self._names))):
            self._backward(layer, layers, grad, work, ready)
            if layer:
                self._backward_to_inputs(layer, layers, params, work)
        return score.loss if score.correct is None else score

    def predict(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        """Outputs of the last layer, shape (n, outputs), new memory; for classes, before the softmax (logits)."""
        return np.concatenate([outputs.copy() for _, outputs in self._outputs(params, x)])

    def score(self, params: Arrays, x: np.ndarray, y: np.ndarray) -> Score:
        """The summed loss and the number of rows whose class was found (None for the squared error)."""
        same_rows(x, y)
        parts = [self._loss(outputs, y[rows], rows.start) for rows, outputs in self._outputs(params, x)]
        found = [part.correct for part in parts if part.correct is not None]
        return Score(sum(part.loss for part in parts), sum(found) if found else None)

    def workspace(self, max_rows: int, dtype: DTypeLike) -> Workspace:
        """All that a step of up to `max_rows` rows writes to besides its gradient."""
        return Workspace(self.sizes, max_rows, dtype, self.threads)

    def warm(self, dtype: DTypeLike) -> None:
        """Compile, or load from the cache, every kernel that a gradient and a score call.

        When one process has done this, the others find the cache filled.
        """
        params, grad = FlatBuffer(self.shapes, dtype), FlatBuffer(self.shapes, dtype)
        x = np.zeros((1, self.sizes[0]), params.dtype)
        y = np.zeros(1, np.int64) if self.loss == "cross-entropy" else np.zeros((1, self.sizes[-1]), params.dtype)
        self.gradient(params.views, x, y, grad.views)

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """Weight and bias of each layer."""
        return [(f"weight{layer}", f"bias{layer}") for layer in range(1, len(self.sizes))]

    @cached_property
    def _parts(self) -> list[slice]:
        """Where each layer lies in the flat buffer."""
        parts = slices(self.shapes)
        return [slice(parts[weight].start, parts[bias].stop) for weight, bias in self._names]

    @cached_property
    def _codes(self) -> list[int]:
        """The activation behind each layer."""
        return [getattr(kernels, ACTIVATIONS[self.activation])] * (len(self.sizes) - 2) + [kernels.IDENTITY]

    def _outputs(self, params: Arrays, x: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Some rows at a time and their outputs, which the next ones overwrite."""
        dtype = params["weight1"].dtype
        check_width(x, self.sizes[0])
        work = self.workspace(min(len(x), ROWS_AT_ONCE), dtype)
        for begin in range(0, max(len(x), 1), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            yield rows, self._forward(params, rows_of(x[rows], self.sizes[0], dtype), work)[-1]

    def _forward(self, params: Arrays, x: np.ndarray, work: Workspace) -> list[np.ndarray]:
        """The input and the output of every layer."""
        layers = [x, *work.layers(len(x))]
        for layer, (weight, bias) in enumerate(self._names):
            out, size = layers[layer + 1], self.sizes[layer + 1]
            operations = 2 * out.size * self.sizes[layer]
            arguments = layers[layer], params[weight], params[bias], self._codes[layer], out
            work.share(kernels.forward, size, operations, *arguments)
        return layers

    def _backward(self, layer: int, layers: list[np.ndarray], grad: Arrays, work: Workspace, ready: Ready | None) -> None:
        """Gradient with respect to a layer's weights and biases, its output's gradient being in its place, last rows first."""
        weight, bias = self._names[layer]
        x, delta, width = layers[layer], layers[layer + 1], self.sizes[layer + 1]
        part, packed = self._parts[layer], False
        start, stop = part.start, part.stop  # the biases, behind the weights, come with the first slice
        whole = [slice(0, self.sizes[layer])]
        for rows in row_slices(self.sizes[layer], width, delta.itemsize, self.threads) if ready else whole:
            arguments = x, delta, grad[weight], grad[bias], packed
            work.share(kernels.weight_gradient, rows.stop, 2 * x.size * width, *arguments, first=rows.start)
            begin, packed = start + rows.start * width, True
            if ready:
                ready(slice(begin, stop))
            stop = begin

    def _backward_to_inputs(self, layer: int, layers: list[np.ndarray], params: Arrays, work: Workspace) -> None:
        """Gradient with respect to a layer's inputs, in the place of these: they have served."""
        delta, hidden, weight = layers[layer + 1], layers[layer], params[self._names[layer][0]]
        arguments = delta, weight, self._codes[layer - 1], hidden
        work.share(kernels.input_gradient, self.sizes[layer], 2 * hidden.size * delta.shape[1], *arguments)

    def _loss(self, outputs: np.ndarray, y: np.ndarray, first: int = 0) -> Score:
        """The summed loss of rows from number `first` on; its gradient takes the place of the outputs."""
        if self.loss == "squared-error":
            return Score(kernels.squared_error(outputs, targets_of(y, outputs), outputs))
        y = labels_of(y, len(outputs))
        loss, correct, bad = kernels.softmax_cross_entropy(outputs, y, outputs)
        if bad >= 0:
            raise DataError(f"y, row {first + bad}: got label {y[bad]}, expected 0 to {outputs.shape[1] - 1}")
        return Score(loss, correct)


@cache
def row_slices(rows: int, width: int, itemsize: int, threads: int = 1) -> list[slice]:
    """The rows of a weight gradient of ``width`` columns as they are computed and announced: the last slice first.

    They depend on no rank and no batch. The first one is no longer than needed for all ``threads``, since what it packs
    serves the others.

    Examples
    --------
    >>> row_slices(784, 2048, 4)
    [slice(528, 784, None), slice(272, 528, None), slice(0, 272, None)]
    """
    unit = UNIT * threads  # so that all threads have as much to do
    least = unit * max(SLICE_UNITS, round(SLICE_BYTES / (unit * width * itemsize)))
    edges = [*(rows - least * number for number in range(max(1, rows // least))), 0]
    return [slice(first, last) for last, first in pairwise(edges)]


def linear(features: int, outputs: int, loss: Any = "cross-entropy", initialisation: Any = "he") -> MLP:
    """An `MLP` without a hidden layer, from the settings of a job."""
    return MLP((features, outputs), loss=loss, initialisation=initialisation)


def Softmax(inputs: int, classes: int, initialisation: Literal["he", "glorot"] = "glorot") -> MLP:
    """Softmax regression: an `MLP` without a hidden layer."""
    return MLP((inputs, classes), initialisation=initialisation)
