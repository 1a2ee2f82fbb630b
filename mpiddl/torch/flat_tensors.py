"""Tensors of one dtype as one flat array: gradients and parameters that a collective sees as one buffer.

float32 and float64 on the CPU are shared with the tensors. float16 and bfloat16, which numpy lacks, are summed as float32;
complex numbers as pairs of real ones. Tensors of other devices are copied through memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SHARED: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
"""Types whose memory torch and numpy share."""

SUMMED: dict[torch.dtype, np.dtype[Any]] = SHARED | {
    torch.float16: np.dtype(np.float32), torch.bfloat16: np.dtype(np.float32), torch.complex64: np.dtype(np.float32),
    torch.complex128: np.dtype(np.float64)}
"""The type in which tensors of a type are summed."""


def real_numbers(tensor: torch.Tensor) -> int:
    """Real numbers in a tensor."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def spans(tensors: Sequence[torch.Tensor]) -> list[slice]:
    """The part of the flat array that each tensor occupies."""
    found, stop = list[slice](), 0
    for tensor in tensors:
        found.append(slice(stop, stop + real_numbers(tensor)))
        stop += real_numbers(tensor)
    return found


def laid_over(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor over all of ``flat`` with the shape of ``like``, and its order in memory where that has no gaps."""
    if like.is_complex():
        return torch.view_as_complex(flat.view(*like.shape, 2))
    if dense(like):
        return flat.as_strided(like.shape, like.stride())
    return flat.view(like.shape)


def dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, in any order of dimensions, without gaps and overlaps."""
    expected = 1
    for stride, length in sorted((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
                                 if length != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def over_numpy(array: np.ndarray, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``array`` in the shapes of ``tensors``, each with a storage of its own, so that it is saved in its own size."""
    return [laid_over(torch.from_numpy(array[part]), tensor) for part, tensor in zip(spans(tensors), tensors, strict=True)]


def share(tensors: Sequence[torch.Tensor], array: np.ndarray) -> None:
    """Move ``tensors`` into ``array``: their values are copied, and they share its memory from now on."""
    for tensor, view in zip(tensors, over_numpy(array, tensors), strict=True):
        view.copy_(tensor.data)
        tensor.data = view


def by_dtype(tensors: Sequence[torch.Tensor]) -> dict[tuple[torch.dtype, Any], list[torch.Tensor]]:
    """Tensors of each dtype and device, in the order of their first appearance."""
    found: dict[tuple[torch.dtype, Any], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return found
