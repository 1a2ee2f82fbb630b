"""Work requests as operations that can be waited for: room in the send queues, signals, errors, and peers that are gone.

Not every request is signalled: each completion costs time. A request whose bytes go inline is over for the caller when it is
posted. Of these, every `SIGNAL_EVERY`-th part of a queue is signalled, so that the queue is emptied before it is full.

A rank that only waits would not see that a peer has died. So after a second without a completion of a peer, it writes zero
bytes to it: the device reports a peer that does not answer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpiddl.errors import TransportError
from mpiddl.machine.clock import now
from mpiddl.transport.verbs.work_requests import Completion, Device, Kind, Memory, WorkRequest

SIGNAL_EVERY = 4
"""A queue has so many signals at least."""

SILENCE_S = 1.0
"""After which peers are asked whether they are there."""

NOTHING = Memory(0, 0, 0)

MEANINGS = {
    "IBV_WC_RETRY_EXC_ERR": "the peer does not answer: its process has ended, or the network is broken",
    "IBV_WC_RNR_RETRY_EXC_ERR": "the peer had no receive posted",
    "IBV_WC_WR_FLUSH_ERR": "an earlier operation to this peer has failed",
    "IBV_WC_REM_ACCESS_ERR": "the peer's memory is not registered any more, or smaller",
    "IBV_WC_REM_INV_REQ_ERR": "the peer's device refused the request",
    "IBV_WC_LOC_PROT_ERR": "memory of this rank is not registered any more",
    "IBV_WC_LOC_LEN_ERR": "a message was longer than the receive that was posted for it",
}


class Operation:
    """A started operation; a request (`mpiddl.transport.base.Request`).

    done : it has ended.
    failure : why it failed, or None.
    after : called with ``failure`` when it has ended.
    holds : memory that must not be freed before.
    """

    def __init__(self, progress: Callable[[], object], peer: int, what: tuple[str, int]):
        self._progress, self.peer, self._what, self.done = progress, peer, what, False
        self.failure: Exception | None = None
        self.after: Callable[[Exception | None], None] | None = None
        self.holds: object = None

    @property
    def what(self) -> str:
        """In words, for messages."""
        verb, nbytes = self._what
        return f"{verb} of {nbytes} bytes"

    def Test(self) -> bool:
        if not self.done:
            self._progress()
        if not self.done:  # looked at first: another thread may end it, which sets the failure before
            return False
        if self.failure is not None:
            raise self.failure
        return True

    def Wait(self) -> None:
        while not self.Test():
            os.sched_yield()

    def finish(self, failure: Exception | None = None) -> None:
        if not self.done:
            self.failure, self.holds = failure, None
            self.done = True
            if self.after is not None:
                self.after(failure)

    def keep(self, memory: object) -> None:
        """Let this memory not be freed before the end."""
        if not self.done:
            self.holds = memory

    def then(self, after: Callable[[Exception | None], None]) -> None:
        """Have this called when it ends, or now if it has."""
        self.after = after
        if self.done:
            after(self.failure)


@dataclass
class Queue:
    """The send queue of one peer.

    posted, over : number of work requests that were posted, and that are known to be complete.
    signal : number of the last one that is signalled.
    waiting : those for which there is no room, with their operations.
    running : operations of posted requests, by number.
    trouble : why the queue pair is broken, or "".
    """

    posted: int = 0
    over: int = 0
    signal: int = 0
    waiting: deque[tuple[WorkRequest, Operation | None]] = field(default_factory=deque)
    running: dict[int, Operation] = field(default_factory=dict)
    trouble: str = ""


class Operations:
    """All operations of one device.

    Parameters
    ----------
    device : Device
    received : callable
        ``received(completion)`` is called for each receive that has ended.
    lost : callable
        ``lost(peer, error)`` is called when a queue pair has broken.
    progressed : callable
        Called when completions have been taken.
    """

    def __init__(self, device: Device, received: Callable[[Completion], None], lost: Callable[[int, Exception], None],
                 progressed: Callable[[], None] = lambda: None):
        self.device, self._received, self._lost, self._progressed = device, received, lost, progressed
        self.queues = {peer: Queue() for peer in range(device.size)}
        self.lock = threading.RLock()
        self._looked = now()
        self._heard = dict.fromkeys(self.queues, self._looked)
        self._completions: deque[Completion] = deque()

    def start(self, peer: int, kind: Kind, local: Memory, remote: Memory | None = None, immediate: int = 0,
              values: tuple[int, int] = (0, 0), holds: object = None) -> Operation:
        """Post it, or keep it until there is room; in several work requests if it is larger than one can be.

        ``holds`` is not freed before the end.
        """
        self.device.check_process()
        operation = Operation(self.progress, peer, (kind.value, local.nbytes))
        with self.lock:
            queue, most = self.queues[peer], self.device.largest
            if queue.trouble:
                operation.finish(self._error(peer, operation.what, queue.trouble))
                return operation
            inline = local.nbytes <= self.device.inline and kind in (Kind.SEND, Kind.WRITE, Kind.WRITE_IMM)
            last = max(local.nbytes - 1, 0) // most * most
            for begin in range(0, last, most):
                part = kind if kind is Kind.READ else Kind.WRITE
                queue.waiting.append((WorkRequest(0, part, local.part(begin, most), _part(remote, begin, most)), None))
            rest = local.nbytes - last
            request = WorkRequest(0, kind, local.part(last, rest), _part(remote, last, rest), immediate, values, inline)
            queue.waiting.append((request, operation))
            operation.keep(holds)
            self._fill(peer)
        return operation

    def post_again(self, peer: int, prepared: Any) -> bool:
        """Post a prepared request (`Device.prepare`); False if there is no room, or others wait. Called with the lock held."""
        queue, device = self.queues[peer], self.device
        number = queue.posted + 1
        if queue.trouble or queue.waiting or number - queue.over > device.sends or device.forked:
            return False
        signalled = number - queue.signal >= max(device.sends // SIGNAL_EVERY, 1)
        try:
            device.post_again(peer, prepared, number, signalled)
        except TransportError as error:
            self._break(peer, str(error))
            return False
        queue.posted = number
        if signalled:
            queue.signal = number
        return True

    def _fill(self, peer: int) -> None:
        """Post what waits, as far as there is room."""
        queue, device = self.queues[peer], self.device
        while queue.waiting and queue.posted - queue.over < device.sends:
            request, operation = queue.waiting.popleft()
            number = queue.posted + 1
            signalled = not request.inline or number - queue.signal >= max(device.sends // SIGNAL_EVERY, 1)
            try:
                device.post(peer, request._replace(number=number, signalled=signalled))
            except TransportError as error:
                if operation is not None:
                    operation.finish(error)
                self._break(peer, str(error))
                return
            queue.posted = number
            if signalled:
                queue.signal = number
            if operation is not None:
                if request.inline:
                    operation.finish()  # its bytes are copied
                else:
                    queue.running[number] = operation

    def progress(self) -> bool:
        """Take what has ended; returns whether something has."""
        self.device.check_process()
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self._completions += self.device.poll()
            found, moment = bool(self._completions), now()
            while self._completions:  # an exception of a signal's handler does not lose the others
                completion = self._completions.popleft()
                self._heard[completion.peer] = moment
                self._take(completion)
            if found:
                self._progressed()
            if moment - self._looked > SILENCE_S / 2:
                self._looked = moment
                self._probe(moment - SILENCE_S)
            return found
        finally:
            self.lock.release()

    def _take(self, completion: Completion) -> None:
        peer = completion.peer
        if completion.trouble:
            self._fail(completion)
        elif completion.received:
            self._received(completion)
        else:
            queue = self.queues[peer]
            queue.over = max(queue.over, completion.number)
            for number in [number for number in queue.running if number <= completion.number]:
                queue.running.pop(number).finish()
            self._fill(peer)

    def _fail(self, completion: Completion) -> None:
        queue = self.queues[completion.peer]
        if not queue.trouble:
            operation = None if completion.received else queue.running.get(completion.number)
            what = operation.what if operation is not None else "receive" if completion.received else "operation"
            self._break(completion.peer, completion.trouble, what)

    def _break(self, peer: int, trouble: str, what: str = "operation") -> None:
        """All that is under way to a peer fails."""
        queue = self.queues[peer]
        queue.trouble = trouble
        ended = [*queue.running.values(), *(operation for _, operation in queue.waiting if operation is not None)]
        queue.running.clear()
        queue.waiting.clear()
        for operation in ended:
            operation.finish(self._error(peer, operation.what, trouble))
        self._lost(peer, self._error(peer, what, trouble))

    def drain(self) -> None:
        """Wait until all requests that were posted, and those that wait for room, are complete or have failed."""
        for peer, queue in self.queues.items():
            while not queue.trouble and not self.device.closed and (queue.waiting or queue.over < queue.posted):
                with self.lock:
                    if not queue.waiting and queue.signal <= queue.over and queue.posted - queue.over < self.device.sends:
                        self._ask(peer, queue)  # the last requests were not signalled
                if not self.progress():
                    os.sched_yield()

    def _error(self, peer: int, what: str, trouble: str) -> TransportError:
        if trouble.startswith("verbs: "):
            return TransportError(trouble)
        meaning = MEANINGS.get(trouble, "")
        return TransportError(f"verbs: {what} to rank {peer} failed: {trouble}" + (f" ({meaning})" if meaning else ""))

    def _probe(self, since: float) -> None:
        """Ask each peer that was not heard since then and of which no completion is to come."""
        for peer, queue in self.queues.items():
            asked = queue.trouble or queue.signal > queue.over or queue.posted - queue.over >= self.device.sends
            if peer != self.device.rank and not asked and self._heard[peer] < since:
                self._heard[peer] = now()
                self._ask(peer, queue)

    def _ask(self, peer: int, queue: Queue) -> None:
        """Write nothing, signalled."""
        request = WorkRequest(queue.posted + 1, Kind.WRITE, NOTHING, NOTHING)
        try:
            self.device.post(peer, request)
        except TransportError as error:
            self._break(peer, str(error))
            return
        queue.posted = queue.signal = request.number


def _part(memory: Memory | None, begin: int, nbytes: int) -> Memory | None:
    return None if memory is None else memory.part(begin, nbytes)
