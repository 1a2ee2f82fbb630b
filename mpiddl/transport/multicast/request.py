"""Waiting for something that a channel brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpiddl.transport.comm import Comm
from mpiddl.transport.multicast.channel import Channel

LONGEST_WAIT_S = 0.005
"""In the sockets; then MPI is given a chance to move messages."""


class ChannelRequest:
    """Complete from the moment ``since()``, which is asked with the lock of the channel held; None: not yet."""

    def __init__(self, comm: Comm, channel: Channel, since: Callable[[], Any]):
        self._comm, self._channel, self._since = comm, channel, since

    def Wait(self) -> None:
        medium = self._channel.medium
        with self._channel.attended():
            looked = medium.now()
            while not self.Test():
                medium.wait(min(self._channel.pause(), LONGEST_WAIT_S), self._channel.queued > 0)
                if medium.now() - looked >= LONGEST_WAIT_S:
                    self._comm.progress()
                    looked = medium.now()

    def Test(self) -> bool:
        with self._channel.lock:
            if self._since() is not None:
                return True
            self._channel.pump()
            return self._since() is not None
