"""Loss and gradient of a whole fully connected network for the rows of one batch, in one call.

    h_0 = x[index],   h_l = activation(h_{l-1} @ weight_l + bias_l),   outputs = h_{L-1} @ weight_L + bias_L

The products are those of `dense_forward`, `dense_weight_gradient` and `dense_input_gradient`: 4 n sum(in * out) operations, and
2 n of all layers but the first. One call for a step costs a program in Python a few microseconds, whatever the number of
layers. Rows of a shuffled batch are fetched from memory some rows ahead of their use: they lie nowhere near each other, so the
processor does not foresee them.

The parameters lie in one flat array: all weights, then all biases, as in scikit-learn's L-BFGS.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpiddl.kernels.dense.dense_forward import forward, forward_scratch
from mpiddl.kernels.dense.dense_input_gradient import input_gradient, input_gradient_scratch
from mpiddl.kernels.dense.dense_weight_gradient import weight_gradient, weight_gradient_scratch
from mpiddl.kernels.dense.panels import IDENTITY, LOGISTIC, RELU, TANH
from mpiddl.kernels.elementwise import logistic_columns, tanh_columns
from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.lanes import INT64, base, emitter, size_of
from mpiddl.kernels.outputs import output_loss

ROWS_AHEAD = 4
"""Rows that are asked for before they are copied: one is read from memory in about the time of this many copies."""

LINE_BYTES = 64


def network_scratch(sizes: tuple[int, ...], rows: int, itemsize: int) -> int:
    """Elements of scratch memory that the gradient of ``rows`` rows needs."""
    needs = [forward_scratch(itemsize)]
    for outputs in sizes[1:]:
        needs += [weight_gradient_scratch(rows, outputs, itemsize), input_gradient_scratch(rows, outputs, itemsize)]
    return max(needs)


@kernel
def network_gradient(x, index, targets, weights, sizes, activation, loss, eps, params, grad, layers, batch, scratch):
    """The sum of weight * loss over a batch, and its gradient in `grad`.

    x (N, d) is C-contiguous. The batch is x[index], or x itself if `index` (int64) is empty, and so for `targets` and
    `weights` (see `outputs.output_loss`). sizes (int64) are d, the hidden layers and the outputs; `activation` is that
    of the hidden layers.
    params and grad (P,) are flat, of the dtype of x. For a batch of n rows, `layers` holds n * sum(sizes[1:]) elements, `batch`
    n * d (none if `index` is empty), `scratch` those of `network_scratch`.
    """
    rows = x
    if index.size:
        rows = batch[: index.size * x.shape[1]].reshape((index.size, x.shape[1]))
        gather_ahead(x, index, rows)
    n, count = rows.shape[0], sizes.size - 1
    first = layers[: n * sizes[1]].reshape((n, sizes[1]))
    weight, bias = _weight(params, sizes, 0), _bias(params, sizes, 0)
    forward(rows, weight, bias, activation if count > 1 else IDENTITY, first, scratch, 0, sizes[1])
    total = _above(n, index, targets, weights, sizes, activation, loss, eps, params, grad, layers, scratch)
    weight_gradient(rows, first, _weight(grad, sizes, 0), _bias(grad, sizes, 0), False, scratch, 0, sizes[0])
    return total


@kernel
def sparse_network_gradient(
    starts, columns, values, index, targets, weights, sizes, activation, loss, eps, params, grad, layers, scratch
):
    """The same for rows in CSR: starts (N + 1,), columns and values of the entries.

    The first layer costs 4 operations for each entry and column of its weights, whose gradient is zeroed in every call.
    """
    n = index.size if index.size else starts.size - 1
    count, width = sizes.size - 1, sizes[1]
    first = layers[: n * width].reshape((n, width))
    weight, bias = _weight(params, sizes, 0), _bias(params, sizes, 0)
    for i in range(n):
        row = index[i] if index.size else i
        for j in range(width):
            first[i, j] = bias[j]
        for entry in range(starts[row], starts[row + 1]):
            column, value = columns[entry], values[entry]
            for j in range(width):
                first[i, j] += value * weight[column, j]
    if count > 1:
        _activate(first, activation)
    total = _above(n, index, targets, weights, sizes, activation, loss, eps, params, grad, layers, scratch)
    weight, bias = _weight(grad, sizes, 0), _bias(grad, sizes, 0)
    weight[:] = 0
    bias[:] = 0
    for i in range(n):
        row = index[i] if index.size else i
        for j in range(width):
            bias[j] += first[i, j]
        for entry in range(starts[row], starts[row + 1]):
            column, value = columns[entry], values[entry]
            for j in range(width):
                weight[column, j] += value * first[i, j]
    return total


@kernel
def gather_ahead(x, index, out):
    """out[i] = x[index[i]]; reads and writes each element once, and asks for rows ahead."""
    nbytes = size_of(x) * x.shape[1]
    lines = (nbytes + LINE_BYTES - 1) // LINE_BYTES
    for i in range(min(ROWS_AHEAD, index.size)):
        _ask(x, base(x) + nbytes * index[i], lines)
    for i in range(index.size):
        if i + ROWS_AHEAD < index.size:
            _ask(x, base(x) + nbytes * index[i + ROWS_AHEAD], lines)
        row = index[i]
        for j in range(x.shape[1]):
            out[i, j] = x[row, j]


@inlined
def _above(n, index, targets, weights, sizes, activation, loss, eps, params, grad, layers, scratch):
    """All that lies above the first layer's outputs, which become the gradient with respect to its sums."""
    count, place = sizes.size - 1, 0
    for layer in range(1, count):
        below = layers[place : place + n * sizes[layer]].reshape((n, sizes[layer]))
        place += n * sizes[layer]
        out = layers[place : place + n * sizes[layer + 1]].reshape((n, sizes[layer + 1]))
        kind = activation if layer < count - 1 else IDENTITY
        forward(below, _weight(params, sizes, layer), _bias(params, sizes, layer), kind, out, scratch, 0, sizes[layer + 1])
    outputs = layers[place : place + n * sizes[count]].reshape((n, sizes[count]))
    total = output_loss(outputs, targets, weights, index, loss, eps)
    for layer in range(count - 1, 0, -1):
        delta = layers[place : place + n * sizes[layer + 1]].reshape((n, sizes[layer + 1]))
        place -= n * sizes[layer]
        hidden = layers[place : place + n * sizes[layer]].reshape((n, sizes[layer]))
        weight_gradient(hidden, delta, _weight(grad, sizes, layer), _bias(grad, sizes, layer), False, scratch, 0, sizes[layer])
        input_gradient(delta, _weight(params, sizes, layer), activation, hidden, scratch, 0, sizes[layer])
    return total


