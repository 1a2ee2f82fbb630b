"""The parameter ``comm`` of an estimator: `clone` shares the communicator, `pickle` leaves it out."""

from __future__ import annotations

from typing import Any

from sklearn.base import BaseEstimator


class CommParameter(BaseEstimator):
    """An estimator with the parameter ``comm``."""

    comm: Any

    def __sklearn_clone__(self) -> Any:
        comm, self.comm = self.comm, None
        try:
            # The default clone copies parameters deeply, which a communicator does not bear.
            copy = BaseEstimator.__sklearn_clone__(self)
        finally:
            self.comm = comm
        return copy.set_params(comm=comm)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "comm": None}
