"""Whether a loss is the mean over the samples of a batch, or their sum: read from its graph.

Gradients of means are averaged over ranks, those of sums are added up. The loss functions of PyTorch keep their ``reduction``
in the graph; for other losses the last reduction counts. A sum that is divided by a number is taken for a mean.
"""

from __future__ import annotations

from typing import Any

import torch

PASSED = ("Mul", "Add", "Sub", "Neg", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy", "Reshape", "Clone", "Alias",
          "Expand")
"""Operations behind which the reduction of a loss is looked for."""

SUM = 2
"""``reduction="sum"`` in a graph of torch."""

DEPTH = 8


def is_sum(tensors: Any) -> bool:
    """Whether the first of ``tensors``, from which a backward pass starts, is a sum over samples."""
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    node = getattr(first, "grad_fn", None)
    return isinstance(first, torch.Tensor) and node is not None and _kind(node, DEPTH) == "sum"


def _kind(node: Any, depth: int) -> str:
    """"sum", "mean", or "" if there is no reduction up to this depth."""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return "sum" if reduction == SUM else "mean"
    name = type(node).__name__
    if name.startswith(("Mean", "Div")):
        return "mean"
    if name.startswith("Sum"):
        return "sum"
    if not depth or not name.startswith(PASSED):
        return ""
    found = [_kind(below, depth - 1) for below, _ in node.next_functions if below is not None]
    return next((kind for kind in ("mean", "sum") if kind in found), "")
