"""Who writes the gradient of a model: a traced call finds it by address.

The model gets views of the gradient that notice what is written into them. It runs as it always does, but slower, so one
mini-batch is traced. A part of the gradient is *copied* if the model computes it in memory of its own and then assigns it,
``grad["w"][:] = x.T @ delta``. It is made *in place* if the model names the memory of the gradient as the target,
``np.matmul(x.T, delta, out=grad["w"])``, or if compiled code writes there. A copy by ``np.asarray(grad["w"])[:] = ...`` or by
a memoryview is not noticed.

Source: Xue et al., Fast distributed deep learning over RDMA, EuroSys 2019, arXiv:1805.08430, section 3.4 (a first mini-batch
is traced). There, the runtime then makes these allocations in registered memory. A program of numpy names its targets itself,
so we tell the user where a copy is made [interpretation].
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary, extract_stack
from typing import Any

import numpy as np

from mpiddl.memory import FlatBuffer, Views

HIDDEN = (str(Path(np.__file__).parent), __file__)
"""Files whose lines tell a user nothing."""

WRITERS = {np.copyto: ("dst", "src"), np.put: ("a", "ind", "v"), np.putmask: ("a", "mask", "values"),
           np.place: ("arr", "mask", "vals")}  # fmt: skip
"""Functions that write into their first argument what is in their last, and the names of these."""

FRAMES = 8
"""Of a place where memory was allocated: lines of numpy's own may be the innermost ones."""


@dataclass
class Origin:
    """Who wrote a part of the gradient.

    copied : bytes that were computed elsewhere, and then copied.
    copies : lines that copied, "file:line".
    made : lines that allocated what was copied.
    in_place : lines that wrote in place; empty if compiled code did it.
    written : it was written at all.
    """

    copied: int = 0
    copies: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    in_place: list[str] = field(default_factory=list)
    written: bool = False


def trace(compute: Callable[[Views], Any], grad: FlatBuffer) -> dict[str, Origin]:
    """Who writes each part of ``grad`` in one call of ``compute(views)``.

    Parameters
    ----------
    compute : callable
        Computes a gradient into the views that it is given.
    grad : FlatBuffer
        Where these views lie.
    """
    notes = _Notes(grad)
    grad.flat[:] = np.nan
    views = Views()
    for name, view in grad.views.items():
        seen = view.view(_Traced)
        seen.notes = notes
        dict.__setitem__(views, name, seen)
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start(FRAMES)
    try:
        compute(views)
    finally:
        if ours:
            tracemalloc.stop()
    for name, view in grad.views.items():
        origin = notes.found[name]
        origin.written = bool(origin.copied or origin.in_place) or not view.size or not np.isnan(view).all()
    return notes.found


class _Notes:
    """What was written so far, by part of the gradient."""

    def __init__(self, grad: FlatBuffer):
        self.found = {name: Origin() for name in grad.views}
        self._ends = {name: (view.ctypes.data, view.ctypes.data + view.nbytes) for name, view in grad.views.items()}

    def _part(self, array: np.ndarray) -> Origin | None:
        """The part that an array is a view of."""
        at = array.ctypes.data
        return next((self.found[name] for name, (begin, end) in self._ends.items() if begin <= at < end), None)

    def in_place(self, array: np.ndarray) -> None:
        if (origin := self._part(array)) is not None:
            _add(origin.in_place, _line(extract_stack()))

    def assigned(self, array: np.ndarray, target: np.ndarray, value: Any) -> None:
        """``value`` is written to ``target``, which is a part of ``array`` or has its shape."""
        if not isinstance(value, np.ndarray) or value.ndim == 0 or np.may_share_memory(array, value):
            self.in_place(array)
        elif (origin := self._part(array)) is not None:
            origin.copied += target.nbytes
            _add(origin.copies, _line(extract_stack()))
            while isinstance(value.base, np.ndarray):
                value = value.base
            allocated = tracemalloc.get_object_traceback(value)
            if allocated is not None:
                _add(origin.made, _line(allocated))


def _add(lines: list[str], line: str) -> None:
    if line and line not in lines:
        lines.append(line)


def _line(frames: Iterable[FrameSummary | tracemalloc.Frame]) -> str:
    """The innermost line that means something to a user."""
    known = [frame for frame in frames if not frame.filename.startswith(HIDDEN)]
    return f"{Path(known[-1].filename).name}:{known[-1].lineno}" if known else ""


class _Traced(np.ndarray):
    """A view that notes what is written into it. Operations give plain arrays."""

    notes: _Notes | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.notes = getattr(other, "notes", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = _plain(self)
        if self.notes is not None:
            self.notes.assigned(plain, np.asarray(plain[key]), value)
        plain[key] = _plain(value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        given = options.get("out", ())
        for target in (*given, *inputs[: method == "at"]):
            if isinstance(target, _Traced) and target.notes is not None:
                target.notes.in_place(target)
        if given:
            options["out"] = tuple(map(_plain, given))
        result = getattr(ufunc, method)(*map(_plain, inputs), **options)
        return given[0] if len(given) == 1 else result  # `grad["w"] += x` wants the view itself back

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        target = options.get("out")
        if isinstance(target, _Traced) and target.notes is not None:
            target.notes.in_place(target)
        if function in WRITERS:
            names = WRITERS[function]
            given = dict(zip(names, args, strict=False)) | options
            into, value = given[names[0]], given[names[-1]]
            if isinstance(into, _Traced) and into.notes is not None:
                into.notes.assigned(_plain(into), np.asarray(value), value)
        return super().__array_function__(function, types, args, options)

    @property
    def flat(self) -> Any:
        """As of any array, but what is assigned is noted."""
        return _Flat(self)

    @flat.setter
    def flat(self, values: Any) -> None:
        self[...] = np.reshape(values, self.shape) if np.size(values) == self.size else values


class _Flat:
    """``array.flat`` of a traced array."""

    def __init__(self, array: _Traced):
        self._array, self._flat = array, _plain(array).flat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flat, name)

    def __iter__(self) -> Any:
        return iter(self._flat)

    def __len__(self) -> int:
        return len(self._flat)

    def __getitem__(self, key: Any) -> Any:
        return self._flat[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._array.notes is not None:
            self._array.notes.assigned(_plain(self._array), np.asarray(self._flat[key]), value)
        self._flat[key] = _plain(value)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Traced) else value
