"""Messages between two ranks of a process group: send, receive, receive from any source, and the monitored barrier.

They are no part of the queue of collectives: two ranks may both receive first and send then. The MPI library moves messages
inside its calls only, so a thread asks for those under way while the program computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiddl.errors import CommError, UsageError
from mpiddl.machine.backoff import FIRST_S, longer, poll
from mpiddl.machine.clock import now
from mpiddl.torch.process_group_tensors import Flat, one
from mpiddl.torch.process_group_watch import PAUSE_S
from mpiddl.torch.process_group_work import NO_TIMEOUT, Work


class Message(Work):
    """A send or a receive under way."""

    def __init__(self, name: str, flat: Flat, request: Any, peer: str, timeout: timedelta, lost: Callable[[float], bool]):
        super().__init__(name, [flat.tensor])
        self._flat, self._request, self._peer, self._timeout, self._lost = flat, request, peer, timeout, lost
        self._asking = threading.Lock()  # MPI allows one thread at a time for a request

    def ask(self) -> bool:
        """Whether it is over; local."""
        if self._over or not self._asking.acquire(blocking=False):
            return self._over
        status = MPI.Status()
        try:
            if not self._over and self._request.Test(status):
                if self.name == "recv":
                    self._source = status.source
                    self._flat.put_back()
                self.finish()
        except MPI.Exception as failed:
            words = failed.Get_error_string().partition(",")[0].partition("\n")[0]
            self.finish(CommError(f"{self.name}: got {words!r} {self._peer}, expected a message of at most "
                                  f"{self._flat.words.nbytes} bytes"))
        finally:
            self._asking.release()
        return self._over

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Until it is over.

        Raises
        ------
        CommError
            Nothing came, or nothing was taken, within the timeout, by default the group's; or the other rank has left.
        """
        limit, began = (timeout if timeout.total_seconds() > 0 else self._timeout).total_seconds(), now()
        waited = 0.0
        while not poll(self.ask, min(PAUSE_S, limit - waited)):
            waited = now() - began
            if waited >= limit:
                raise CommError(f"{self.name}: got no message {self._peer} in {limit:g} s, expected the matching call there")
            if self._lost(waited):
                raise CommError(f"{self.name}: got no message {self._peer} in {waited:.3g} s, because that rank has left the "
                                "program or destroyed the group, expected the matching call there")
        return super().wait()

    def is_completed(self) -> bool:
        return self.ask()


class Messages:
    """The messages of one group, on a communicator of its own, which it frees.

    ``lost(rank, seconds)``: whether a message to or from a rank, or with None from any, that has not come for so many seconds
    can come no more.
    """

    def __init__(self, raw: Any, timeout: timedelta, threads: bool, lost: Callable[[int | None, float], bool]):
        self._raw, self._threads, self._lost = raw, threads, lost
        self.timeout = timeout
        self.largest_tag = raw.Get_attr(MPI.TAG_UB) - 1  # one more is the monitored barrier's
        self._open: list[Message] = []
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False

    def send(self, tensors: Any, dest: int, tag: int) -> Work:
        flat = Flat(one("tensor", tensors))
        self._check(tag, "dst", dest)
        request = self._raw.Isend(flat.words, dest, tag)
        return self._watched(Message("send", flat, request, f"taken by rank {dest}", self.timeout, partial(self._lost, dest)))

    def recv(self, tensors: Any, source: int, tag: int) -> Work:
        flat = Flat(one("tensor", tensors), fill=False)
        self._check(tag, "src", source)
        request = self._raw.Irecv(flat.words, source, tag)
        return self._watched(Message("recv", flat, request, f"from rank {source}", self.timeout, partial(self._lost, source)))

    def recv_any(self, tensors: Any, tag: int) -> Work:
        flat = Flat(one("tensor", tensors), fill=False)
        self._check(tag, "src", 0)
        request = self._raw.Irecv(flat.words, MPI.ANY_SOURCE, tag)
        return self._watched(Message("recv", flat, request, "from any rank", self.timeout, partial(self._lost, None)))

    def _check(self, tag: int, name: str, rank: int) -> None:
        if not 0 <= tag < self.largest_tag:
            raise UsageError(f"tag: got {tag}, expected 0 to {self.largest_tag - 1}, the largest tag of the MPI library")
        if not 0 <= rank < self._raw.size:
            raise UsageError(f"{name}: got {rank}, expected a rank of the group, 0 to {self._raw.size - 1}")

    def _watched(self, message: Message) -> Message:
        if not message.ask() and self._threads:
            with self._news:
                self._open.append(message)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._look_after, name="mpiddl messages", daemon=True)
                    self._thread.start()
                self._news.notify()
        return message

    def _look_after(self) -> None:
        pause = FIRST_S
        while not self._ended:
            with self._news:
                before, self._open = len(self._open), [message for message in self._open if not message._over]
                while not (self._open or self._ended):
                    self._news.wait()
                    pause = FIRST_S
                asked = list(self._open)
            over = sum([message.ask() for message in asked])
            pause = FIRST_S if over or len(asked) > before else longer(pause)
            time.sleep(pause)

    def barrier(self, timeout: timedelta, wait_all: bool) -> None:
        """A barrier through rank 0. Its error names the missing ranks, in the form that gloo uses.

        Raises
        ------
        CommError
            On rank 0: ranks that have not come within ``timeout``. On others: rank 0 has not let them go.

        Communication
        -------------
        An empty message to rank 0 and one back.
        """
        raw, tag, nothing = self._raw, self.largest_tag, np.empty(0, np.uint8)
        limit = timeout.total_seconds()
        if raw.rank:
            raw.Isend(nothing, 0, tag).Free()
            answer = raw.Irecv(nothing, 0, tag)
            if not poll(answer.Test, limit):
                _give_up(answer)
                raise CommError(f"Rank {raw.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                                f"send/recv from rank 0: got no answer in {1000 * limit:g} ms, expected monitored_barrier() on "
                                "every rank of the group")
            return
        coming = {rank: raw.Irecv(nothing, rank, tag) for rank in range(1, raw.size)}
        missing: list[int] = []
        deadline = now() + limit
        for rank, request in coming.items():
            if (missing and not wait_all) or not poll(request.Test, max(deadline - now(), 0.0)):
                missing.append(rank)
        if missing:
            for rank in missing:
                _give_up(coming[rank])
            told = missing if wait_all else missing[:1]
            raise CommError(f"Rank{'s' * (len(told) > 1)} {', '.join(map(str, told))} failed to pass monitoredBarrier in "
                            f"{1000 * limit:g} ms")
        for rank in coming:
            raw.Isend(nothing, rank, tag).Free()

    def end(self) -> None:
        """Its thread ends."""
        with self._news:
            self._ended = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()

    def free(self) -> None:
        """Collective."""
        self._raw.Free()


def _give_up(request: Any) -> None:
    request.Cancel()
    request.Free()
