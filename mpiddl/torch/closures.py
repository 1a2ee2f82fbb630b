"""Steps of optimisers that get a closure, which computes the loss and its gradient."""

from __future__ import annotations

from typing import Any

import torch


def called_first(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Call the closure of ``optimiser.step(closure)``, whose arguments are given, now, before a strategy takes the gradient.
    Returns what step gets instead.

    The optimisers of `torch.optim` call it once, before they update. L-BFGS and other optimisers may call it several times:
    theirs is left alone.
    """
    optimiser, positional = args[0], len(args) > 1
    closure = args[1] if positional else options.get("closure")
    kind = type(optimiser).step.__module__
    if closure is None or not kind.startswith("torch.optim.") or isinstance(optimiser, torch.optim.LBFGS):
        return args, options
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    return ((args[0], known, *args[2:]), options) if positional else (args, {**options, "closure": known})
