"""Messages over queue pairs: what travels how, credits, and which message is for which receive.

========================  =============================================================================================
mode                      what happens
========================  =============================================================================================
inline send               header and data are in the work request itself
eager send                header and data are copied into a registered buffer, and sent from there
rendezvous, read form     the sender tells where the data is; the receiver reads it into its array, and says so
rendezvous, write form    the sender asks; the receiver tells where its array is; the sender writes there, with immediate
========================  =============================================================================================

Sends and writes with immediate take a receive that the peer has posted. So the sender counts *credits*: as many as the peer has
receives. The peer gives credits back in the header of each message. If it has nothing to send, it does so in a message of its
own when it owes half of them. The last credit is kept for that message. So no message ever finds a peer without a receive.

Messages of two ranks under one tag are received in the order in which they were sent, whatever their mode.

Cost: inline and eager: one copy on each side at most. Rendezvous: no copies; a message and an answer before the data (write
form), or after it (read form).
Source: the modes: Liu, Wu and Panda 2004, doi:10.1023/B:IJPP.0000029272.69895.c1. How credits are counted is ours.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from mpiddl.errors import TransportError, UsageError
from mpiddl.memory import aligned_zeros
from mpiddl.transport.base import ANY_SOURCE, Envelope
from mpiddl.transport.verbs.message_state import HEADER, IMMEDIATE, Arrival, Entry, Form, Peer, Receive
from mpiddl.transport.verbs.operations import Operation, Operations
from mpiddl.transport.verbs.registrations import Registrations
from mpiddl.transport.verbs.work_requests import Completion, Device, Kind, Memory, WorkRequest

EAGER_BYTES = 8 << 10
"""As long as `mpiddl tune` has not measured it."""

NOTHING_ELSE = (0,) * 6
"""In the header of a message that only gives credits back."""

MOST_TAG = 2**31 - 1

MOST_PREPARED = 4096
"""Prepared work requests that are kept."""


class Messages:
    """The messages of one device.

    Parameters
    ----------
    device : Device
    eager_bytes : int
        Messages up to this size are copied into a registered buffer; larger ones are moved without copies.
    writes : bool
        Take the write form of the rendezvous, else the read form.

    Attributes
    ----------
    modes : dict of str to int
        How many messages this rank has sent in each mode.
    copied : int
        Bytes that were copied on this rank.
    groups : int
        The largest number of a group that was given; see `mpiddl.transport.verbs.transport`.
    """

    def __init__(self, device: Device, eager_bytes: int = EAGER_BYTES, writes: bool = False):
        if device.receives < 4:
            raise UsageError(f"receives: got {device.receives} for each peer, expected 4 or more")
        self.device, self.eager_bytes, self._writes = device, max(eager_bytes, device.inline - HEADER.size), writes
        self.operations = Operations(device, self._received, self._lost, self._flush_all)
        self.progress = self.operations.progress
        self.registrations = Registrations(device)
        self.modes = dict.fromkeys(("inline", "eager", "read", "write"), 0)
        self.copied = self.groups = 0
        self._slot = HEADER.size + self.eager_bytes
        self._peers = {peer: Peer(device.receives) for peer in range(device.size) if peer != device.rank}
        shape = max(device.size, 1), device.receives, self._slot
        self._incoming, self._outgoing = (aligned_zeros(prod(shape), np.uint8).reshape(shape) for _ in range(2))
        self._coming, self._going = (self.registrations.register(buffers).local for buffers in (self._incoming, self._outgoing))
        self._got, self._given = (buffers.reshape(-1).data for buffers in (self._incoming, self._outgoing))
        self._leaving: dict[tuple[int, int], Operation] = {}
        self._prepared: dict[tuple[int, int, int], Any] = {}
        self._arrived: list[Arrival] = []
        self._posted: list[Receive] = []
        for peer in self._peers:
            for number in range(device.receives):
                self._post_receive(peer, number)

    def send(self, array: np.ndarray, peer: int, group: int, tag: int) -> Operation:
        """Start to send a contiguous array."""
        self.device.check_process()
        if not 0 <= tag <= MOST_TAG:
            raise UsageError(f"tag: got {tag}, expected 0 to {MOST_TAG}")
        data = _bytes_of(array)
        operation = Operation(self.progress, peer, ("send", data.size))
        with self.operations.lock:
            if peer == self.device.rank:
                self._arrive(Arrival(peer, group, tag, 0, data.size, data.copy()))
                operation.finish()
                return operation
            state = self._peers[peer]
            if state.trouble is not None:
                operation.finish(state.trouble)
                return operation
            remote = None if data.size <= self.eager_bytes or self._writes else self.registrations.remote(data)  # it may fail
            state.numbers += 1
            if data.size <= self.eager_bytes:
                self.modes["inline" if HEADER.size + data.size <= self.device.inline else "eager"] += 1
                self._send(peer, Form.DATA, group, tag, state.numbers, data.size, data=data, operation=operation)
                return operation
            state.sending[state.numbers] = operation, data
            self.modes["write" if self._writes else "read"] += 1
            if self._writes:
                self._send(peer, Form.ASK, group, tag, state.numbers, data.size)
            else:
                self._send(peer, Form.OFFER, group, tag, state.numbers, data.size, remote)
        return operation

    def receive(self, array: np.ndarray, source: Any, group: int, tag: Any) -> Operation:
        """Start to receive a message of at most the size of a contiguous array."""
        self.device.check_process()
        data = _bytes_of(array)
        operation = Operation(self.progress, -1 if source is ANY_SOURCE else source, ("receive", data.size))
        posted = Receive(operation, data, group, source, tag)
        with self.operations.lock:
            found = next((arrival for arrival in self._arrived if posted.takes(arrival)), None)
            if found is not None:
                self._arrived.remove(found)
                self._take(posted, found)
            elif (trouble := self._trouble(source)) is not None:
                operation.finish(trouble)
            else:
                self._posted.append(posted)
        return operation

    def probe(self, source: Any, group: int, tag: Any) -> Envelope | None:
        """The envelope of a message that has come, if one has."""
        self.device.check_process()
        self.progress()
        with self.operations.lock:
            wanted = Receive(Operation(self.progress, -1, ("probe", 0)), np.empty(0, np.uint8), group, source, tag)
            found = next((arrival for arrival in self._arrived if wanted.takes(arrival)), None)
            if found is None and (trouble := self._trouble(source)) is not None:
                raise trouble
        return None if found is None else Envelope(found.source, found.tag)

    def _trouble(self, source: Any) -> Exception | None:
        """Why nothing can come from there."""
        if source is not ANY_SOURCE:
            return self._peers[source].trouble if source in self._peers else None
        return next((state.trouble for state in self._peers.values() if state.trouble is not None), None)

    # Sending

    def _send(self, peer: int, form: Form, group: int = 0, tag: int = 0, number: int = 0, nbytes: int = 0,
              memory: Memory | None = None, data: np.ndarray | None = None, operation: Operation | None = None) -> None:
        address, key = (memory.address, memory.key) if memory is not None else (0, 0)
        state = self._peers[peer]
        queue = state.waiting if form in (Form.DATA, Form.OFFER, Form.ASK) else state.urgent
        others = group, tag, number, nbytes, address, key
        queue.append(Entry(lambda: self._put(peer, form, others, data, operation), operation))
        self._flush(peer)

    def _flush_all(self) -> None:
        for peer, state in self._peers.items():
            if state.urgent or state.waiting:
                self._flush(peer)  # buffers may be free again

    def _flush(self, peer: int) -> None:
        """Send what waits, as far as there are credits and buffers."""
        state = self._peers[peer]
        while state.trouble is None:
            before, queue = self._leaving.get((peer, state.place)), state.urgent or state.waiting
            if before is not None and not before.done:
                return
            if queue and state.credits > 1:  # the last one is for giving credits back
                queue.popleft().go()
            elif state.owed >= self.device.receives // 2 and state.credits:
                self._put(peer, Form.CREDITS, NOTHING_ELSE)
            else:
                return

    def _put(self, peer: int, form: Form, others: tuple[int, ...], data: np.ndarray | None = None,
             operation: Operation | None = None) -> None:
        """Send a header, and the data behind it. ``others``: what the header has behind the credits."""
        state, length = self._peers[peer], HEADER.size
        place, at = state.place, self._at(peer, state.place)
        HEADER.pack_into(self._given, at, form, state.owed, *others)
        if data is not None and data.size:
            self._given[at + length : at + length + data.size] = data.data
            self.copied += data.size
            length += data.size
        state.owed, state.credits, state.place = 0, state.credits - 1, (place + 1) % self.device.receives
        failure = None
        if length > self.device.inline or not self.operations.post_again(peer, self._inline(peer, place, length)):
            self._leaving[peer, place] = started = self.operations.start(peer, Kind.SEND, self._going.part(at, length))
            failure = started.failure
        if operation is not None:
            operation.finish(failure)  # its bytes are copied

    def _inline(self, peer: int, place: int, length: int) -> Any:
        """A prepared work request that sends so many bytes of this buffer."""
        found = self._prepared.get((peer, place, length))
        if found is None:
            if len(self._prepared) >= MOST_PREPARED:
                for prepared in self._prepared.values():
                    self.device.release(prepared)
                self._prepared.clear()
            request = WorkRequest(0, Kind.SEND, self._going.part(self._at(peer, place), length), inline=True)
            found = self._prepared[peer, place, length] = self.device.prepare(peer, request)
        return found

    # Receiving

    def _post_receive(self, peer: int, number: int) -> None:
        self.device.post_receive(peer, number, self._coming.part(self._at(peer, number), self._slot))

    def _at(self, peer: int, number: int) -> int:
        """First byte of an eager buffer."""
        return (peer * self.device.receives + number) * self._slot

    def _received(self, completion: Completion) -> None:
        """A receive has ended. Its buffer is posted again when the message is taken out of it."""
        peer, state = completion.peer, self._peers[completion.peer]
        if state.trouble is not None:  # it came before the peer was lost, but is seen only now
            return
        if completion.immediate is not None:
            self._post_receive(peer, completion.number)
            state.owed += 1
            state.taking.pop(completion.immediate).finish()
        else:
            self._handle(peer, state, completion)
            self._post_receive(peer, completion.number)
            state.owed += 1
        self._flush(peer)

    def _handle(self, peer: int, state: Peer, completion: Completion) -> None:
        at = self._at(peer, completion.number)
        form, credits, group, tag, number, nbytes, address, key = HEADER.unpack_from(self._got, at)
        state.credits += credits
        if form == Form.DATA:
            data = self._incoming[peer, completion.number, HEADER.size : completion.nbytes]
            self._arrive(Arrival(peer, group, tag, number, nbytes, data))
        elif form == Form.OFFER:
            self._arrive(Arrival(peer, group, tag, number, nbytes, memory=Memory(address, nbytes, key)))
        elif form == Form.ASK:
            self._arrive(Arrival(peer, group, tag, number, nbytes))
        elif form == Form.PLACE:
            self._write(peer, state, number, Memory(address, nbytes, key))
        elif form in (Form.TAKEN, Form.REFUSED):
            operation, _ = state.sending.pop(number)
            operation.finish(self._refusal(peer, operation) if form == Form.REFUSED else None)
        elif form == Form.WITHDRAWN:
            operation = state.taking.pop(number & IMMEDIATE)
            operation.finish(self._refusal(peer, operation))

    def _arrive(self, arrival: Arrival) -> None:
        """To the receive that was posted first, or kept."""
        posted = next((posted for posted in self._posted if posted.takes(arrival)), None)
        if posted is not None:
            self._posted.remove(posted)
            self._take(posted, arrival)
        else:
            if arrival.data is not None:
                arrival.data = arrival.data.copy()  # the buffer is posted again
                self.copied += arrival.nbytes
            self._arrived.append(arrival)

    def _take(self, posted: Receive, arrival: Arrival) -> None:
        operation, target = posted.operation, posted.array[: arrival.nbytes]
        if arrival.nbytes > posted.array.size:
            if arrival.data is None:
                self._send(arrival.source, Form.TAKEN, number=arrival.number)  # its sender need not wait
            operation.finish(TransportError(f"verbs: got a message of {arrival.nbytes} bytes from rank {arrival.source}, "
                                            f"expected at most {posted.array.size}"))
        elif arrival.data is not None:
            target[:] = arrival.data
            self.copied += arrival.nbytes
            operation.finish()
        else:
            try:
                self._transfer(arrival, target, operation)
            except TransportError as error:  # its memory cannot be registered: the sender must not wait
                self._send(arrival.source, Form.REFUSED, number=arrival.number)
                operation.finish(error)

    def _transfer(self, arrival: Arrival, target: np.ndarray, operation: Operation) -> None:
        if (trouble := self._trouble(arrival.source)) is not None:  # it was announced before the peer was lost
            operation.finish(trouble)
        elif arrival.memory is not None:
            self._read(arrival.source, arrival, target, operation)
        else:
            place = self.registrations.remote(target)
            operation.keep(target)
            self._peers[arrival.source].taking[arrival.number & IMMEDIATE] = operation
            self._send(arrival.source, Form.PLACE, number=arrival.number, nbytes=arrival.nbytes, memory=place)

    def _read(self, peer: int, arrival: Arrival, target: np.ndarray, operation: Operation) -> None:
        """Read form: fetch the data, then say so."""

        def fetched(failure: Exception | None) -> None:
            if failure is None:
                self._send(peer, Form.TAKEN, number=arrival.number)
            operation.finish(failure)

        local = self.registrations.local(target)
        self.operations.start(peer, Kind.READ, local, arrival.memory, holds=target).then(fetched)

    def _write(self, peer: int, state: Peer, number: int, memory: Memory) -> None:
        """Write form: the receiver has said where to."""
        operation, data = state.sending[number]
        try:
            local = self.registrations.local(data)
        except TransportError as error:
            state.sending.pop(number)
            self._send(peer, Form.WITHDRAWN, number=number)
            operation.finish(error)
            return

        def written(failure: Exception | None) -> None:
            state.sending.pop(number, None)
            operation.finish(failure)

        def go() -> None:
            state.credits -= 1  # of the immediate
            self.operations.start(peer, Kind.WRITE_IMM, local, memory, number & IMMEDIATE, holds=data).then(written)

        state.urgent.append(Entry(go, operation))

    # Errors

    def _refusal(self, peer: int, operation: Operation) -> TransportError:
        return TransportError(f"verbs: {operation.what}: rank {peer} could not register its memory for it; its error says why")

    def check(self) -> None:
        """Raise the error with which a peer was lost, if one was."""
        if (trouble := self._trouble(ANY_SOURCE)) is not None:
            raise trouble

    def _lost(self, peer: int, error: Exception) -> None:
        if peer == self.device.rank:  # messages to this rank do not go over the device
            return
        state = self._peers[peer]
        state.trouble = error
        ended = [operation for operation, _ in state.sending.values()] + list(state.taking.values())
        ended += [operation for queue in (state.urgent, state.waiting) for _, operation in queue if operation is not None]
        ended += [posted.operation for posted in self._posted if posted.source in (peer, ANY_SOURCE)]
        self._posted = [posted for posted in self._posted if posted.source not in (peer, ANY_SOURCE)]
        for queue in (state.sending, state.taking, state.urgent, state.waiting):
            queue.clear()
        for operation in ended:
            operation.finish(error)

    def close(self) -> None:
        self.registrations.close()
        self.device.close()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in the order in which they lie in memory."""
    flat = array if array.flags.c_contiguous else array.T
    if not flat.flags.c_contiguous:
        raise UsageError(f"message: got an array of shape {array.shape} that is not contiguous, expected a contiguous one")
    return flat.reshape(-1).view(np.uint8)
