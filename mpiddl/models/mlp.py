"""Fully connected networks of any depth, from softmax regression (no hidden layer) upwards.

    h_0 = x,   h_l = activation(h_{l-1} @ weight_l + bias_l),   outputs = h_{L-1} @ weight_L + bias_L

Cost of a gradient for n rows: 4 n sum(in * out) multiplications forward and for the weights, 2 n sum over all but the
first layer for the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiddl import kernels
from mpiddl.errors import DataError, ShapeError, UsageError
from mpiddl.memory import FlatBuffer, aligned_zeros, float_dtype, slices
from mpiddl.models.base import Arrays, Ready, Score
from mpiddl.models.checks import labels_of, one_of, rows_of, targets_of

ACTIVATIONS = {"relu": kernels.RELU, "tanh": kernels.TANH}


class Workspace(NamedTuple):
    """The output of every layer, for as many rows as ever come, and scratch memory for the products."""

    outputs: tuple[np.ndarray, ...]
    scratch: np.ndarray

    def layers(self, rows: int) -> list[np.ndarray]:
        """The arrays, cut to `rows` rows."""
        if rows > len(self.outputs[0]):
            raise ShapeError(f"x: {rows} rows came, at most {len(self.outputs[0])} were wanted, as the workspace has")
        return [array[:rows] for array in self.outputs]


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

    def __post_init__(self):
        sizes = tuple(self.sizes) if isinstance(self.sizes, Sequence) else ()
        if len(sizes) < 2 or not all(isinstance(n, (int, np.integer)) and n > 0 for n in sizes):
            raise UsageError(f"sizes: {self.sizes!r} came, two or more integers > 0 were wanted, such as (784, 10)")
        object.__setattr__(self, "sizes", tuple(map(int, sizes)))
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("loss", self.loss, ("cross-entropy", "squared-error"))
        one_of("initialisation", self.initialisation, ("he", "glorot"))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """weight1, bias1, weight2, ...: shapes (in, out) and (out,)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (n, m) in enumerate(zip(self.sizes, self.sizes[1:], strict=False), 1):
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
        work = work or self.workspace(len(x), params["weight1"].dtype)
        layers = self._forward(params, x, work)
        loss, delta = self._loss(layers[-1], y)
        for layer in reversed(range(len(layers) - 1)):
            weight, bias = self._names[layer]
            kernels.weight_gradient(layers[layer], delta, grad[weight], grad[bias], work.scratch)
            if ready:
                ready(self._parts[layer])
            if layer:
                # The activations have served: the gradient with respect to them takes their place.
                kernels.input_gradient(delta, params[weight], ACTIVATIONS[self.activation], layers[layer], work.scratch)
                delta = layers[layer]
        return loss if self.loss == "cross-entropy" else loss.loss

    def predict(self, params: Arrays, x: np.ndarray) -> np.ndarray:
        """Outputs of the last layer, shape (n, outputs), new memory; for classes, before the softmax (logits)."""
        return self._forward(params, x, self.workspace(len(x), params["weight1"].dtype))[-1]

    def score(self, params: Arrays, x: np.ndarray, y: np.ndarray, *, work: Workspace | None = None) -> Score:
        """The summed loss and the number of rows whose class was found (None for the squared error)."""
        work = work or self.workspace(len(x), params["weight1"].dtype)
        return self._loss(self._forward(params, x, work)[-1], y)[0]

    def workspace(self, max_rows: int, dtype: DTypeLike) -> Workspace:
        """Scratch arrays for up to `max_rows` rows."""
        dtype = float_dtype(dtype)
        outputs = tuple(aligned_zeros(max_rows * n, dtype).reshape(max_rows, n) for n in self.sizes[1:])
        layers = zip(self.sizes, self.sizes[1:], strict=False)
        scratch = max(kernels.scratch_size(max_rows, n, m, dtype.itemsize) for n, m in layers)
        return Workspace(outputs, aligned_zeros(scratch, dtype))

    def warm(self, dtype: DTypeLike) -> None:
        """Compile (or load from the cache) every kernel that a training step calls: one process compiles, then the
        others find the cache filled.
        """
        params, grad = FlatBuffer(self.shapes, dtype), FlatBuffer(self.shapes, dtype)
        x = np.zeros((1, self.sizes[0]), params.dtype)
        classes = self.loss == "cross-entropy"
        y = np.zeros(1, np.int64) if classes else np.zeros((1, self.sizes[-1]), params.dtype)
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

    def _forward(self, params: Arrays, x: np.ndarray, work: Workspace) -> list[np.ndarray]:
        """The input and the output of every layer."""
        dtype = params["weight1"].dtype
        x = rows_of(x, self.sizes[0], dtype)
        layers = [x, *work.layers(len(x))]
        for layer, (weight, bias) in enumerate(self._names):
            hidden = layer + 1 < len(self._names)
            activation = ACTIVATIONS[self.activation] if hidden else kernels.IDENTITY
            kernels.forward(layers[layer], params[weight], params[bias], activation, layers[layer + 1], work.scratch)
        return layers

    def _loss(self, outputs: np.ndarray, y: np.ndarray) -> tuple[Score, np.ndarray]:
        """The summed loss, and its gradient with respect to the outputs, in their place."""
        if self.loss == "squared-error":
            return Score(kernels.squared_error(outputs, targets_of(y, outputs), outputs)), outputs
        y = labels_of(y, len(outputs))
        loss, correct, bad = kernels.softmax_cross_entropy(outputs, y, outputs)
        if bad >= 0:
            raise DataError(f"y: row {bad} has label {y[bad]}, wanted 0 to {outputs.shape[1] - 1}")
        return Score(loss, correct), outputs


def Softmax(inputs: int, classes: int, initialisation: Literal["he", "glorot"] = "glorot") -> MLP:
    """Softmax regression: an `MLP` without a hidden layer."""
    return MLP((inputs, classes), initialisation=initialisation)
