"""The emulated card may get no core for seconds: it has more time to answer than a real one."""

from __future__ import annotations

import pytest

from mpiddl.transport.verbs import device

PATIENT = 19
"""4.096 us * 2^19, or 2.1 s."""


@pytest.fixture(autouse=True)
def patient(request, monkeypatch):
    if "gone" not in request.node.name:
        monkeypatch.setattr(device, "TIMEOUT", PATIENT)
