"""`distribute`: a model, an optimiser and a loader of a program, trained on all ranks."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mpiddl.errors import UsageError
from mpiddl.strategies import of_programs
from mpiddl.torch.batch_dimension import least_samples
from mpiddl.torch.coordinator import Coordinator
from mpiddl.torch.parameter_set import broadcast
from mpiddl.torch.sharded_loader import Sharded
from mpiddl.transport.comm import AnyComm
from mpiddl.transport.mpi import connect
from mpiddl.transport.uncaught import public

LOSSES = ("mean", "sum")


class DistributedLoader:
    """A `DataLoader` of which each rank gets its part of every batch while ``model`` is trained.

    Without gradients, or with the model in evaluation mode, each rank gets whole batches. Attributes are those of the loader.
    """

    def __init__(self, loader: DataLoader[Any], model: torch.nn.Module, coordinator: Coordinator, sums: bool):
        self._loader, self._model, self._coordinator, self._sums = loader, model, coordinator, sums
        self._sharded = Sharded(loader, coordinator)

    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled() or not self._model.training or self._coordinator.over:
            yield from self._loader
            return
        self._coordinator.least = least_samples(self._model.modules())
        self._coordinator.look(self._model.modules())
        for batch in self._sharded:
            self._coordinator.loss(self._sums)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


@public
def distribute(model: torch.nn.Module, optimizer: Optimizer, loader: DataLoader[Any] | None = None, strategy: str = "auto", *,
               loss: str = "mean", steps: int = 0, comm: AnyComm | None = None) -> Any:
    """Train a model on all ranks of a communicator. Nothing else in the program changes.

    Parameters
    ----------
    model : torch.nn.Module
        Parameters and buffers become those of rank 0. Parameters may be real or complex, of any dtype.
    optimizer : torch.optim.Optimizer
        Of parameters of the model. Its steps exchange gradients or parameters from now on.
    loader : torch.utils.data.DataLoader, optional
        Gives batches for all ranks together: each rank gets its part. Without one, each rank computes batches of its own, and
        gradients are averaged over ranks.
    strategy : str
        How ranks exchange (`mpiddl.strategies`), such as ``"gossip"``.
    loss : {"mean", "sum"}
        What the program's loss is over the samples of a batch.
    steps : int
        Steps of the whole run, for strategies that plan; 0 if not known.
    comm : mpi4py.MPI.Intracomm or Comm, optional
        The ranks; None means ``MPI.COMM_WORLD``.

    Returns
    -------
    model, optimizer, loader
        The model and the optimiser that were passed, and the loader to iterate. Without a loader, only the first two.

    Raises
    ------
    UsageError
        An argument of another kind; a strategy that does not fit; the program runs under `mpiddl run`.

    Communication
    -------------
    Collective: broadcasts of the model. When the program ends, ranks wait for each other.

    Examples
    --------
    ::

        model, optimizer, loader = mpiddl.torch.distribute(model, optimizer, loader, strategy="gossip")
    """
    _check(model, optimizer, loader, loss)
    given = (model, optimizer) if loader is None else (model, optimizer, loader)
    coordinator = _coordinator(comm, strategy, steps)
    if coordinator is None:
        return given
    broadcast(coordinator.comm, [*model.parameters(), *model.buffers()])
    coordinator.add(optimizer)
    parameters = coordinator.sets[-1]
    optimizer.register_step_pre_hook(lambda _, *given: coordinator.step_begins(parameters, *given))
    optimizer.register_step_post_hook(lambda *_: coordinator.step_ends(parameters))
    return given if loader is None else (model, optimizer, DistributedLoader(loader, model, coordinator, loss == "sum"))


def _check(model: Any, optimizer: Any, loader: Any, loss: Any) -> None:
    for name, given, wanted, spelled in (("model", model, torch.nn.Module, "torch.nn.Module"),
                                         ("optimizer", optimizer, Optimizer, "torch.optim.Optimizer"),
                                         ("loader", loader, (DataLoader, type(None)), "torch.utils.data.DataLoader")):
        if not isinstance(given, wanted):
            raise UsageError(f"{name}: got {type(given).__name__}, expected a {spelled}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("optimizer: got LBFGS, which needs the loss of all ranks; expected another one, or `mpiddl run`, "
                         "which divides its forward passes")
    if loss not in LOSSES:
        raise UsageError(f"loss: got {loss!r}, expected one of {', '.join(LOSSES)}")
    if loss == "sum" and loader is None:
        raise UsageError("loss: got 'sum' without a loader, expected a loader whose batches are divided, or 'mean'")
    if hasattr(DataLoader.__iter__, "__wrapped__"):
        raise UsageError("distribute: got a program that runs under `mpiddl run`, which distributes it already; expected a "
                         "program without this call, or python in the place of mpiddl run")


_coordinators: list[tuple[AnyComm | None, str, Coordinator]] = []
"""One for each communicator and strategy: optimisers of one program, such as those of a GAN, agree on one order."""


def _coordinator(comm: AnyComm | None, strategy: str, steps: int) -> Coordinator | None:
    """That of the ranks of ``comm``; None on one rank. Collective."""
    found = next((each for known, name, each in _coordinators if known is comm and name == strategy), None)
    if found is not None:
        return found
    link = connect(comm, os.environ if comm is None else None)
    chosen = of_programs.resolved(strategy, link)
    if link.size == 1:
        link.Free()
        return None
    found = Coordinator(link, chosen, steps)
    _coordinators.append((comm, strategy, found))
    atexit.register(_finish, found)
    return found


def _finish(coordinator: Coordinator) -> None:
    """The program is over on this rank. Collective."""
    coordinator.finish()
    coordinator.comm.Free()
