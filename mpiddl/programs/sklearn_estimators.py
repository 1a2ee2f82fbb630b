"""Estimators of scikit-learn in an unchanged program, fitted by all ranks.

Every rank runs the program, so every rank calls `fit` with all rows. For the classes of `REPLACED`, methods of scikit-learn's
own classes are replaced: the class, its parameters, its pickles and its subclasses stay what they are. Each fit is decided on
its own, from the estimator's parameters and its data: the rows are divided over the ranks, or scikit-learn's own code runs on
every rank.

What is replaced was tested with scikit-learn 1.6 to 1.9. The models are cuml.accel and sklearnex.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from mpiddl.machine.after_import import AfterImport
from mpiddl.transport.agree import check_same_place
from mpiddl.transport.comm import AnyComm, Comm
from mpiddl.transport.mpi import connected

Attempt = Callable[..., str]
"""Fits on all ranks and returns an empty text, or leaves the estimator alone and returns the reason."""


class Replaced(NamedTuple):
    """A class of scikit-learn, its methods that fit, and the function here that fits in their place."""

    module: str
    kind: str
    methods: tuple[str, ...]
    attempt: str


REPLACED = (
    Replaced("sklearn.decomposition._pca", "PCA", ("fit", "fit_transform"), "decompositions:pca"),
    Replaced("sklearn.decomposition._truncated_svd", "TruncatedSVD", ("fit", "fit_transform"), "decompositions:truncated_svd"),
    Replaced("sklearn.neural_network._multilayer_perceptron", "MLPClassifier", ("_fit",), "perceptrons:perceptron"),
    Replaced("sklearn.neural_network._multilayer_perceptron", "MLPRegressor", ("_fit",), "perceptrons:perceptron"),
)
"""The one table of what is replaced."""


class Row(NamedTuple):
    """A line of the final table: an estimator, how often it was fitted, and how."""

    estimator: str
    fits: int
    how: str


def install(comm: AnyComm) -> Installed:
    """Replace the estimators, now or when the program imports them.

    Parameters
    ----------
    comm : Comm or mpi4py communicator
        The ranks. They run the same program: fits of the main thread are collective.

    Returns
    -------
    Installed
        Its `remove` undoes everything, and its `rows` are those of a final table.
    """
    installed = Installed(comm)
    installed.undo.append(AfterImport({each.module: installed.replace_in for each in REPLACED}).remove)
    return installed


@dataclass
class Installed:
    """What has been replaced, and what came of it."""

    comm: AnyComm
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)
    _process: int = field(default_factory=os.getpid)
    _own: threading.local = field(default_factory=threading.local)

    def rows(self) -> list[Row]:
        """Lines for a table, in the order of the first fits."""
        return [Row(kind, fits, how) for (kind, how), fits in self._counts.items()]

    def finish(self) -> None:
        """The program is over on this rank. Collective.

        Raises
        ------
        MismatchError
            Other ranks fit an estimator. On all ranks.
        """
        with connected(self.comm, os.environ) as link:
            check_same_place(link, "the end of the program")

    def remove(self) -> None:
        """Put scikit-learn's own methods back. Fitted estimators stay as they are."""
        while self.undo:
            self.undo.pop()()

    def replace_in(self, module: ModuleType) -> None:
        """Replace the methods of the classes of one module; a method that this version does not have is left out."""
        for each in REPLACED:
            kind: Any = getattr(module, each.kind, None) if each.module == module.__name__ else None
            for name in each.methods if kind is not None else ():
                if hasattr(kind, name):
                    self._replace(kind, name, each)

    def _replace(self, kind: type, name: str, replaced: Replaced) -> None:
        inherited, original = name not in vars(kind), getattr(kind, name)

        @functools.wraps(original)
        def call(model: Any, *args: Any, **options: Any) -> Any:
            return self._call(replaced, name, original, model, args, options)

        setattr(kind, name, call)
        self.undo.append(functools.partial(delattr, kind, name) if inherited else
                          functools.partial(setattr, kind, name, original))

    def _call(self, replaced: Replaced, name: str, original: Any, model: Any, args: tuple[Any, ...],
              options: dict[str, Any]) -> Any:
        within = getattr(self._own, "running", False)  # a call within scikit-learn's own fit
        if os.getpid() != self._process or within:
            return original(model, *args, **options)
        if threading.current_thread() is not threading.main_thread():
            reason = "a fit in a thread, which may come in another order on other ranks"
        else:
            found: list[Any] = []
            with connected(self.comm, os.environ) as link:
                check_same_place(link, f"a fit of {replaced.kind}")
                reason = _attempt(replaced.attempt)(link, model, name, args, options, found)
                how = f"rows divided over {link.size} rank{'s' * (link.size > 1)}"
            if not reason:
                self._count(replaced.kind, how)
                return found[0]
        self._count(replaced.kind, f"scikit-learn's own: {reason}")
        self._own.running = True
        try:
            return original(model, *args, **options)
        finally:
            self._own.running = False

    def _count(self, kind: str, how: str) -> None:
        self._counts[kind, how] = self._counts.get((kind, how), 0) + 1


def _attempt(place: str) -> Attempt:
    """A function by module and name; loaded when it is first needed, with scikit-learn."""
    from importlib import import_module

    module, _, name = place.partition(":")
    found: Attempt = getattr(import_module(f"mpiddl.programs.{module}"), name)
    return found


def agreed_reason(link: Comm, model: Any, reason: str) -> str:
    """The first reason of any rank; or that the estimators differ.

    Communication
    -------------
    Collective: one all-gather of a short text.
    """
    if link.size == 1:
        return reason
    settings = {name: repr(value) for name, value in model.get_params(deep=False).items() if name != "random_state"}
    told = link.allgather((reason, sorted(settings.items())))
    reason = next((text for text, _ in told if text), "")
    return reason or ("parameters that differ between ranks" if any(other != told[0][1] for _, other in told) else "")
