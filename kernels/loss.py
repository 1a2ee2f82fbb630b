"""Losses with their gradients, in one pass over the outputs of the last layer.

Sums over the rows, not means; the sum of the losses is kept in float64, in the order of the rows.
"""

from __future__ import annotations

from math import exp, log

from .jit import kernel


@kernel
def softmax_cross_entropy(logits, labels, delta):
    """Loss and correct count of n rows, and delta = softmax(logits) - onehot(labels); O(n c).

    `delta` may be `logits` itself. Returns (loss, correct, bad): `bad` is the first row whose label is outside 0..c-1
    (that row and those behind it are not computed), or -1.
    """
    rows, classes = logits.shape
    loss, correct = 0.0, 0
    for r in range(rows):
        label = labels[r]
        if label < 0 or label >= classes:
            return loss, correct, r
        best = 0
        for c in range(1, classes):
            if logits[r, c] > logits[r, best]:
                best = c
        top, own = logits[r, best], logits[r, label]
        total = top - top
        for c in range(classes):
            e = exp(logits[r, c] - top)
            delta[r, c] = e
            total += e
        for c in range(classes):
            delta[r, c] /= total
        delta[r, label] -= type(total)(1)
        loss += log(total) + (top - own)
        correct += best == label
    return loss, correct, -1


@kernel
def squared_error(outputs, targets, delta):
    """Loss = 1/2 sum of (outputs - targets)^2, and delta = outputs - targets; `delta` may be `outputs` itself."""
    loss = 0.0
    for r in range(outputs.shape[0]):
        for c in range(outputs.shape[1]):
            difference = outputs[r, c] - targets[r, c]
            delta[r, c] = difference
            loss += 0.5 * difference * difference
    return loss
