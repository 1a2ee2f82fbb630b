"""A thread that pumps a channel while its rank computes: what comes is stored, and what others lack is answered."""

from __future__ import annotations

import threading

from mpiddl.transport.multicast.channel import Channel

LONGEST_WAIT_S = 0.05
"""In the sockets; then it looks whether it is to end."""


class PumpThread:
    """Begins at once and ends with `Free`. While the rank itself waits for the channel, the thread rests."""

    def __init__(self, channel: Channel):
        self._channel, self._ended = channel, False
        self._thread = threading.Thread(target=self._run, name="mpiddl multicast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        channel = self._channel
        try:
            while not self._ended:
                channel.unattended.wait()
                channel.pump()
                channel.medium.wait(min(channel.pause(), LONGEST_WAIT_S), channel.queued > 0)
        except BaseException as error:  # the rank meets it when it waits for the channel next
            channel.failure = error
            raise

    def Free(self) -> None:
        """End the thread."""
        self._ended = True
        self._channel.unattended.set()
        self._thread.join()
