"""Losses of a network's outputs with their gradients, for rows that have weights and for several outputs.

The sum over the rows is kept in float64. A probability counts as at least eps and at most 1 - eps of its dtype, as in
scikit-learn, so that the loss of a row that is found for certain is finite.
"""

from __future__ import annotations

from math import exp, log, log1p

import numpy as np

from .elementwise import logistic_columns
from .jit import inlined, kernel
from .lanes import base, size_of
from .loss import softmax_row

SOFTMAX, BINARY, SQUARED, POISSON = 0, 1, 2, 3
"""Cross-entropy of the softmax; of each output's logistic function; half the squared error; half the Poisson deviance."""


@kernel
def output_loss(outputs, targets, weights, index, kind, eps):
    """Sum of weight * loss over n rows; `outputs` becomes weight * (prediction - target).

    outputs (n, k) is C-contiguous. Row r has the target targets[index[r]] and the weight weights[index[r]], or number r of
    them if `index` is empty. targets (N, k) are float64; of SOFTMAX (N, 1), the number of the class. weights (N,) are of the
    dtype of `outputs`, or empty: ones. `kind` is SOFTMAX, BINARY, SQUARED or POISSON, `eps` the rounding unit of the dtype.
    O(n k).
    """
    total = 0.0
    if kind == BINARY:
        logistic_columns(outputs, 0, outputs.shape[1])
    for r in range(outputs.shape[0]):
        place = index[r] if index.size else r
        loss = _row_loss(outputs, targets, r, place, kind, eps)
        if weights.size:
            loss *= weights[place]
            for c in range(outputs.shape[1]):
                outputs[r, c] *= weights[place]
        total += loss
    return total


@inlined
def _row_loss(outputs, targets, r, place, kind, eps):
    """Loss of row r, whose outputs become prediction - target."""
    columns, loss = outputs.shape[1], 0.0
    if kind == SOFTMAX:
        label = np.int64(targets[place, 0])
        own = np.float64(outputs[r, label])
        line = base(outputs) + size_of(outputs) * columns * r
        largest, sum_of_powers, _ = softmax_row(outputs, line, line, columns)
        outputs[r, label] -= 1
        loss = _clipped(log(np.float64(sum_of_powers)) + (np.float64(largest) - own), eps)
    elif kind == BINARY:
        for c in range(columns):
            probability, target = np.float64(outputs[r, c]), targets[place, c]
            outputs[r, c] = probability - target
            probability = min(max(probability, eps), 1 - eps)
            loss -= target * log(probability) + (1 - target) * log(1 - probability)
    elif kind == SQUARED:
        for c in range(columns):
            difference = outputs[r, c] - targets[place, c]
            outputs[r, c] = difference
            loss += 0.5 * difference * difference / columns
    else:
        for c in range(columns):
            linear, target = np.float64(outputs[r, c]), targets[place, c]
            rate = exp(linear)
            outputs[r, c] = rate - target
            loss += rate - target
            if target > 0:
                loss += target * (log(target) - linear)
    return loss


@inlined
def _clipped(loss, eps):
    """The loss of a probability between eps and 1 - eps; NaN stays."""
    return -log1p(-eps) if loss < -log1p(-eps) else -log(eps) if loss > -log(eps) else loss
