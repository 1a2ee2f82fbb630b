"""The state of the port, in one process: it is taken down and up again."""

from __future__ import annotations

import subprocess

import pytest

from mpiddl.errors import TransportError
from mpiddl.transport.verbs.ports import find_port


def link(state):
    subprocess.run(["ip", "link", "set", "d0", state], check=True)


def test_a_port_that_is_down():
    assert find_port().device == "rxe0"
    link("down")
    try:
        with pytest.raises(TransportError, match="verbs: port 1 of rxe0 is not active"):
            find_port()
    finally:
        link("up")
    assert find_port().address.kind == "RoCE v2"


def test_switched_off():
    with pytest.raises(TransportError, match="verbs: switched off"):
        find_port("off")
