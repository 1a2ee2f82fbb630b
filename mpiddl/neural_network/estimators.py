"""`MLPClassifier` and `MLPRegressor`: scikit-learn's classes, trained on all ranks of a communicator."""

from __future__ import annotations

import os
from inspect import Parameter, signature
from typing import Any

from sklearn import neural_network as theirs

from mpiddl.decomposition.comm_parameter import CommParameter
from mpiddl.decomposition.rows_of_all import OWN, check_rows
from mpiddl.errors import UsageError
from mpiddl.neural_network import fit as one
from mpiddl.transport.agree import agreed_errors, check_equal
from mpiddl.transport.mpi import connected
from mpiddl.transport.uncaught import public

OURS = {"rows": OWN, "comm": None, "threads": 0}
"""Parameters that scikit-learn's classes do not have, with their defaults."""


class _OnRanks(CommParameter):
    """What both estimators add to scikit-learn's."""

    rows: str
    threads: int

    def _validate_params(self) -> None:
        """Called by scikit-learn at the beginning of `fit` and `partial_fit`: wrong parameters on some ranks end it on all."""
        with connected(self.comm, os.environ) as link, agreed_errors(link):
            super()._validate_params()

    @public
    def _fit(self, X: Any, y: Any, sample_weight: Any = None, incremental: bool = False) -> Any:
        """Called by scikit-learn's `fit` and `partial_fit` after they have validated the parameters."""
        with connected(self.comm, os.environ) as link:
            with agreed_errors(link):
                self._check_ours()
            settings = {name: value for name, value in self.get_params(deep=False).items()
                        if name not in ("comm", "threads", "random_state")}
            if link.size > 1:
                check_equal(link, type(self).__name__, {name: repr(value) for name, value in settings.items()})
            reason = one.not_served(self)
            if not reason:
                one.fit(self, link, X, y, sample_weight, incremental, self.rows, self.threads)
                return self
            if link.size > 1 and self.rows == OWN:
                raise UsageError(f"{type(self).__name__}: got {reason}, which only scikit-learn's own code can train, on "
                                 f"{link.size} ranks; expected rows='all', or one rank")
        weights = {} if sample_weight is None else {"sample_weight": sample_weight}
        return super()._fit(X, y, incremental=incremental, **weights)

    def _check_ours(self) -> None:
        check_rows(self.rows)
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 0:
            raise UsageError(f"threads: got {self.threads!r}, expected a whole number, 0 or more")


def _with_ours(kind: Any) -> Any:
    """``kind`` with scikit-learn's parameters, whatever its version has, and ours."""
    listed = signature(kind.__init__).parameters
    own = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in OURS.items()]
    above = kind.__init__

    def __init__(self: Any, *args: Any, rows: str = OWN, comm: Any = None, threads: int = 0, **settings: Any) -> None:
        above(self, *args, **settings)
        self.rows, self.comm, self.threads = rows, comm, threads

    vars(__init__)["__signature__"] = signature(above).replace(parameters=[*listed.values(), *own])
    kind.__init__ = __init__
    return kind


@_with_ours
class MLPClassifier(_OnRanks, theirs.MLPClassifier):
    """scikit-learn's multilayer perceptron for classes, trained on all ranks of a communicator.

    All parameters, attributes and methods of the installed `sklearn.neural_network.MLPClassifier`, with three parameters more.
    Initial weights and the order of the samples are scikit-learn's for the same ``random_state``. On one rank and in float64
    the results are scikit-learn's to rounding, and they do not depend on the number of ranks, but for rounding.

    Parameters
    ----------
    rows : {"own", "all"}
        ``"own"``: each rank passes its own rows, any number of them. The samples of all ranks count, in the order of the ranks.
        ``"all"``: every rank passes the same array, and computes its share of each batch.
    comm : Comm, mpi4py communicator or None
        The ranks. None means all ranks of the program (COMM_WORLD). Each fit works on a duplicate. `clone` shares the
        communicator. `pickle` leaves it out, so that a loaded estimator has None.
    threads : int
        Threads of this rank. 0 means the cores of the node divided by its ranks, unless an environment variable sets a number.
    **settings
        Parameters of `sklearn.neural_network.MLPClassifier`. A ``random_state`` is that of rank 0 on all ranks.

    Raises
    ------
    ValueError
        From `fit` and `partial_fit`, on every rank, where scikit-learn raises one.

    Communication
    -------------
    `fit` and `partial_fit` are collective: one all-reduce of the gradient in each step. All other methods do not communicate.
    Every rank keeps the targets and the order of all samples (about 24 bytes a sample).

    References
    ----------
    F. Pedregosa et al., Scikit-learn: machine learning in Python, JMLR 12, 2011, 2825-2830.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddl.neural_network import MLPClassifier
    >>> x = np.random.default_rng(0).standard_normal((400, 5))
    >>> y = np.where(x[:, 0] * x[:, 1] > 0, "same", "other")
    >>> model = MLPClassifier((32,), learning_rate_init=0.01, random_state=0, early_stopping=True).fit(x, y)
    >>> bool(model.score(x, y) > 0.9), model.classes_.tolist()
    (True, ['other', 'same'])
    """


@_with_ours
class MLPRegressor(_OnRanks, theirs.MLPRegressor):
    """scikit-learn's multilayer perceptron for numbers, trained on all ranks of a communicator.

    All parameters, attributes and methods of the installed `sklearn.neural_network.MLPRegressor`, with three parameters more.

    Parameters
    ----------
    rows, comm, threads
        As in `MLPClassifier`.
    **settings
        Parameters of `sklearn.neural_network.MLPRegressor`.

    Communication
    -------------
    As in `MLPClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> from mpiddl.neural_network import MLPRegressor
    >>> x = np.random.default_rng(0).uniform(-1, 1, (400, 2))
    >>> model = MLPRegressor(hidden_layer_sizes=(32,), solver="lbfgs", random_state=0, max_iter=500).fit(x, x[:, 0] * x[:, 1])
    >>> bool(model.score(x, x[:, 0] * x[:, 1]) > 0.99)
    True
    """
