"""Tensors as numpy arrays: views of their memory where they are contiguous, a copy and a way back where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpiddl.errors import ShapeError, UsageError

HALF = (torch.float16, torch.bfloat16)
"""numpy has no bfloat16, and MPI reduces neither: sums are made of float32 (`mpiddl.torch.process_group_reduce`)."""

WORDS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}
"""What moves elements of so many bytes without a look at them: types that every MPI library has."""

REDUCED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.complex64,
           torch.complex128, torch.bool, *HALF)  # fmt: skip


NUMPY = {torch.bool: "|u1", torch.uint8: "|u1", torch.int8: "|i1", torch.int16: "<i2", torch.int32: "<i4", torch.int64: "<i8",
         torch.float32: "<f4", torch.float64: "<f8", torch.complex64: "<c8", torch.complex128: "<c16"}  # fmt: skip
"""numpy's names of dtypes in which MPI reduces; bool counts as uint8."""


class Memory:
    """The memory of a contiguous tensor for ``numpy.asarray``.

    After `torch.Tensor.numpy` a storage cannot change its size any more. FSDP changes it.
    """

    def __init__(self, data: torch.Tensor, kind: str, size: int):
        self._data = data  # the array keeps this object, and this object the tensor
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": kind, "data": (data.data_ptr(), False)}


def numbers(data: torch.Tensor) -> np.ndarray:
    """A contiguous tensor as a 1-D array that shares its memory; only of dtypes that numpy has."""
    return np.asarray(Memory(data, NUMPY[data.dtype], data.numel())) if data.numel() else np.empty(0, NUMPY[data.dtype])


class Flat:
    """A tensor as one contiguous 1-D tensor: its own memory, or a copy.

    Attributes
    ----------
    tensor : Tensor
        The given one.
    """

    def __init__(self, tensor: torch.Tensor, fill: bool = True):
        self.tensor = self._whole = tensor
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return
        if fill:
            self._whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        else:
            self._whole = torch.empty(tensor.shape, dtype=tensor.dtype)

    @property
    def data(self) -> torch.Tensor:
        """Contiguous, 1-D."""
        return self._whole.detach().view(-1)

    @property
    def words(self) -> np.ndarray:
        """As an array of elements of its size, for moving."""
        return words(self._whole)

    @property
    def numbers(self) -> np.ndarray:
        """As an array of its dtype; only of dtypes that numpy has."""
        return numbers(self._whole)

    def put_back(self) -> None:
        """Into the given tensor, if that is not its memory."""
        if self._whole is not self.tensor:
            store(self.tensor, self._whole)


def words(data: torch.Tensor) -> np.ndarray:
    """A contiguous tensor as a 1-D array of elements of its size that shares its memory, for moving."""
    kind = WORDS[data.element_size()]
    return np.asarray(Memory(data, kind, data.numel())) if data.numel() else np.empty(0, kind)


def store(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write into a tensor that may require a gradient. The write is no step of the autograd graph."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().copy_(values)


def check(name: str, tensors: Any, reduced: bool = False) -> list[torch.Tensor]:
    """The tensors of a call, a single one as a list; raises for what cannot be served. Local.

    Raises
    ------
    UsageError
        No tensor; not a dense tensor on the CPU; a dtype without arithmetic, if it is ``reduced``.
    """
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name}: got {type(tensor).__name__}, expected a tensor")
        if not tensor.is_cpu:
            raise UsageError(f'{name}: got a tensor on {tensor.device}, expected one on the CPU; the backend "mpiddl" serves '
                             "CPU tensors only: tensor.cpu()")
        if tensor.layout != torch.strided:
            raise UsageError(f"{name}: got a tensor of layout {tensor.layout}, expected a dense one: tensor.to_dense()")
        if reduced and tensor.dtype not in REDUCED:
            raise UsageError(f"{name}: got a reduction of {tensor.dtype}, expected an integer, float or complex dtype: "
                             "tensor.float()")
    return found


def one(name: str, tensors: Any, reduced: bool = False) -> torch.Tensor:
    """The only tensor of a call; a `ShapeError` for several, which are for several devices a process."""
    found = check(name, tensors, reduced)
    if len(found) != 1:
        raise ShapeError(f"{name}: got {len(found)} tensors, expected one, because a rank has one device")
    return found[0]


def check_list(name: str, tensors: Sequence[torch.Tensor], size: int, like: torch.Tensor, same_size: bool = True) -> None:
    """Raise a `ShapeError` unless there is one tensor a rank, of the dtype (and number of elements) of ``like``."""
    if len(tensors) != size:
        raise ShapeError(f"{name}: got a list of {len(tensors)} tensors, expected {size}, one for each rank of the group")
    for rank, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or (same_size and tensor.numel() != like.numel()):
            raise ShapeError(f"{name}: got {tensor.numel()} elements of {tensor.dtype} for rank {rank}, expected "
                             f"{like.numel()} elements of {like.dtype}")


def neighbours_in_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor over all of them, if they lie in one storage one behind the other, in order; else None."""
    first, place = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.storage_offset() == place and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
            return None
        place += tensor.numel()
    return first.detach().as_strided((place - first.storage_offset(),), (1,), first.storage_offset())
