"""The `torch.distributed` backend "mpiddl": a process group whose collectives are mpiddl's.

::

    import torch.distributed as dist
    import mpiddl.torch                      # not needed where torch loads plug-ins (torch 2.5 and newer)

    dist.init_process_group("mpiddl")        # mpiexec -n 4 python program.py
    model = torch.nn.parallel.DistributedDataParallel(model)

Every group has two communicators of its own: one for collectives, on which `mpiddl.Communicator` chooses algorithms, and one
for messages. Collectives run in the order of issue (`mpiddl.torch.process_group_work`).
"""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiddl.communicator import Communicator
from mpiddl.errors import CommError, MismatchError, UsageError
from mpiddl.machine.after_import import AfterImport
from mpiddl.machine.backoff import poll
from mpiddl.machine.clock import now
from mpiddl.torch.backend_name import NAME
from mpiddl.torch.process_group_calls import Calls
from mpiddl.torch.process_group_messages import Messages
from mpiddl.torch.process_group_watch import LEFT_S, PAUSE_S, Watch, Watched
from mpiddl.torch.process_group_work import Queue, Work
from mpiddl.torch.rendezvous import check_world
from mpiddl.transport.start import start_mpi
from mpiddl.transport.uncaught import end_job

TAGS = 32_768
"""Of groups that are created: every library has as many."""

NOT_SERVED = ("split_group", "merge_remote_group", "new_window", "reconfigure", "get_reconfigure_handle", "_start_coalescing",
              "_end_coalescing")  # fmt: skip
"""Calls of `torch.distributed.ProcessGroup` that raise a `UsageError` with their name."""


