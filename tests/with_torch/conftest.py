"""What the tests of PyTorch share. The folder is not called torch: without PyTorch, ``import torch`` would find it instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def dist() -> Iterator[Any]:
    """`torch.distributed` with a default group of all ranks, by the backend "mpiddl"."""
    import torch.distributed as dist

    import mpiddl.torch  # noqa: F401

    dist.init_process_group("mpiddl")
    yield dist
    if dist.is_initialized():
        dist.destroy_process_group()
