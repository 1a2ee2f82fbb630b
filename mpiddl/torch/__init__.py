"""PyTorch on mpiddl: `distribute`, and the `torch.distributed` backend "mpiddl", which importing this package registers.

The import starts no MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpiddl.torch.process_group_register import autoload

if TYPE_CHECKING:
    from mpiddl.torch.distributed_training import distribute as distribute

autoload()

__all__ = ["distribute"]


def __getattr__(name: str) -> Any:
    """``distribute`` is imported when it is first used: ``import torch`` imports this package, too."""
    if name != "distribute":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mpiddl.torch.distributed_training import distribute

    globals()[name] = distribute
    return distribute