class MpiddlProcessGroup(Calls, dist.ProcessGroup):
    """The ranks of one group.

    Parameters
    ----------
    raw : mpi4py.MPI.Intracomm
        The ranks, in the order of the group; the group owns it.
    store : torch.distributed.Store
    timeout : timedelta
        A collective that takes longer ends the job.
    label : str
        The group in messages.

    Communication
    -------------
    Creation is collective over the group: that of `mpiddl.Communicator`, and a duplication.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, raw: Any, store: Any, timeout: timedelta, label: str):
        super().__init__(raw.Get_rank(), raw.Get_size())
        self.label, self._store, self._name = label, store, label
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._comm = Communicator(raw)
        self._queue, self._watched = Queue(label, threads), Watched(self, store)
        self._messages = Messages(raw.Dup(), timeout, threads, self._watched.lost)
        self._freed, self._broken = False, None  # type: bool, CommError | None
        _PROCESS.add(self)

    @property
    def timeout(self) -> timedelta:
        return self._messages.timeout

    @property
    def running(self) -> Any:
        """The collective that this rank is in."""
        return self._queue.running

    @property
    def completed(self) -> int:
        """The number of the last collective that is over on this rank."""
        return self._queue.completed

    def _put(self, call: Any, name: str, tensors: Any, asynchronous: bool) -> Work:
        self._check_alive(name)
        return self._queue.put(call, name, tensors, asynchronous)

    def _meet(self) -> None:
        """A barrier that raises if it takes longer than the timeout. The group cannot be used any more then."""
        job = self._queue.running
        assert job is not None
        job.patient = True
        request = self._comm.Ibarrier()
        while not poll(request.Test, min(PAUSE_S, self.timeout.total_seconds())):
            waited = now() - job.began
            gone = self._watched.left() if waited > LEFT_S else []
            if gone or waited >= self.timeout.total_seconds():
                self._broken = self._watched.trouble(job, waited, gone)
                raise self._broken

    def _check_alive(self, name: str) -> None:
        if self._broken is not None:
            raise CommError(f"{name}: got a process group that cannot be used any more, because an operation did not end: "
                            f"{self._broken}")
        if self._freed:
            raise CommError(f"{name}: got a process group that was destroyed, expected a group before destroy_process_group()")

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        self._check_alive("send")
        return self._messages.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        self._check_alive("recv")
        return self._messages.recv(tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        self._check_alive("recv")
        return self._messages.recv_any(tensors, tag)

    recvAnysource = recv_anysource

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._check_alive("monitored_barrier")
        self._messages.barrier(self.timeout if timeout is None else timeout, wait_all_ranks)

    def shutdown(self) -> None:
        """Free the group once all its ranks are here; collective.

        While an exception is handled this rank does not wait for others, which may be in the middle of a collective: what the
        group has stays until the end of the program.
        """
        if self._freed:
            return
        alone = sys.exc_info()[0] is not None or self._broken is not None
        if not alone:
            self._queue.drain()
        self._freed = True
        together = not alone and self._all_here()
        if not together:
            self._watched.leave()
        self._end()
        if together:
            self._messages.free()
            self._comm.Free()

    def _all_here(self) -> bool:
        """Wait until every rank wants to free the group; False if one has left without it, or none came within the timeout."""
        request, began = self._comm.Ibarrier(), now()
        while not poll(request.Test, min(PAUSE_S, self.timeout.total_seconds())):
            if self._watched.any_left() or now() - began > self.timeout.total_seconds():
                return False
        return True

    def leave(self) -> None:
        """At the end of a program that has not destroyed the group: complete what was issued."""
        if not self._freed:
            if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None and self._broken is None:
                self._queue.drain()
            self._freed = True
            self._watched.leave()
            self._end()

    def _end(self) -> None:
        _PROCESS.remove(self)
        self._queue.end()
        self._messages.end()

    def abort(self) -> None:
        self.end_job(CommError(f"abort: got a call for group {self.label!r}, expected none"))

    def end_job(self, error: BaseException) -> None:
        """Print ``error`` and end the job: others wait for this rank."""
        end_job(MPI.COMM_WORLD, error)

    # What torch asks of a group

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    group_name, _set_group_name = property(getGroupName), setGroupName  # of themselves, older versions of torch ask C++

    def getGroupDesc(self) -> str:
        return getattr(self, "_desc", "undefined")

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> MpiddlProcessGroup:
        if torch.device(device).type != "cpu":
            raise CommError(f'device: got {device}, expected cpu; the backend "{NAME}" serves CPU tensors only: tensor.cpu()')
        return self

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._messages.timeout = timeout

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Longer operations than the group's timeout end the job; shorter limits are for ``wait(timeout)``."""

    def _set_sequence_number_for_group(self) -> None:
        """Operations are counted from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._queue.sequence

    def _wait_for_pending_works(self) -> None:
        self._queue.drain()

    def _has_hooks(self) -> bool:
        return False

    def _enable_collectives_timing(self) -> None:
        """Works have no times."""


def _refusing(name: str) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        raise UsageError(f'{name}: got a group of the backend "{NAME}", which does not serve this call, expected a group of '
                         "another backend, such as gloo")

    return call


for _each in NOT_SERVED:
    setattr(MpiddlProcessGroup, _each, _refusing(_each))


def _run_uncompiled(rules: Any) -> None:
    """Tell `torch.compile` not to compile the calls of groups: it cannot, and runs them as they are."""
    with suppress(AttributeError):  # the function is not documented
        rules.add("mpiddl")


class _Process:
    """The groups of this process, which end with it at the latest."""

    def __init__(self) -> None:
        self._groups: WeakSet[MpiddlProcessGroup] = WeakSet()
        self._watch = Watch()
        self._registered = False

    def add(self, group: MpiddlProcessGroup) -> None:
        if not self._registered:
            atexit.register(self._leave)
            AfterImport({"torch._dynamo.trace_rules": _run_uncompiled})
            self._registered = True
        self._groups.add(group)
        self._watch.add(group._watched)

    def remove(self, group: MpiddlProcessGroup) -> None:
        self._groups.discard(group)
        self._watch.remove(group._watched)

    def _leave(self) -> None:
        for group in list(self._groups):
            group.leave()


_PROCESS = _Process()


def create(options: Any) -> MpiddlProcessGroup:
    """The group that torch asks for (``torch.distributed._DistributedBackendOptions``).

    Raises
    ------
    MismatchError
        Its ranks are not MPI's.

    Communication
    -------------
    Collective over the ranks of the group, not over all ranks: others need not call it.
    """
    world = start_mpi(os.environ).COMM_WORLD
    ranks, name = list(options.global_ranks_in_group), str(options.group_id)
    if not ranks:
        check_world(world, {"rank": str(options.group_rank), "world_size": str(options.group_size)})
        return MpiddlProcessGroup(world.Dup(), options.store, options.timeout, "default")
    if ranks[options.group_rank] != world.rank:
        raise MismatchError(f"ranks: got rank {ranks[options.group_rank]} for rank {world.rank} of MPI, expected the same; "
                            "start the program with mpiexec -n N or srun")
    group = world.group.Incl(ranks)
    try:
        raw = world.Create_group(group, zlib.crc32(name.encode()) % TAGS)
    finally:
        group.Free()
    return MpiddlProcessGroup(raw, options.store, options.timeout, f"{name} of ranks {ranks}")