@inlined
def _weight(flat, sizes, layer):
    """The weights of a layer in a flat array."""
    begin = 0
    for below in range(layer):
        begin += sizes[below] * sizes[below + 1]
    return flat[begin : begin + sizes[layer] * sizes[layer + 1]].reshape((sizes[layer], sizes[layer + 1]))


@inlined
def _bias(flat, sizes, layer):
    """The biases of a layer: behind all weights."""
    begin = flat.size
    for above in range(layer, sizes.size - 1):
        begin -= sizes[above + 1]
    return flat[begin : begin + sizes[layer + 1]]


@inlined
def _activate(out, activation):
    """The activation of all elements, in place."""
    if activation == RELU:
        for i in range(out.shape[0]):
            for j in range(out.shape[1]):
                if out[i, j] <= 0:
                    out[i, j] = 0
    elif activation == TANH:
        tanh_columns(out, 0, out.shape[1])
    elif activation == LOGISTIC:
        logistic_columns(out, 0, out.shape[1])


@intrinsic
def _ask(typing, like, line, lines):
    """Ask for so many cache lines, to read."""

    def write(lanes, line, lines):
        with cgutils.for_range(lanes.builder, lines, intp=INT64) as loop:
            step = INT64(LINE_BYTES // lanes.size)
            lanes.prefetch(lanes.at(line, lanes.builder.mul(loop.index, step)), write=False)

    return types.void(like, types.int64, types.int64), emitter(write, "LINE lines")
