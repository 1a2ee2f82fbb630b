"""Registers the backend "mpiddl" with `torch.distributed`: by ``import mpiddl.torch``, or when torch loads its plug-ins.

torch calls `autoload` at the end of ``import torch`` (entry point of the group ``torch.backends``, torch 2.5 and newer). It
imports nothing but torch, and whatever goes wrong is only a warning: a plug-in must never break ``import torch``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from mpiddl.errors import UsageError
from mpiddl.torch.backend_name import NAME, SCHEME


def autoload() -> None:
    """Register the backend; torch without what it takes is a warning.

    Raises
    ------
    UsageError
        torch is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"torch: got {error}, expected PyTorch 2.2 or newer: pip install 'mpiddl[torch]'") from None
    try:
        register()
    except Exception as error:
        warnings.warn(f"mpiddl: the torch.distributed backend {NAME!r} was not registered: {error}", stacklevel=2)


def register() -> None:
    """Register the backend and the ``init_method`` "mpi://". It may be called several times; it starts no MPI."""
    import torch.distributed as dist

    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    dist.register_rendezvous_handler(SCHEME, _meet)
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = _without_address(module.init_process_group)


def _create(options: Any, backend_options: Any) -> Any:
    """What torch calls for each group that this rank is in."""
    from mpiddl.torch.process_group import create

    return create(options)


def _meet(url: str, **options: Any) -> Any:
    """The rendezvous of "mpi://"."""
    from mpiddl.torch.rendezvous import meet

    yield from meet(url, **options)


def _without_address(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """``init_process_group("mpiddl")`` means ``init_method="mpi://"`` where the call names no other way.

    torch's own default, "env://", asks for MASTER_ADDR before it looks at the backend. Calls with other backends are unchanged.
    """
    if getattr(init_process_group, "of_mpiddl", False):
        return init_process_group

    @functools.wraps(init_process_group)
    def init(backend: Any = None, init_method: Any = None, *args: Any, **options: Any) -> None:
        ours = isinstance(backend, str) and NAME in backend.lower()
        if ours and init_method in (None, "env://") and options.get("store") is None and len(args) < 4:
            init_method = f"{SCHEME}://"
        return init_process_group(backend, init_method, *args, **options)

    init.of_mpiddl = True  # type: ignore[attr-defined]
    return init
