"""A signal's handler raises anywhere in a channel's work, which then goes on: nothing is lost, and nothing waits for ever."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from harness.lossy_medium import Network
from harness.multicast_rounds import exchange, figures, streams

pytestmark = pytest.mark.no_mpi


class Raised(BaseException):
    """By the handler."""


def raising(call, lines):
    """Call it; after so many lines of the channel's sources the handler raises. Returns whether it did."""

    def tracing(frame, event, argument):
        nonlocal lines
        if "multicast" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines -= 1
            if lines == 0:
                raise Raised
        return tracing

    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        call()
    except Raised:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("loss", [0.0, 0.1])
@pytest.mark.parametrize("slots", [1, 4])
def test_an_exception_anywhere(slots, loss):
    network, draws, raised = Network(3, loss=loss), np.random.default_rng(slots), 0
    made = streams(network, range(3), slots=slots)

    def interrupted(pump):
        def some():
            nonlocal raised
            while draws.random() < 0.5:
                raised += raising(pump, int(2 ** draws.uniform(0, 10)))
            pump()

        return some

    for channel in network.channels:
        channel.pump = interrupted(channel.pump)
    pairs = zip(network.channels, made, strict=True)
    network.run([exchange(*pair, rounds=9) for pair in pairs], 30.0)
    assert raised > 100 and figures(network)["placed"] == 2 * 3 * 99
