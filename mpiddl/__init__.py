"""mpiddl: distributed learning as SPMD MPI programs.

The same program trains on one rank without mpiexec and on many with it::

    import mpiddl
    result = mpiddl.train("mlp", (x, y), hidden=(64,), epochs=5)

Names are loaded when they are first used: ``import mpiddl`` starts no MPI, and loads neither numpy nor numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpiddl.version import __version__

if TYPE_CHECKING:
    from mpiddl.communicator import Communicator
    from mpiddl.data_parallel import DataParallel
    from mpiddl.models import MLP, Model, Score, Softmax, gradcheck
    from mpiddl.training.job import Job
    from mpiddl.training.prediction import Trained, load
    from mpiddl.training.run import Result, train

_HOME = {
    "Communicator": "communicator",
    "DataParallel": "data_parallel",
    "Job": "training.job",
    "MLP": "models",
    "Model": "models",
    "Score": "models",
    "Softmax": "models",
    "gradcheck": "models",
    "Result": "training.run",
    "train": "training.run",
    "Trained": "training.prediction",
    "load": "training.prediction",
}

__all__ = [
    "MLP",
    "Communicator",
    "DataParallel",
    "Job",
    "Model",
    "Result",
    "Score",
    "Softmax",
    "Trained",
    "__version__",
    "gradcheck",
    "load",
    "train",
]


if not TYPE_CHECKING:  # for which every name would be there

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'mpiddl' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"mpiddl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
