"""The state of the port, which rank 0 takes down and up again."""

from __future__ import annotations

import subprocess

import pytest

from mpiddl.errors import TransportError
from mpiddl.transport.verbs.ports import find_port

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def down(link):
    """The interface is down during the test."""

    def turn(state):
        link.Barrier()
        if link.rank == 0:
            subprocess.run(["ip", "link", "set", "d0", state], check=True)
        link.Barrier()

    assert find_port().device == "rxe0"
    turn("down")
    yield
    turn("up")
    assert find_port().address.kind == "RoCE v2"


def test_a_port_that_is_down(down):
    with pytest.raises(TransportError, match="verbs: port 1 of rxe0 is not active"):
        find_port()


def test_switched_off():
    with pytest.raises(TransportError, match="verbs: switched off"):
        find_port("off")
